"""The step loop: one thread that schedules, computes, samples and sends out tokens.

Everything that touches the scheduler runs on that thread; other threads put calls into its inbox.

A sidecar that is gone does not come back: one that is started in its place knows no worker and no
cache. So the engine ends too, and whoever supervises it starts it again. On the host it first
finishes its requests: memory of the cache stays as long as somebody maps it. GPU memory does not.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from kvagent.demo.config import EngineOptions
from kvagent.demo.request import Output, Request
from kvagent.demo.scheduler import Scheduler
from kvagent.demo.tokenizer import load_tokenizer
from kvagent.demo.transfer import Transfers, connect_scheduler
from kvagent.demo.worker import Workers

logger = logging.getLogger(__name__)

_FETCH_POLL = 0.001
_OFFER_POLL = 0.010
"""Seconds between two looks at the transfers when there is nothing to compute."""


def _nothing() -> None:
    """Put into the inbox to wake the loop."""


class Engine:
    """An engine with all its ranks; `start` it, in the end `close` it. For the main thread."""

    def __init__(self, options: EngineOptions) -> None:
        self.options = options
        self.workers = Workers(options)
        self.config = self.workers.config
        self._transfers: Transfers | None = None
        try:
            self.tokenizer = load_tokenizer(Path(options.model))
            if options.socket_template is not None:
                self._transfers = connect_scheduler(options)
        except BaseException:
            self.workers.close()
            raise
        self.scheduler = Scheduler(options, self._transfers)
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._closing = False
        self.failed = False
        """Takes no more requests, and will end or has."""
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self, on_failure: Callable[[], None] = lambda: None) -> None:
        """`on_failure` is called on the engine's thread when it ends by itself."""
        self._on_failure = on_failure
        self._thread.start()
        self.workers.watch(self._lost)
        if self._transfers is not None:
            threading.Thread(
                target=self._watch_sidecar, args=(self._transfers,), name="sidecar", daemon=True
            ).start()

    def close(self) -> None:
        """Ends the loop after the step that it is in, and all processes."""
        self._closing = True
        self._inbox.put(_nothing)
        if self._thread.is_alive():
            self._thread.join()
        if self._transfers is not None:
            self._transfers.close()
        self.workers.close()

    def submit(self, request: Request) -> None:
        """Its outputs go to `request.emit`. ValueError when it can never be served."""
        problem = self._problem(request)
        if problem:
            self._inbox.put(partial(self.scheduler.refuse, request))
            raise ValueError(problem)
        self._inbox.put(partial(self.scheduler.add, request))

    def abort(self, request_id: str) -> None:
        """Also for a request that has just finished: an offer that nobody will use is withdrawn."""
        self._inbox.put(partial(self.scheduler.abort, request_id))

    def _problem(self, request: Request) -> str:
        capacity = self.options.num_blocks * self.options.block_size
        longest = min(capacity, self.config.max_positions)
        if self.failed:
            return "this engine takes no more requests; its log says why"
        if not request.prompt:
            return "the prompt is empty"
        if not all(0 <= token < self.config.vocab_size for token in request.prompt):
            return f"token ids must be from 0 to {self.config.vocab_size - 1}"
        if request.sampling.max_tokens < 1:
            return "max_tokens must be at least 1"
        if request.max_cached > longest:
            return (
                f"{len(request.prompt)} prompt tokens and max_tokens {request.sampling.max_tokens} "
                f"are more than this engine holds ({longest})"
            )
        return ""

    def _watch_sidecar(self, transfers: Transfers) -> None:
        transfers.wait_lost()
        self._lost("the sidecar of rank 0 is gone")

    def _lost(self, what: str) -> None:
        """On any thread."""
        if self._closing or self.failed:
            return
        logger.error("%s: this engine takes no more requests and ends", what)
        self.failed = True
        self._inbox.put(_nothing)

    @property
    def _over(self) -> bool:
        finished = not self.workers.on_host or self.scheduler.num_requests == 0
        return self._closing or (self.failed and finished)

    def _run(self) -> None:
        try:
            while not self._over:
                if not self._step():
                    self._wait()
                self._take_calls()
        except Exception:
            logger.exception("the engine has broken down")
            self.failed = True
        if self.failed:
            self.scheduler.fail_all()
            self._on_failure()

    def _take_calls(self) -> None:
        while not self._inbox.empty():
            self._inbox.get()()

    def _wait(self) -> None:
        """Until something happens."""
        transfers = self._transfers
        timeout = None
        if transfers is not None and (transfers.fetching or transfers.offered):
            timeout = _FETCH_POLL if transfers.fetching else _OFFER_POLL
        try:
            self._inbox.get(timeout=timeout)()
        except queue.Empty:
            pass

    def _step(self) -> bool:
        """One step; False when there was nothing to compute."""
        self.scheduler.poll()
        step = self.scheduler.schedule()
        if not step:
            return False
        started = time.monotonic()
        logits = self.workers.forward([scheduled.chunk for scheduled in step])
        self.scheduler.computed(step)
        sampled = [scheduled.request for scheduled in step if scheduled.chunk.sample]
        for scheduled in step:
            scheduled.request.started = scheduled.request.started or started
        for request, row in zip(sampled, logits, strict=True):
            self._token(request, request.sample(row))
        return True

    def _token(self, request: Request, token: int) -> None:
        now = time.monotonic()
        request.first_token = request.first_token or now
        request.output.append(token)
        text, reason = request.stream.push(token), None
        eos = token in self.config.eos_ids and not request.sampling.ignore_eos
        if eos or request.stream.stopped:
            reason = "stop"
        elif len(request.output) == request.sampling.max_tokens:
            reason = "length"
        if reason is None:
            request.emit(Output(text, (token,)))
            return
        decoding = now - request.first_token
        request.kv_transfer["prefill_ms"] = (request.first_token - request.started) * 1e3
        if decoding > 0:
            request.kv_transfer["decode_tokens_per_s"] = (len(request.output) - 1) / decoding
        self.scheduler.finish(request, reason, text + request.stream.finish(), (token,))
