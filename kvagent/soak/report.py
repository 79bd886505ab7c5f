"""What a soak has to say: as JSON, or as tables. And how memory grew."""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console
from rich.table import Table

from kvagent.soak.faults import Fault
from kvagent.soak.world import World

SAMPLE_SECONDS = 1.0
ENFORCED_SECONDS = 180.0
"""Shorter runs only print how memory grew: caches and pools fill in the first minute."""
GROWTH = 1.15
SLACK = 16 << 20
"""Bytes that the last quarter may have on top of `GROWTH` times the second one."""


@dataclass
class Memory:
    """Samples of the sidecars that lived through all of the run."""

    world: World
    _samples: dict[tuple[str, int], list[tuple[float, int]]] = field(
        default_factory=lambda: defaultdict(list)
    )
    _next: float = 0.0

    def tick(self) -> None:
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + SAMPLE_SECONDS
        for sidecar in self.world.sidecars():
            self._samples[sidecar.name, sidecar.lives].append((now, sidecar.resident()))

    def rows(self) -> list[dict[str, Any]]:
        """Means over the second and the last quarter of the samples, in MiB."""
        rows = []
        for sidecar in self.world.sidecars():
            samples = [size for _, size in self._samples[sidecar.name, 1] if size]
            quarter = len(samples) // 4
            if sidecar.lives > 1 or not quarter:
                continue
            second = statistics.mean(samples[quarter : 2 * quarter])
            last = statistics.mean(samples[-quarter:])
            rows.append(
                {
                    "sidecar": sidecar.name,
                    "second_quarter_mib": round(second / 2**20, 1),
                    "last_quarter_mib": round(last / 2**20, 1),
                    "flat": last <= second * GROWTH + SLACK,
                    "enforced": len(samples) * SAMPLE_SECONDS >= ENFORCED_SECONDS,
                }
            )
        return rows


def fault_rows(faults: Sequence[Fault]) -> list[dict[str, Any]]:
    """By kind; seconds are None when none was recovered."""
    kinds: dict[str, list[Fault]] = defaultdict(list)
    for fault in faults:
        kinds[fault.kind].append(fault)
    rows = []
    for kind, those in sorted(kinds.items()):
        times = [fault.seconds for fault in those if fault.recovered is not None]
        rows.append(
            {
                "fault": kind,
                "count": len(those),
                "recovered": len(times),
                "median_s": round(statistics.median(times), 2) if times else None,
                "worst_s": round(max(times), 2) if times else None,
            }
        )
    return rows


def show(result: dict[str, Any]) -> None:
    """All tables, on standard output."""
    console = Console(width=100)
    faults = Table(title="Faults injected and survived; seconds until served again")
    faults.add_column("Fault")
    for heading in ("Count", "Recovered", "Median s", "Worst s"):
        faults.add_column(heading, justify="right")
    for row in result["faults"]:
        cells = (row["count"], row["recovered"], row["median_s"], row["worst_s"])
        faults.add_row(row["fault"], *("-" if cell is None else str(cell) for cell in cells))
    for death in result["deaths"]:
        known = ", a known limit" if death["known"] else ""
        faults.add_row(f"[red]{death['part']} died: {death['how']}{known}[/]", "1", "", "", "")
    console.print(faults)

    requests = Table("What became of them", "Count", title="Requests")
    for name, number in result["requests"].items():
        requests.add_row(name, f"{number:,}")
    console.print(requests)

    memory = Table(
        "Sidecar", "Second quarter", "Last quarter", "", title="Memory of its own, MiB (means)"
    )
    for row in result["memory"]:
        flat = "flat" if row["flat"] else "grew"
        sizes = (str(row["second_quarter_mib"]), str(row["last_quarter_mib"]))
        memory.add_row(row["sidecar"], *sizes, flat if row["enforced"] else f"{flat} (short run)")
    if result["memory"]:
        console.print(memory)

    for problem in result["problems"]:
        console.print(f"[red]{problem}[/]", highlight=False)
    verdict = "[green]All holds[/]" if result["ok"] else "[red]Failed[/]"
    console.print(
        f"{verdict}: seed {result['seed']}, {result['minutes']:g} min, "
        f"{result['compared_bytes'] / 1e9:.2f} GB compared, {result['wrong_bytes']} wrong bytes, "
        f"settled in {result['settle_s']} s"
        + (f"; logs in {result['logs']}" if result["logs"] else "")
    )
