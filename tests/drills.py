"""Requests between two engines in a drill, and what must be true of each whatever goes wrong.

Of a request: exactly one end on each side; a good one has the bytes that were offered; blocks that
were reported free are not written any more, and those of the producer are used again at once.
Afterwards: nothing is left in any table of any sidecar.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from tests.harness import GUARD, Engine

LONG = 60.0
"""Seconds; a bound against hangs."""
BLOCKS = 3
"""Of one request."""

Status = Callable[[], Mapping[str, Any]]


@dataclass
class Request:
    name: str
    start: int
    tokens: int
    ticket: dict[str, Any]
    remote: list[int]
    local: list[int]
    """Empty for one that is not fetched."""
    values: dict[str, torch.Tensor]
    sent: bool = False
    received: bool = False
    cause: str | None = None
    moments: list[Any] = field(default_factory=list)
    """What is still to be done with it; the test's own."""

    @property
    def ended(self) -> bool:
        return self.sent and (self.received or not self.local)


class Traffic:
    """`poll` often: it takes the engines' steps, and checks what they say."""

    def __init__(self, producer: Engine, consumer: Engine, seed: int = 0) -> None:
        self.producer, self.consumer = producer, consumer
        self.requests: dict[str, Request] = {}
        """Those that have not ended on both sides."""
        self.ends: dict[str, str] = {}
        """The cause of each fetch that ended, "" when it is good."""
        self._done: set[tuple[str, str]] = set()
        self._generator = torch.Generator().manual_seed(seed)
        self._free = [
            [list(range(first, first + BLOCKS)) for first in range(0, e.num_blocks - 2, BLOCKS)]
            for e in (producer, consumer)
        ]
        for caches in consumer.caches:
            for cache in caches.values():
                cache.fill_(GUARD)

    @property
    def room(self) -> bool:
        return all(self._free)

    def offer(self, name: str, *, fetched: bool = True, start: int = 0) -> Request:
        """New bytes, offered; their fetch has yet to be started."""
        remote = self._free[0].pop(0)
        local = self._free[1].pop(0) if fetched else []
        tokens = BLOCKS * self.producer.spec.block_size
        values = {layer: self._write(layer, remote) for layer in self.producer.caches[0]}
        ticket = self.producer.client.offer(name, remote, tokens)
        request = Request(name, start, tokens, ticket, remote, local, values)
        self.requests[name] = request
        return request

    def fetch(self, request: Request) -> None:
        assert self._guarded(request.local), f"{request.name}: its blocks were written"
        self.consumer.client.fetch(request.name, request.ticket, request.local, request.start)

    def start(self, name: str, start: int = 0) -> Request:
        request = self.offer(name, start=start)
        self.fetch(request)
        return request

    def poll(self) -> None:
        out = self.producer.client.step()
        for name in out.finished_sending or ():
            self._once(name, "sent")
            request = self.requests[name]
            request.sent = True
            self._scribble(request.remote)
            self._free[0].append(request.remote)
        out = self.consumer.client.step()
        for name in out.finished_recving or ():
            self._once(name, "received")
            request = self.requests[name]
            request.received = True
            request.cause = self.ends[name] = out.failed_recving.get(name, "")
            if request.cause:
                assert set(request.local) <= out.invalid_block_ids
            else:
                self._compare(request)
            self._guard(request.local)
            self._free[1].append(request.local)
        for request in [r for r in self.requests.values() if r.ended]:
            del self.requests[request.name]

    def until(self, done: Callable[[], object], timeout: float = LONG) -> None:
        until = time.monotonic() + timeout
        while not done():
            assert time.monotonic() < until, f"not within {timeout} s: {self._open()}"
            self.poll()
            time.sleep(0.001)

    def finish(self, statuses: Sequence[Status], timeout: float = LONG) -> None:
        """Every request ends, and leaves nothing behind."""
        self.until(lambda: not self.requests, timeout)
        until = time.monotonic() + timeout
        while found := [each for status in statuses for each in residue(status())]:
            assert time.monotonic() < until, found
            self.poll()  # a second end of anything would show here
            time.sleep(0.01)
        for blocks in self._free[1]:
            assert self._guarded(blocks), "written after the end"

    # ------------------------------------------------------------ inside

    def _open(self) -> list[str]:
        return [f"{r.name}: sent={r.sent} received={r.received}" for r in self.requests.values()]

    def _once(self, name: str, what: str) -> None:
        assert (name, what) not in self._done, f"{name} was {what} twice"
        assert name in self.requests, f"{name} was {what}, and had ended"
        self._done.add((name, what))

    def _write(self, layer: str, blocks: Sequence[int]) -> torch.Tensor:
        """Random values for all heads: (kv, head, block, token, channel)."""
        size = len(self.producer.caches)
        held = self.producer.heads // size
        for rank, caches in enumerate(self.producer.caches):
            view = self.producer.canonical(caches[layer])[:, :, blocks]
            if rank == 0:
                shape = (view.shape[0], held * size, *view.shape[2:])
                values = torch.randn(shape, generator=self._generator)
            part = values[:, rank * held : (rank + 1) * held]
            self.producer.canonical(caches[layer])[:, :, blocks] = part
        return values

    def _compare(self, request: Request) -> None:
        for layer, values in request.values.items():
            for head in range(self.producer.heads):
                want = values[:, head].flatten(1, 2)
                got = self.consumer.tokens(layer, request.local, head)
                first = request.start
                same = torch.equal(got[:, first : request.tokens], want[:, first : request.tokens])
                assert same, f"{request.name}: wrong bytes in {layer}, head {head}"

    def _views(self, engine: Engine) -> list[torch.Tensor]:
        return [engine.canonical(cache) for caches in engine.caches for cache in caches.values()]

    def _scribble(self, blocks: list[int]) -> None:
        """Another request uses the producer's blocks."""
        for view in self._views(self.producer):
            view[:, :, blocks] = -1.0

    def _guard(self, blocks: list[int]) -> None:
        for view in self._views(self.consumer):
            view[:, :, blocks] = GUARD

    def _guarded(self, blocks: list[int]) -> bool:
        return all(bool((v[:, :, blocks] == GUARD).all()) for v in self._views(self.consumer))


def residue(status: Mapping[str, Any]) -> list[str]:
    """What a sidecar still holds, by its /status; [] when it is at rest."""
    held = {
        f"ledger.{state}": count for state, count in status["ledger"].items() if state != "free"
    }
    held |= {f"leases.{s}": n for s, n in status["leases"].items() if s != "tombstones"}
    held |= {f"fetches.{state}": count for state, count in status["fetches"].items()}
    held |= {name: status[name] for name in ("unacknowledged_reports", "parts_reading")}
    where = f"{status['engine_id']}/{status['rank']}"
    return [f"{where} {name}={count}" for name, count in held.items() if count]
