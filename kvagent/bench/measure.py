"""One workload: fetches of ours and the ceilings, in turns, several rounds.

Machines are noisy, so what counts is the ratio of two things measured one after the other: each
ratio is the median of those of the rounds. The first round warms up and does not count.
"""

from __future__ import annotations

import ctypes
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any, Protocol

import msgspec

from kvagent.bench.ceilings import RawConsumer, RawSide
from kvagent.bench.engines import Consumer, Producer, Ticket, same_bytes
from kvagent.bench.mooncake import Mooncake
from kvagent.bench.questions import Placed, Way
from kvagent.bench.shapes import Request, Workload
from kvagent.bench.world import Transport, World
from kvagent.errors import KVAgentError

__all__ = ["OURS", "Bench", "Far", "LocalFar", "Phases", "Result", "default_ways"]

OURS = "kvagent"
Tick = Callable[[str], None]


class Phases(msgspec.Struct, frozen=True, kw_only=True):
    """Where the time of a fetch went, in seconds; medians. They add up to `total`.

    prepare: until the first post. post: inside NIXL's post calls, which over shared memory copy.
    wire: the rest until the last byte was there. completion: the producer's word that it was
    valid, and the report. total: from the call of `fetch()` to the report in `step()`.
    """

    prepare: float
    post: float
    wire: float
    completion: float
    total: float


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """`seconds[way]`: of each round. `descriptors`: when each request is posted in one piece."""

    workload: Workload
    transport: str
    nbytes: int
    descriptors: int
    pages: str
    phases: Phases
    seconds: dict[Way, list[float]]

    def gbps(self, way: Way = OURS) -> float:
        return self.nbytes / statistics.median(self.seconds[way]) / 1e9

    def ratio(self, way: Way) -> float:
        """Our speed as a multiple of that way's: the median of the rounds' ratios."""
        pairs = zip(self.seconds[OURS], self.seconds[way], strict=True)
        return statistics.median(theirs / ours for ours, theirs in pairs)


class Far(Protocol):
    """The producer's side, here or on another machine."""

    @property
    def here(self) -> Producer | None:
        """The engine, when it is in this process."""

    def setup(self, workload: Workload) -> None: ...
    def offer(self, requests: dict[str, Request]) -> list[Ticket]: ...
    def settle(self, names: Sequence[str]) -> None: ...
    def raw(self, ordinary: bool) -> list[Placed]:
        """The raw ranks' memory, after `setup`; `ordinary` as in `RawSide`."""

    def expose(self, way: Way) -> list[bytes]: ...
    def close(self) -> None: ...


