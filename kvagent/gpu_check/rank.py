"""One rank of an engine that is checked: a process that does what it is told, a line at a time.

Rank 0 is the scheduler too. Bytes are compared by digests of what plain indexing finds, which
knows nothing of kvagent's plans.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

import msgspec
import torch
from torch import Tensor

from kvagent import (
    EmbeddedAgent,
    EngineClient,
    FullAttentionSpec,
    ModelInfo,
    WorkerClient,
    WorkerInfo,
)
from kvagent.core.specs import rank_heads
from kvagent.errors import KVAgentError
from kvagent.gpu_check.setup import Answer, Command, RankSetup

LONG = 60.0
GUARD = 7.0
_PR_SET_PDEATHSIG = 1


class Rank:
    def __init__(self, setup: RankSetup) -> None:
        self._setup = setup
        side = setup.side
        self._cuda = side.device != "cpu"
        self._device = torch.device("cuda:0" if self._cuda else "cpu")
        self._blocks = setup.num_tokens // side.block_size
        self._spec = FullAttentionSpec(
            block_size=side.block_size,
            num_kv_heads=setup.heads,
            head_size=setup.head_size,
            dtype="bfloat16",
            axes=side.axes,
        )
        self._held = rank_heads(setup.rank, side.tp, setup.heads)
        info = WorkerInfo(
            engine_id=setup.engine_id,
            tp_rank=setup.rank,
            tp_size=side.tp,
            leader=setup.leader,
            model=ModelInfo(name="gpu_check", num_layers=setup.layers),
        )
        specs = {f"layer.{i}": self._spec for i in range(setup.layers)}
        self._engine: EngineClient | EmbeddedAgent | None = None
        if setup.socket:
            worker = WorkerClient(setup.socket, timeout=LONG)
            worker.join(info)
            self.caches = worker.allocate_kv_caches(specs, self._blocks, self._device)
            self._agent: EmbeddedAgent | WorkerClient = worker
        else:
            agent = self._agent = EmbeddedAgent(kv_buffer=side.kv_buffer)
            agent.join(info)
            self.caches = {name: self._tensor() for name in specs}
            agent.register_kv_caches(self.caches, specs)
        self.endpoint = self._agent.endpoint

    def _tensor(self) -> Tensor:
        """An engine's own, as `allocate_kv_caches` would have it."""
        extents = {
            "kv": 2,
            "block": self._blocks,
            "token": self._spec.block_size,
            "head": self._held[1] - self._held[0],
            "channel": self._spec.head_size,
        }
        shape = [extents[axis] for axis in self._spec.axes]
        return torch.zeros(shape, dtype=torch.bfloat16, device=self._device)

    def do(self, command: Command) -> Answer:
        work: Callable[[Command], Answer] = getattr(self, f"_{command.do}")
        return work(command)

    def _ready(self, _: Command) -> Answer:
        if self._setup.socket:
            self._engine = EngineClient(self._setup.socket)
        else:
            assert isinstance(self._agent, EmbeddedAgent)
            self._engine = self._agent
        self._engine.wait_ready(LONG)
        return Answer()

    def _fill(self, _: Command) -> Answer:
        for cache in self.caches.values():
            cache.normal_()
        self._finish()
        return Answer()

    def _guard(self, _: Command) -> Answer:
        for cache in self.caches.values():
            cache.fill_(GUARD)
        self._finish()
        return Answer()

    def _offer(self, command: Command) -> Answer:
        event, pending, begin = None, False, time.monotonic()
        assert self._engine is not None
        if command.late:
            event = self._compute()
            pending = not event.query()
        ticket = self._engine.offer(command.name, command.blocks, command.tokens, event)
        return Answer(ticket=ticket, seconds=time.monotonic() - begin, pending=pending)

    def _compute(self) -> Any:
        """Starts a step that takes a while and then writes the cache; an event behind it."""
        work = torch.randn(4096, 4096, device=self._device)
        for _ in range(200):
            work = torch.tanh(work @ work)
        for cache in self.caches.values():
            cache.normal_()
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        return event

    def _fetch(self, command: Command) -> Answer:
        assert self._engine is not None
        self._engine.fetch(command.name, command.ticket, command.blocks, command.start)
        until = time.monotonic() + LONG
        while time.monotonic() < until:
            out = self._engine.step()
            if command.name in (out.finished_recving or ()):
                # From here on a kernel on any stream has to see the bytes.
                failure = out.failed_recving.get(command.name, "")
                if failure:
                    return Answer(failure=failure)
                stats = (out.kv_connector_stats or {})["fetches"][command.name]
                return Answer(stats=msgspec.to_builtins(stats))
            time.sleep(0.0005)
        return Answer(failure="the fetch did not end")

    def _digest(self, command: Command) -> Answer:
        stream = torch.cuda.Stream() if self._cuda else None  # type: ignore[no-untyped-call]
        with torch.cuda.stream(stream):  # does nothing with None
            return self._look(command)

    def _look(self, command: Command) -> Answer:
        outside = [block for block in range(self._blocks) if block not in command.blocks]
        hashes = [hashlib.sha256() for _ in range(*self._held)]
        clean = True
        for name in sorted(self.caches):
            cache = self._canonical(self.caches[name])
            rows = cache[:, :, list(command.blocks)].flatten(2, 3)
            wanted = rows[:, :, command.start : command.tokens].contiguous()
            for head, digest in enumerate(hashes):
                digest.update(wanted[:, head].view(torch.uint8).cpu().numpy().tobytes())
            clean = clean and all(
                bool((part == GUARD).all())
                for part in (
                    cache[:, :, outside],
                    rows[:, :, : command.start],
                    rows[:, :, command.tokens :],
                )
            )
        found = {
            str(head): digest.hexdigest()
            for head, digest in zip(range(*self._held), hashes, strict=True)
        }
        return Answer(digests=found, clean=clean)

    def _canonical(self, cache: Tensor) -> Tensor:
        order = ("kv", "head", "block", "token", "channel")
        return cache.permute([self._spec.axes.index(axis) for axis in order])

    def _copy(self, _: Command) -> Answer:
        """How long a plain copy of the caches takes, on the device."""
        source = list(self.caches.values())
        target = [torch.empty_like(cache) for cache in source]
        best = float("inf")
        for _round in range(4):
            begin = time.perf_counter()
            for one, other in zip(target, source, strict=True):
                one.copy_(other)
            self._finish()
            best = min(best, time.perf_counter() - begin)
        nbytes = sum(cache.nbytes for cache in source)
        return Answer(seconds=best, stats={"bytes": float(nbytes)})

    def _finish(self) -> None:
        if self._cuda:
            torch.cuda.synchronize()

    def close(self) -> None:
        if isinstance(self._engine, EngineClient):
            self._engine.close()
        self._agent.close()


def main() -> None:
    setup = msgspec.json.decode(sys.argv[1], type=RankSetup)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != setup.parent:
        sys.exit("the parent is gone")
    logging.basicConfig(level=logging.INFO, format="%(name)s: %(message)s")
    torch.set_num_threads(1)
    say = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # UCX writes there, too
    rank = None
    try:
        rank = Rank(setup)
        first = Answer(endpoint=rank.endpoint)
    except KVAgentError as error:
        first = Answer(failure=f"{type(error).__name__}: {error}")
    say.write(msgspec.json.encode(first) + b"\n")
    say.flush()
    if rank is None:
        sys.exit(1)
    decoder = msgspec.json.Decoder(Command)
    for line in sys.stdin.buffer:
        try:
            answer = rank.do(decoder.decode(line))
        except (KVAgentError, RuntimeError) as error:
            answer = Answer(failure=f"{type(error).__name__}: {error}")
        say.write(msgspec.json.encode(answer) + b"\n")
        say.flush()
    rank.close()


if __name__ == "__main__":
    main()
