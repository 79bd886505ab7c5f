"""Small transfers, many at once, and what the engine's own thread pays for its calls."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import msgspec

from kvagent.bench.ceilings import RawConsumer
from kvagent.bench.chain import measure_chain
from kvagent.bench.engines import NAP_SECONDS, Consumer, Producer
from kvagent.bench.measure import OURS, Bench, Tick
from kvagent.bench.shapes import Fragmentation, Request, Shape, Workload

__all__ = ["Calls", "Many", "Small", "measure_calls", "measure_many", "measure_small"]

BLOCK_64K = Shape(layers=1, latent=2048)
"""A block of 16 tokens is one run of 64 KiB."""
WARM_UP = 20
REST_SECONDS = 0.002
"""A ticket travels by way of a router: the offer is known by then."""


class Small(msgspec.Struct, frozen=True):
    """Microseconds from `fetch()` to `step()`; `raw_p50` of the same read by NIXL alone, and
    `chain_p50` of the chain of processes and threads with nothing in it."""

    p50: float
    p99: float
    raw_p50: float
    chain_p50: float


def measure_small(bench: Bench, count: int, tick: Tick = lambda _: None) -> Small:
    """One 64 KiB block at a time."""
    blocks = 64
    workload = Workload(name="64 KiB", shape=BLOCK_64K, tokens=16, concurrency=blocks)
    with ExitStack() as stack:
        tick("start")
        bench.far.setup(workload)
        stack.callback(bench.far.close)
        consumer = stack.enter_context(Consumer(bench.world, workload))
        took, raw_took = [], []
        for number in range(count + WARM_UP):
            if number % 100 == 0:
                tick("64 KiB")
            block = number % blocks
            (name,) = bench.names(1)
            requests = {name: Request([block], [block], 16)}
            tickets = bench.far.offer(requests)
            time.sleep(REST_SECONDS)
            took.append(consumer.fetch(requests, tickets)[0] * 1e6)
            bench.far.settle([name])
        single = msgspec.structs.replace(workload, concurrency=1)
        bench.far.setup(single)
        raw = RawConsumer(bench.world, single, bench.far.raw(False), ordinary=False)
        for _ in range(20):
            tick("nixl")
            raw_took.append(raw.read("nixl", bench.far.expose("nixl")) * 1e6)
        bench.far.expose("")
    tick("chain")
    chain = measure_chain(count, REST_SECONDS)
    took = took[WARM_UP:]
    return Small(
        statistics.median(took),
        statistics.quantiles(took, n=100)[98],
        statistics.median(raw_took),
        chain,
    )


class Many(msgspec.Struct, frozen=True):
    """`rate`: ours over that of NIXL alone, one read after the other. `wait`: the longest time
    from `fetch()` to `step()`, over the median one."""

    fetches: int
    blocks: int
    gbps: float
    raw_gbps: float
    rate: float
    wait: float


def measure_many(
    bench: Bench, fetches: int, tick: Tick = lambda _: None, *, blocks: int = 16
) -> Many:
    """So many fetches of `blocks` 64 KiB blocks, all queued at once; alternately raw NIXL posting
    the same reads back to back."""
    workload = Workload(
        name="many",
        shape=BLOCK_64K,
        tokens=16 * blocks,
        concurrency=fetches,
        fragmentation=Fragmentation.shuffled,
    )
    with ExitStack() as stack:
        tick("start")
        bench.far.setup(workload)
        stack.callback(bench.far.close)
        consumer = stack.enter_context(Consumer(bench.world, workload))
        raw = RawConsumer(bench.world, workload, bench.far.raw(False), ordinary=False)
        listed = workload.requests()
        seconds: dict[str, list[float]] = {OURS: [], "nixl": []}
        waits = []
        for _ in range(bench.rounds + 1):
            tick(OURS)
            requests = dict(zip(bench.names(fetches), listed, strict=True))
            tickets = bench.far.offer(requests)
            time.sleep(0.2)  # all offers are known
            took, ends, _ = consumer.fetch(requests, tickets)
            bench.far.settle(list(requests))
            seconds[OURS].append(took)
            waits.append(max(ends.values()) / statistics.median(ends.values()))
            tick("nixl")
            seconds["nixl"].append(raw.read("nixl", bench.far.expose("nixl"), depth=1))
            bench.far.expose("")
        ours, theirs = (values[1:] for values in seconds.values())
        return Many(
            fetches,
            blocks,
            raw.nbytes / statistics.median(ours) / 1e9,
            raw.nbytes / statistics.median(theirs) / 1e9,
            statistics.median(b / a for a, b in zip(ours, theirs, strict=True)),
            statistics.median(waits[1:]),
        )


BURST = 8


class Calls(msgspec.Struct, frozen=True):
    """Microseconds in the caller's thread, medians; `gbps` moved meanwhile. `first_offer`: of
    those after a pause, whose code and data are not in the caches any more."""

    gbps: float
    step: float
    offer: float
    first_offer: float
    fetch: float


def measure_calls(
    bench: Bench, seconds: float, tick: Tick = lambda _: None, *, large: int = 1024
) -> Calls:
    """The calls of a scheduler while fetches of `large` blocks of 64 KiB keep the sidecars at work:
    `offer` of 64 blocks, `BURST` in a row, as from a step that ends several requests; `fetch` of
    1,000; `step` with nothing to report."""
    blocks, depth = 1000, 4
    workload = Workload(name="calls", shape=BLOCK_64K, tokens=16 * (blocks + depth * large))
    with ExitStack() as stack:
        tick("start")
        bench.far.setup(workload)
        stack.callback(bench.far.close)
        consumer = stack.enter_context(Consumer(bench.world, workload))
        producer = bench.far.here
        assert producer is not None
        load = _Load(bench, producer, consumer, first=blocks, size=large, depth=depth)
        keys = ("step", "offer", "first_offer", "fetch")
        times: dict[str, list[float]] = {key: [] for key in keys}
        begin = time.monotonic()
        tick("calls")
        while time.monotonic() - begin < seconds or not times["fetch"]:
            for _ in range(20):
                _, spent = _timed(consumer.client.step, keep=load.see)
                if spent is not None:
                    times["step"].append(spent)
                load.go_on()
                time.sleep(NAP_SECONDS)
            names, short = bench.names(BURST), list(range(64))
            spans = [_timed(producer.client.offer, name, short, 64 * 16)[1] or 0 for name in names]
            times["offer"] += spans
            times["first_offer"].append(spans[0])
            for name in names:
                producer.client.cancel(name)
            (name,) = bench.names(1)
            ids = list(range(blocks))
            ticket = producer.client.offer(name, ids, blocks * 16)
            ticket = json.loads(json.dumps(ticket))  # as it comes out of a router
            _, spent = _timed(consumer.client.fetch, name, ticket, ids)
            times["fetch"].append(spent or 0.0)
            consumer.client.cancel(name)  # what is timed is the call; the load is another's
            while name not in load.ended:
                load.see(consumer.client.step())
                load.go_on()
                time.sleep(NAP_SECONDS)
        took = time.monotonic() - begin
        moved = load.nbytes
        load.stop()
        return Calls(
            moved / took / 1e9,
            *(statistics.median(times[key]) for key in keys),
        )


def _timed(call: Callable[..., Any], *arguments: Any, keep: Any = None) -> tuple[Any, float | None]:
    """The result, and microseconds; with `keep`, which takes the result, None when it is no empty
    output."""
    begin = time.perf_counter_ns()
    result = call(*arguments)
    spent = (time.perf_counter_ns() - begin) / 1000
    if keep is not None:
        keep(result)
        if not result.is_empty():
            return result, None
    return result, spent


class _Load:
    """`depth` large fetches under way at any time, in blocks of their own from `first` on."""

    def __init__(
        self,
        bench: Bench,
        producer: Producer,
        consumer: Consumer,
        *,
        first: int,
        size: int,
        depth: int,
    ) -> None:
        self._bench, self._producer, self._consumer = bench, producer, consumer
        self._free = [list(range(first + i * size, first + (i + 1) * size)) for i in range(depth)]
        self._open: dict[str, list[int]] = {}
        self.ended: set[str] = set()
        self.nbytes = 0

    def go_on(self) -> None:
        """Starts what there is room for; takes the producer's reports."""
        self._producer.client.step()
        while self._free:
            ids = self._free.pop()
            (name,) = self._bench.names(1)
            ticket = self._producer.client.offer(name, ids, len(ids) * 16)
            self._consumer.client.fetch(name, ticket, ids)
            self._open[name] = ids

    def see(self, out: Any) -> None:
        for name in out.finished_recving or ():
            self.ended.add(name)
            if name in self._open:
                self._free.append(self._open.pop(name))
                if name not in out.failed_recving:
                    self.nbytes += out.kv_connector_stats["fetches"][name]["bytes"]

    def stop(self) -> None:
        """Waits for what is under way."""
        until = time.monotonic() + 30
        while self._open and time.monotonic() < until:
            self.see(self._consumer.client.step())
            self._producer.client.step()
            time.sleep(NAP_SECONDS)
