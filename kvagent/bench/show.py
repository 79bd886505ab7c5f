"""Results for people: the tables."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from kvagent.bench.measure import Result
from kvagent.bench.targets import Point

__all__ = ["as_data", "print_points", "print_results"]

HEADINGS = {
    "memcpy": "memcpy",
    "cma": "process_vm_readv",
    "nixl": "NIXL",
    "nixl_plain": "NIXL, UCX defaults",
    "nixl_default": "NIXL, all defaults",
    "nixl_ordinary": "NIXL, ordinary pages",
    "tcp": "TCP stream",
    "mooncake": "Mooncake",
}


def _console() -> Console:
    wide = Console()
    return wide if wide.is_terminal else Console(width=200)


def _name(result: Result) -> str:
    work = result.workload
    name = f"{work.name}, {work.tokens:,} x {work.concurrency}, blocks of {work.block_size}"
    name += f", {work.fragmentation.value}"
    if (work.producer_tp, work.consumer_tp) != (1, 1):
        name += f", tp {work.producer_tp} -> {work.consumer_tp}"
    return name


def print_results(results: Sequence[Result]) -> None:
    """Where a fetch's time went, and then its speed beside the ceilings."""
    if not results:
        return
    console = _console()
    phases = Table(title="A fetch, from the call of fetch() to the report in step(); ms")
    phases.add_column("model, tokens x fetches at once")
    for heading in ("MiB", "descriptors", "prepare", "post", "wire", "completion", "total", "GB/s"):
        phases.add_column(heading, justify="right")
    for result in results:
        parts = result.phases
        phases.add_row(
            _name(result),
            f"{result.nbytes / 2**20:,.1f}",
            f"{result.descriptors:,}",
            *(
                f"{seconds * 1e3:.2f}"
                for seconds in (
                    parts.prepare,
                    parts.post,
                    parts.wire,
                    parts.completion,
                    parts.total,
                )
            ),
            f"{result.gbps():.2f}",
        )
    console.print(phases)
    ways = dict.fromkeys(way for result in results for way in list(result.seconds)[1:])
    speeds = Table(title="GB/s, and our speed as a multiple of each (median of the rounds' ratios)")
    speeds.add_column("model, tokens x fetches at once")
    speeds.add_column("over")
    speeds.add_column("pages")
    speeds.add_column("kvagent", justify="right")
    for way in ways:
        speeds.add_column(HEADINGS[way], justify="right")
    for result in results:
        cells = [
            f"{result.gbps(way):.2f} ({result.ratio(way):.2f} x)" if way in result.seconds else ""
            for way in ways
        ]
        place = (result.transport, result.pages)
        speeds.add_row(_name(result), *place, f"{result.gbps():.2f}", *cells)
    console.print(speeds)


def print_points(points: Sequence[Point]) -> None:
    table = Table(title="What it must reach")
    for heading in ("", "what", "measured", "target", ""):
        table.add_column(heading, overflow="fold")
    for point in points:
        met = {True: "[green]met[/]", False: "[red]NOT met[/]", None: "-"}[point.met]
        table.add_row(str(point.number), point.what, point.measured, point.target, met)
    _console().print(table)


def as_data(results: Sequence[Result], points: Sequence[Point]) -> dict[str, object]:
    """For the JSON file."""
    return {
        "results": [
            {
                "result": result,
                "gbps": {way: result.gbps(way) for way in result.seconds},
                "ratio": {way: result.ratio(way) for way in list(result.seconds)[1:]},
                "seconds": {
                    way: statistics.median(values) for way, values in result.seconds.items()
                },
            }
            for result in results
        ],
        "targets": list(points),
    }
