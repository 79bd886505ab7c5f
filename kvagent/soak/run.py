"""One soak, from start to verdict."""

from __future__ import annotations

import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import httpx
from rich.console import Console

from kvagent.soak.faults import Faults
from kvagent.soak.messages import Check
from kvagent.soak.parts import Sidecar
from kvagent.soak.report import Memory, fault_rows
from kvagent.soak.shapes import CONSUMERS, PRODUCERS, Shape
from kvagent.soak.traffic import Traffic
from kvagent.soak.world import SETTINGS, World

Transport = Literal["shm", "tcp", "both"]

SETTLE_SECONDS = sum(SETTINGS[name] for name in ("lease_seconds", "fetch_timeout", "fence_seconds"))
SLACK_SECONDS = 10.0
"""On top: for questions that are asked again, and for a slow machine."""
PROBES = 20
"""Tries that a pair gets at the end, since messages may still be lost on purpose."""
RESIDUE = {"leases": ("offered", "claimed", "parked"), "fetches": None, "parts_reading": None}
"""What of /status must be zero; None: all of it."""


@dataclass
class Soak:
    seed: int
    minutes: float
    transport: Transport = "both"
    chaos: bool = True

    def shapes(self) -> tuple[list[Shape], list[Shape]]:
        """Over both transports, about half of the pairs use TCP: a pair does if either end must."""
        choose = random.Random(self.seed)
        kinds = {"shm": [False] * 3, "tcp": [True] * 3, "both": [False, True, False]}[
            self.transport
        ]

        def mixed(side: Sequence[Shape]) -> list[Shape]:
            tcp = choose.sample(kinds, 3)
            chaos = choose.sample([self.chaos, self.chaos, False], 3)
            slow = choose.sample([True, True, False], 3)
            rows = zip(side, tcp, chaos, slow, strict=True)
            return [replace(shape, tcp=t, chaos=c, slow=s) for shape, t, c, s in rows]

        return mixed(PRODUCERS), mixed(CONSUMERS)

    def run(self) -> dict[str, Any]:
        """The result, as `report.show` takes it; logs are kept when it is not all well."""
        folder = Path(tempfile.mkdtemp(prefix="kvagent-soak-"))
        print(f"seed {self.seed}, logs in {folder}", file=sys.stderr, flush=True)
        sources, sinks = self.shapes()
        choose = random.Random(self.seed + 1)
        spared = [choose.choice(sources).name, choose.choice(sinks).name]
        with World(folder, [*sources, *sinks], self.seed) as world:
            world.wait_up()
            traffic = Traffic(
                world,
                [world.engines[shape.name] for shape in sources],
                [world.engines[shape.name] for shape in sinks],
                self.seed,
            )
            faults = Faults(world, traffic, self.seed, spared)
            memory = Memory(world)
            work = _Work(world, traffic, faults, memory)
            problems = work.storm(self.minutes * 60)
            settled, left = work.settle()
            problems += left
        problems += traffic.wrong
        problems += [f"{row['sidecar']} grew" for row in memory.rows() if _grew(row)]
        unknown = [death for death in world.deaths if not death.known]
        problems += [f"{death.part} died by itself: {death.how}" for death in unknown]
        ok = not problems
        keep = not ok or bool(world.deaths)
        if not keep:
            shutil.rmtree(folder)
        return {
            "ok": ok,
            "seed": self.seed,
            "minutes": self.minutes,
            "transport": self.transport,
            "spared": spared,
            "faults": fault_rows(faults.done),
            "deaths": [
                {"part": d.part, "how": d.how, "log": str(d.log), "known": d.known}
                for d in world.deaths
            ],
            "requests": _requests(traffic),
            "pairs": {f"{p} -> {c}": number for (p, c), number in sorted(traffic.good.items())},
            "told_to_wait": dict(Counter(world.refusals).most_common(10)),
            "compared_bytes": traffic.compared,
            "wrong_bytes": traffic.wrong_bytes,
            "settle_s": round(settled, 1),
            "memory": memory.rows(),
            "problems": problems,
            "logs": str(folder) if keep else None,
        }