class LocalFar:
    """In this process, with its sidecars and raw ranks beside it."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._workload: Workload | None = None
        self._raw: RawSide | None = None
        self.here: Producer | None = None

    def setup(self, workload: Workload) -> None:
        self.close()
        self._workload = workload
        self.here = Producer(self._world, workload)

    def offer(self, requests: dict[str, Request]) -> list[Ticket]:
        return self._engine().offer(requests)

    def settle(self, names: Sequence[str]) -> None:
        self._engine().settle(names)

    def raw(self, ordinary: bool) -> list[Placed]:
        self._engine()
        workload = self._workload
        assert workload is not None
        self._raw = RawSide(
            self._world, "producer", workload, workload.producer_tp, ordinary=ordinary
        )
        return self._raw.placed

    def expose(self, way: Way) -> list[bytes]:
        if self._raw is None:
            raise KVAgentError("raw() comes first")
        return self._raw.expose(way)

    def close(self) -> None:
        if self.here is not None:
            self.here.close()
        self._raw = self.here = None

    def _engine(self) -> Producer:
        if self.here is None:
            raise KVAgentError("setup() comes first")
        return self.here


def default_ways(transport: Transport) -> list[Way]:
    """The ceilings of a transport, both sides on this machine."""
    if transport is Transport.shm:
        return ["memcpy", "cma", "nixl", "nixl_default", "nixl_ordinary", "tcp"]
    return ["memcpy", "nixl", "nixl_plain", "nixl_default", "tcp"]


class Bench:
    """Runs workloads in a world, one after the other."""

    def __init__(self, world: World, far: Far, *, rounds: int = 5) -> None:
        self.world = world
        self.far = far
        self.rounds = rounds
        self._count = 0

    def names(self, count: int) -> list[str]:
        """Request ids that were never used."""
        self._count += count
        return [f"bench-{number}" for number in range(self._count - count, self._count)]

    def run(
        self,
        workload: Workload,
        ways: Sequence[Way],
        tick: Tick = lambda _: None,
        *,
        depth: int = 0,
    ) -> Result:
        """`tick` is told what is being measured, `steps` times. `ways`: those of `raw`, "memcpy"
        and "mooncake". `depth`: most requests at once of the raw ways."""
        with ExitStack() as stack:
            tick("start")
            self.far.setup(workload)
            stack.callback(self.far.close)
            consumer = stack.enter_context(Consumer(self.world, workload))
            ordinary = "nixl_ordinary" in ways
            raw = RawConsumer(self.world, workload, self.far.raw(ordinary), ordinary=ordinary)
            mooncake = None
            if "mooncake" in ways:
                mooncake = Mooncake(self.world, workload)
                stack.callback(mooncake.close)

            fetches: list[dict[str, Any]] = []
            seconds: dict[Way, list[float]] = {way: [] for way in (OURS, *ways)}
            for _ in range(self.rounds + 1):
                for way in seconds:
                    tick(way)
                    if way == OURS:
                        took, stats = self._fetch(workload, consumer)
                        fetches.append(stats)
                    elif way == "memcpy":
                        took = self._copy(consumer, raw.nbytes)
                    elif way == "mooncake":
                        assert mooncake is not None
                        took = mooncake.read()
                    else:
                        took = raw.read(way, self.far.expose(way), depth)
                        self.far.expose("")
                    seconds[way].append(took)
            totals = seconds[OURS][1:]
            return Result(
                workload=workload,
                transport=self.world.transport.value + (" netns" if self.world.netns else ""),
                nbytes=raw.nbytes,
                descriptors=raw.descriptors,
                pages=consumer.pages,
                phases=_phases(fetches[1:], totals),
                seconds={way: values[1:] for way, values in seconds.items()},
            )

    def steps(self, ways: Sequence[Way]) -> int:
        return 1 + (self.rounds + 1) * (1 + len(ways))

    def _fetch(self, workload: Workload, consumer: Consumer) -> tuple[float, dict[str, Any]]:
        listed = workload.requests()
        requests = dict(zip(self.names(len(listed)), listed, strict=True))
        tickets = self.far.offer(requests)
        time.sleep(0.005)  # a ticket travels by way of a router: the offer is known by then
        took, _, stats = consumer.fetch(requests, tickets)
        self.far.settle(list(requests))
        producer = self.far.here
        if producer is not None and not same_bytes(workload, producer, consumer, listed[-1]):
            raise KVAgentError(f"{workload.name}: what arrived is not what was sent")
        return took, stats

    def _copy(self, consumer: Consumer, nbytes: int) -> float:
        """`memcpy` of so many bytes from the producer's caches, which are mapped here too."""
        producer = self.far.here
        if producer is None:
            raise KVAgentError("memcpy needs both caches on one host")
        pairs = []
        for here, size in _storages(consumer):
            for there, limit in _storages(producer):
                pairs.append((here, there, min(size, limit)))
        begin = time.perf_counter()
        left, number = nbytes, 0
        while left > 0:
            here, there, size = pairs[number % len(pairs)]
            ctypes.memmove(here, there, min(size, left))
            left -= size
            number += 1
        return time.perf_counter() - begin


def _storages(engine: Producer | Consumer) -> Iterator[tuple[int, int]]:
    """Address and bytes of the longest stretch of each rank's caches: all of its layers."""
    for caches in engine.caches:
        begin = min(tensor.data_ptr() for tensor in caches.values())
        end = max(tensor.data_ptr() + tensor.nbytes for tensor in caches.values())
        yield begin, end - begin


def _phases(fetches: Sequence[dict[str, Any]], totals: Sequence[float]) -> Phases:
    """Of the slowest request of each round, whose end is the round's."""
    last = [max(stats.values(), key=lambda each: float(each["seconds"])) for stats in fetches]
    prepare = statistics.median(each["wait"] for each in last)
    post = statistics.median(each["post"] for each in last)
    wire = statistics.median(max(0.0, each["wire"] - each["post"]) for each in last)
    total = statistics.median(totals)
    return Phases(
        prepare=prepare,
        post=post,
        wire=wire,
        completion=max(0.0, total - prepare - post - wire),
        total=total,
    )
