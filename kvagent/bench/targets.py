"""What this version has to reach, one line each: measured, target, met or not.

Where a point cannot be measured (no root for network namespaces, no Mooncake), it says why.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from kvagent.bench import calls
from kvagent.bench.idle import measure_idle
from kvagent.bench.measure import Bench, LocalFar, Result, Tick
from kvagent.bench.mooncake import install
from kvagent.bench.prepared import measure_preparing
from kvagent.bench.shapes import SHAPES, Fragmentation, Workload
from kvagent.bench.simulate import CPU_MAY_GROW, simulate
from kvagent.bench.world import Transport, World, why_no_netns
from kvagent.errors import KVAgentError

__all__ = ["FULL", "QUICK", "Point", "Scale", "reach"]


class Scale(msgspec.Struct, frozen=True, kw_only=True):
    """How much is measured."""

    nbytes: int = 256 << 20
    rounds: int = 7
    small: int = 1000
    many: int = 1000
    seconds: float = 5.0
    layers: int = 80
    blocks: int = 100_000
    fetched: int = 8192
    requests: int = 20_000
    engines: Sequence[int] = (10, 1000)


FULL = Scale()
QUICK = Scale(
    nbytes=16 << 20,
    rounds=1,
    small=20,
    many=20,
    seconds=0.2,
    blocks=1000,
    fetched=256,
    requests=100,
    engines=(4, 8),
)
"""To see that everything runs; the figures mean nothing."""


class Point(msgspec.Struct, frozen=True):
    """`met` is None when it was left out; then `measured` says why."""

    number: int
    what: str
    measured: str
    target: str
    met: bool | None

    @classmethod
    def at_most(cls, number: int, what: str, value: float, limit: float, unit: str = "") -> Point:
        unit = f" {unit}" if unit else ""
        text = f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
        return cls(number, what, f"{text}{unit}", f"<= {limit:g}{unit}", value <= limit)

    @classmethod
    def at_least(cls, number: int, what: str, value: float, limit: float) -> Point:
        return cls(number, what, f"{value:.2f} x", f">= {limit:g} x", value >= limit)

    @classmethod
    def left_out(cls, number: int, what: str, why: str) -> Point:
        return cls(number, what, f"left out: {why}", "", None)


def blocks_of_64k(scale: Scale, fragmentation: Fragmentation) -> Workload:
    """Regions whose blocks are 64 KiB: llama-3.1-8b with 32 tokens to a block."""
    shape = SHAPES["llama-3.1-8b"]
    return Workload(
        name="llama-3.1-8b", shape=shape, tokens=32, block_size=32, fragmentation=fragmentation
    ).resized(scale.nbytes)


BOTH = (Fragmentation.contiguous, Fragmentation.shuffled)


def reach(scale: Scale, results: list[Result], tick: Tick) -> Iterator[Point]:
    """Every point, as soon as it is known; the workloads behind them are put into `results`."""
    with World(Transport.shm) as world:
        bench = Bench(world, LocalFar(world), rounds=scale.rounds)
        yield from _guarded(1, "shared memory", _shared_memory(bench, scale, results, tick))
        yield from _guarded(3, "small transfers", _small(bench, scale, tick))
        yield from _guarded(4, "many transfers", _many(bench, scale, tick))
    yield from _tcp(scale, results, tick)
    yield from _guarded(6, "preparing", _prepared(scale, tick))
    with World(Transport.shm) as world:
        bench = Bench(world, LocalFar(world), rounds=scale.rounds)
        yield from _guarded(7, "the caller's costs", _called(bench, scale, tick))
        tick("simulating")
        yield _simulated(scale)
        yield from _guarded(9, "idle sidecars", _idle(bench, scale, tick))


def _guarded(number: int, what: str, points: Iterator[Point]) -> Iterator[Point]:
    """A measurement that fails has missed its target; the others go on."""
    try:
        yield from points
    except KVAgentError as error:
        yield Point(number, what, f"failed: {error}", "no failure", False)


def _prepared(scale: Scale, tick: Tick) -> Iterator[Point]:
    tick("preparing")
    made = measure_preparing(scale.layers, scale.blocks, scale.fetched)
    peer = f"a peer of {made.layers} layers x {made.blocks:,} blocks"
    yield Point.at_most(6, f"preparing {peer}", made.peer_ms, 10, "ms")
    yield Point.at_most(6, f"memory for {peer}", made.peer_bytes / 2**20, 1, "MiB")
    what = f"index arrays of {made.fetched:,} fragmented blocks / make_prepped_xfer"
    yield Point.at_most(6, what, made.ratio, 1)


def _called(bench: Bench, scale: Scale, tick: Tick) -> Iterator[Point]:
    busy = calls.measure_calls(bench, scale.seconds, tick)
    moving = f"while {busy.gbps:.1f} GB/s move"
    yield Point.at_most(7, f"step(), nothing to report, {moving}", busy.step, 10, "us")
    offer = f"offer() of 64 blocks, {calls.BURST} in a row, {moving}"
    yield Point.at_most(7, f"{offer} (the first: {busy.first_offer:.0f} us)", busy.offer, 50, "us")
    yield Point.at_most(7, f"fetch() of 1,000 blocks, {moving}", busy.fetch, 200, "us")
    moved = f"{busy.gbps:.1f} GB/s"
    yield Point(7, "bytes moved meanwhile", moved, ">= 4 GB/s", busy.gbps >= 4)


def _idle(bench: Bench, scale: Scale, tick: Tick) -> Iterator[Point]:
    tick("idling")
    idle = measure_idle(bench, scale.seconds)
    yield Point.at_most(9, "an idle sidecar's share of a core", idle.cpu, 2, "%")
    yield Point.at_most(9, "memory of a sidecar without caches", idle.rss, 350, "MiB")


def _shared_memory(
    bench: Bench, scale: Scale, results: list[Result], tick: Tick
) -> Iterator[Point]:
    ways = ["memcpy", "cma", "nixl", "nixl_ordinary"]
    found = {kind: bench.run(blocks_of_64k(scale, kind), ways, tick) for kind in BOTH}
    results += found.values()
    for kind, result in found.items():
        what = f"shared memory, {kind.value}: time / raw NIXL's on the same kind of memory"
        yield Point.at_most(1, what, 1 / result.ratio("nixl"), 1.05)
    for (kind, result), limit in zip(found.items(), (1.7, 1.4), strict=True):
        pages = f"on {result.pages} pages"
        what = f"shared memory {pages}, {kind.value}: speed / raw NIXL on ordinary pages"
        yield Point.at_least(2, what, result.ratio("nixl_ordinary"), limit)


def _small(bench: Bench, scale: Scale, tick: Tick) -> Iterator[Point]:
    small = calls.measure_small(bench, scale.small, tick)
    beside = f"raw NIXL: {small.raw_p50:.0f} us; the empty chain: {small.chain_p50:.0f} us"
    what = f"one 64 KiB block ({beside})"
    yield Point.at_most(3, f"{what}, p50", small.p50, 400, "us")
    yield Point.at_most(3, f"{what}, p99", small.p99, 2000, "us")


def _many(bench: Bench, scale: Scale, tick: Tick) -> Iterator[Point]:
    many = calls.measure_many(bench, scale.many, tick)
    what = f"{many.fetches:,} fetches of {many.blocks} blocks at once"
    yield Point.at_least(4, f"{what}: rate / raw NIXL's, one after the other", many.rate, 0.9)
    yield Point.at_most(4, f"{what}: longest wait / median", many.wait, 3)


def _tcp(scale: Scale, results: list[Result], tick: Tick) -> Iterator[Point]:
    tick("installing Mooncake")
    try:
        install()
        no_mooncake = ""
    except KVAgentError as error:
        no_mooncake = str(error)
    for netns in (True, False):
        where = "TCP between network namespaces" if netns else "TCP over loopback"
        why = why_no_netns() if netns else ""
        if why:
            yield Point.left_out(5, where, why)
            continue
        with World(Transport.tcp, netns=netns) as world:
            bench = Bench(world, LocalFar(world), rounds=scale.rounds)
            points = _streams(bench, where, scale, results, tick, no_mooncake)
            yield from _guarded(5, where, points)


def _streams(
    bench: Bench, where: str, scale: Scale, results: list[Result], tick: Tick, no_mooncake: str
) -> Iterator[Point]:
    ways = ["nixl", "nixl_plain", "tcp", *([] if no_mooncake else ["mooncake"])]
    for kind, stream in zip(BOTH, (0.9, 0.65), strict=True):
        result = bench.run(blocks_of_64k(scale, kind), ways, tick)
        results.append(result)
        what = f"{where}, {kind.value}: speed / "
        plain = result.ratio("nixl_plain")
        yield Point.at_least(5, what + "raw NIXL's with UCX's defaults", plain, 2.3)
        yield Point.at_least(5, what + "one TCP stream's", result.ratio("tcp"), stream)
        if no_mooncake:
            yield Point.left_out(5, what + "Mooncake's", no_mooncake)
        else:
            yield Point.at_least(5, what + "Mooncake's", result.ratio("mooncake"), 1.7)


def _simulated(scale: Scale) -> Point:
    found = simulate([*scale.engines], scale.requests, show=False)
    growth, (first, last) = found["growth"], (found["sizes"][0], found["sizes"][-1])
    return Point(
        8,
        f"a request's messages, bytes and CPU, {last['circle']:,} engines that talk / "
        f"{first['circle']}",
        f"{growth['messages']:.2f}, {growth['bytes']:.2f}, {growth['cpu']:.2f}",
        f"no growth (CPU: <= {CPU_MAY_GROW})",
        growth["ok"],
    )
