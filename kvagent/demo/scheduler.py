"""What to compute in the next step: continuous batching over a fixed number of blocks.

A request gets all blocks that it can ever need when it is admitted, so a running one never has to
give way. Prompts are computed in chunks beside the decoding of others, within a budget of tokens.

    WAITING --> RUNNING --> FINISHED        computed here
    WAITING --> FETCHING --> RUNNING        with a ticket: all but the last prompt token are fetched

Not here: the model, text, sockets, time.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from kvagent.demo.blocks import BlockManager
from kvagent.demo.config import EngineOptions
from kvagent.demo.model import Chunk
from kvagent.demo.request import Output, Request, State
from kvagent.demo.transfer import Transfers


@dataclass(frozen=True)
class Scheduled:
    """A chunk of the next step and the request that it belongs to."""

    request: Request
    chunk: Chunk


class Scheduler:
    """`transfers` is None in an engine without a sidecar: then every prompt is computed here."""

    def __init__(self, options: EngineOptions, transfers: Transfers | None) -> None:
        self.blocks = BlockManager(
            options.num_blocks, options.block_size, prefix_cache=options.prefix_cache
        )
        self._transfers = transfers
        self._budget = options.max_batch_tokens
        self._max_requests = options.max_requests
        self._requests: dict[str, Request] = {}
        self._waiting: deque[Request] = deque()
        self._running: list[Request] = []

    @property
    def num_requests(self) -> int:
        """Requests that are not finished."""
        return len(self._requests)

    def add(self, request: Request) -> None:
        self._requests[request.id] = request
        self._waiting.append(request)

    def abort(self, request_id: str) -> None:
        """Nobody wants the answer any more; does nothing when there is no such request."""
        request = self._requests.get(request_id)
        if request is None:
            if self._transfers:  # finished, but its offer may be open
                self._transfers.cancel(request_id)
        elif request.state is State.FETCHING:
            request.cancelled = True  # its blocks are written to until `poll` says otherwise
            assert self._transfers
            self._transfers.cancel(request_id)
        else:
            if request.state is State.WAITING:
                self._waiting.remove(request)
                self.refuse(request)
            else:
                self._running.remove(request)
            self._close(request, Output(finish_reason="abort"))

    def refuse(self, request: Request) -> None:
        """The request will not be served: its ticket, if it has one, is not needed."""
        if self._transfers and request.has_ticket:
            self._transfers.release(request)

    def poll(self) -> None:
        """Takes notice of finished transfers."""
        if self._transfers is None:
            return
        progress = self._transfers.poll()
        for blocks in progress.sent:
            self.blocks.free(blocks)
        for request, failure in progress.fetched:
            if request.cancelled:
                self._close(request, Output(finish_reason="abort"))
                continue
            if failure is None:
                # The last token is computed again, for its logits.
                request.num_computed = len(request.prompt) - 1
                self._publish(request)
            else:
                request.kv_transfer["failed"] = failure
            self._run(request)

    def schedule(self) -> list[Scheduled]:
        """Admits what fits, and returns the chunks of the next step."""
        while self._waiting and self._admit(self._waiting[0]):
            self._waiting.popleft()
        budget = self._budget
        step = []
        # Those who decode first: a long prompt must not hold them up.
        for request in sorted(self._running, key=lambda request: request.todo > 1):
            start = request.num_computed
            end = start + min(request.todo, budget)
            if end > start:
                budget -= end - start
                table = request.blocks[: self.blocks.blocks_for(end)]
                sample = end == request.num_tokens
                step.append(
                    Scheduled(request, Chunk(request.tokens(start, end), start, table, sample))
                )
        return step

    def computed(self, step: list[Scheduled]) -> None:
        """The chunks are in the cache."""
        size = self.blocks.block_size
        for scheduled in step:
            chunk = scheduled.chunk
            scheduled.request.num_computed = chunk.end
            if chunk.end // size > chunk.start // size:
                self._publish(scheduled.request)

    def finish(self, request: Request, reason: str, text: str, token_ids: tuple[int, ...]) -> None:
        """The request has its last token."""
        self._running.remove(request)
        ticket = self._transfers.offer(request) if self._transfers and request.offers else None
        if ticket is not None:
            request.blocks = []  # they belong to the offer now
        self._close(request, Output(text, token_ids, reason, ticket, request.kv_transfer))

    def fail_all(self) -> None:
        """The engine has broken down: no request gets an answer."""
        for request in self._requests.values():
            request.emit(Output(finish_reason="error"))
        self._requests.clear()

    def _admit(self, request: Request) -> bool:
        if len(self._requests) - len(self._waiting) >= self._max_requests:
            return False
        prompt = request.prompt
        # At least one token is left to compute, and its block is the request's own.
        cached = self.blocks.match(prompt[: len(prompt) - 1])
        own = self.blocks.allocate(self.blocks.blocks_for(request.max_cached) - len(cached))
        if own is None:
            self.blocks.free(cached)
            return False
        request.blocks = cached + own
        request.num_computed = len(cached) * self.blocks.block_size
        if not request.has_ticket:
            self._run(request)
        elif self._transfers is None:
            request.kv_transfer["failed"] = "this engine has no sidecar"
            self._run(request)
        elif request.todo == 1:
            self._transfers.release(request)
            self._run(request)
        else:
            request.state = State.FETCHING
            self._transfers.fetch(request, start_token=request.num_computed)
        return True

    def _run(self, request: Request) -> None:
        request.state = State.RUNNING
        request.kv_transfer["cached_tokens"] = request.num_computed
        self._running.append(request)

    def _publish(self, request: Request) -> None:
        self.blocks.publish(request.tokens(0, request.num_computed), request.blocks)

    def _close(self, request: Request, output: Output) -> None:
        request.state = State.FINISHED
        self.blocks.free(request.blocks)
        del self._requests[request.id]
        request.emit(output)