@dataclass
class _Work:
    world: World
    traffic: Traffic
    faults: Faults
    memory: Memory

    def tick(self) -> None:
        for engine, event in self.world.tick(0.01):
            self.traffic.heard(engine, event)
        self.traffic.tick()
        self.faults.tick()
        self.memory.tick()

    def storm(self, seconds: float) -> list[str]:
        """Everything at once, for so long or until something is stuck."""
        began = time.monotonic()
        shown = -1
        terminal = sys.stderr.isatty()
        with Console(stderr=True).status("starting") as status:
            while (passed := time.monotonic() - began) < seconds:
                self.tick()
                stuck = self._stuck()
                if stuck:
                    return stuck
                if int(passed) != shown:
                    shown = int(passed)
                    status.update(self._progress(passed, seconds))
                    if not terminal and shown % 15 == 0:
                        print(self._progress(passed, seconds), file=sys.stderr, flush=True)
        return []

    def settle(self) -> tuple[float, list[str]]:
        """No more faults: seconds until everything had ended, and what had not."""
        self.faults.running = self.traffic.running = False
        self.world.resume_all()
        self._until(lambda: all(e.up for e in self.world.engines.values()), 60.0)
        began = time.monotonic()
        self._until(lambda: not self.traffic and self.faults.over(), SETTLE_SECONDS + SLACK_SECONDS)
        problems = [f"stuck: {text}" for text in self.traffic.stuck(0.0)]
        problems += self._probe()
        residue: list[str] = []

        def clean() -> bool:
            residue[:] = [text for sidecar in self.world.sidecars() for text in _residue(sidecar)]
            return not residue

        self._until(clean, SETTLE_SECONDS + SLACK_SECONDS, every=0.5)
        settled = time.monotonic() - began
        problems += residue
        for engine in self.world.engines.values():
            engine.say(Check())
        self._until(lambda: len(self.traffic.checked) == len(self.world.engines), 30.0)
        for name in self.world.engines:
            left = self.traffic.checked.get(name)
            if left is None:
                problems.append(f"{name} did not answer")
            elif left:
                problems.append(f"{left} requests are open at {name}")
        return settled, problems

    def _probe(self) -> list[str]:
        """Every pair has to serve, without a restart."""
        pairs = [(p, c) for p in self.traffic.producers for c in self.traffic.consumers]
        before = self.traffic.good.copy()
        for _ in range(PROBES):
            left = [p for p in pairs if self.traffic.good[_names(p)] == before[_names(p)]]
            for producer, consumer in left:
                self.traffic.begin(producer, consumer, "plain")
            if not left:
                break
            self._until(lambda: not self.traffic, SETTLE_SECONDS + SLACK_SECONDS)
        never = (_names(pair) for pair in pairs)
        never = (names for names in never if self.traffic.good[names] == before[names])
        problems = ["no good fetch at the end: {} -> {}".format(*names) for names in never]
        problems += [f"stuck: {text}" for text in self.traffic.stuck(0.0)]
        return problems + [
            f"not recovered: {fault.kind} of {fault.engines}" for fault in self.faults.open()
        ]

    def _until(self, done: Callable[[], bool], seconds: float, every: float = 0.0) -> None:
        until = time.monotonic() + seconds
        look = 0.0
        while time.monotonic() < until:
            self.tick()
            if time.monotonic() >= look:
                look = time.monotonic() + every
                if done():
                    return

    def _stuck(self) -> list[str]:
        stuck = [f"stuck: {text}" for text in self.traffic.stuck()]
        return stuck + [f"not recovered: {f.kind} of {f.engines}" for f in self.faults.lost()]

    def _progress(self, passed: float, seconds: float) -> str:
        traffic, faults = self.traffic, self.faults
        return (
            f"{passed:.0f} of {seconds:.0f} s: {sum(traffic.good.values()):,} good, "
            f"{sum(traffic.failed.values()):,} failed, {traffic.compared / 1e9:.2f} GB compared, "
            f"{traffic.wrong_bytes} wrong bytes; {len(faults.done)} faults, "
            f"{len(faults.open())} not over; {len(self.world.deaths)} died by themselves"
        )


def _names(pair: Any) -> tuple[str, str]:
    return pair[0].name, pair[1].name


def _grew(row: dict[str, Any]) -> bool:
    return bool(row["enforced"] and not row["flat"])


def _residue(sidecar: Sidecar) -> list[str]:
    """What a sidecar still holds when nothing is under way."""
    try:
        status = sidecar.status()
    except (httpx.HTTPError, ValueError) as error:
        return [f"{sidecar.name}: /status: {error}"]
    found = {"parts_reading": status["parts_reading"]}
    for table in ("leases", "fetches", "ledger"):
        found |= {f"{table}.{name}": number for name, number in status.get(table, {}).items()}
    kept = ("leases.tombstones", "ledger.free")
    return [
        f"{sidecar.name}: {name} is {number}"
        for name, number in found.items()
        if number and name not in kept
    ]


def _requests(traffic: Traffic) -> dict[str, int]:
    rows = {"fetches good": sum(traffic.good.values())}
    rows |= {f"fetches failed: {cause}": n for cause, n in traffic.failed.most_common()}
    rows |= {f"calls refused: {cause}": n for cause, n in traffic.refused.most_common()}
    return rows | dict(traffic.ended)
