"""What goes wrong: one fault after another, by a seed, and how long each took to recover.

A fault is recovered when its engine serves again: the first good fetch, from it or by it, that
began when the fault was over and all processes of the engine were there again. The time is taken
from the kill, or from the moment when the stopped process was woken.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvagent.soak.messages import DropPeer
from kvagent.soak.parts import Engine, Part
from kvagent.soak.traffic import Half, Traffic, clock
from kvagent.soak.world import SETTINGS, World

EVERY = 1.0
"""Seconds from one fault to the next, on average."""
AT_ONCE = 3
RECOVER_SECONDS = 90.0
"""When a fault counts as one that was not survived."""
_LONG_STOP = SETTINGS["fetch_timeout"] + SETTINGS["fence_seconds"] + 2.0


@dataclass(slots=True)
class Fault:
    kind: str
    engines: tuple[str, ...]
    """The engine that it hit; both of a pair."""
    at: float
    over: float
    """When it is over: for a stopped process, when it is woken."""
    back: float | None = None
    """When all processes were there again."""
    recovered: float | None = None
    paused: Part | None = None

    @property
    def seconds(self) -> float:
        """It took to recover."""
        assert self.recovered is not None
        return self.recovered - self.over


@dataclass
class Faults:
    """`spared` sidecars are never killed or stopped for long, so that there are some which see
    all of the run."""

    world: World
    traffic: Traffic
    seed: int
    spared: Sequence[str] = ()
    done: list[Fault] = field(default_factory=list)
    running: bool = True

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)
        self._next = 0.0
        self._kinds: dict[str, Callable[[Engine], Fault | None]] = {
            "SIGKILL leader": lambda e: self._sidecar(e, "SIGKILL leader", 0),
            "SIGKILL follower": lambda e: self._sidecar(e, "SIGKILL follower", 1),
            "SIGTERM leader": lambda e: self._sidecar(e, "SIGTERM leader", 0),
            "SIGTERM follower": lambda e: self._sidecar(e, "SIGTERM follower", 1),
            "SIGSTOP leader": lambda e: self._pause(e, "SIGSTOP leader", 0),
            "SIGSTOP follower": lambda e: self._pause(e, "SIGSTOP follower", 1),
            "SIGSTOP scheduler": self._pause_scheduler,
            "SIGKILL worker": self._worker,
            "SIGKILL scheduler": self._scheduler,
            "SIGKILL engine": self._whole,
            "drop_peer": self._drop_peer,
        }
        self.traffic.listeners.append(self._good)

    # ------------------------------------------------------------ by the clock

    def tick(self) -> None:
        now = time.monotonic()
        for fault in self.open():
            part = fault.paused
            if part is not None and now >= fault.over:
                if part.paused and part.exit_code() is None:
                    part.resume()
                fault.paused = None
            engines = [self.world.engines[name] for name in fault.engines]
            if fault.back is None and now >= fault.over and all(e.up for e in engines):
                fault.back = now
        if not self.running or now < self._next:
            return
        self._next = now + self._random.uniform(0.3, 1.7) * EVERY
        if len(self.open()) < AT_ONCE:
            kind = self._random.choice(list(self._kinds))
            busy = {name for fault in self.open() for name in fault.engines}
            engines = [e for e in self.world.engines.values() if e.up and e.name not in busy]
            if engines:
                self.inject(kind, self._random.choice(engines))

    def inject(self, kind: str, engine: Engine) -> Fault | None:
        """None when that engine has no such process, or is spared."""
        fault = self._kinds[kind](engine)
        if fault is not None:
            self.done.append(fault)
            with (self.world.folder / "faults.log").open("a") as log:
                log.write(f"{clock()} {kind}: {', '.join(fault.engines)}\n")
        return fault

    def open(self) -> list[Fault]:
        return [fault for fault in self.done if fault.recovered is None]

    def over(self) -> bool:
        """Every process is there again; what is asked from now on shows whether it serves."""
        return all(fault.back is not None for fault in self.open())

    def lost(self) -> list[Fault]:
        """Those that were not recovered from in good time."""
        before = time.monotonic() - RECOVER_SECONDS
        return [fault for fault in self.open() if fault.over < before]

    def _good(self, half: Half) -> None:
        pair = half.pair
        assert pair is not None
        for fault in self.open():
            hit = set(fault.engines) <= set(pair)
            if hit and fault.back is not None and half.since > fault.back:
                fault.recovered = time.monotonic()

    # ------------------------------------------------------------ kinds

    def _sidecar(self, engine: Engine, kind: str, rank: int) -> Fault | None:
        if rank >= engine.shape.tp or engine.name in self.spared:
            return None
        sidecar = engine.sidecars[rank]
        if kind.startswith("SIGTERM"):
            sidecar.terminate()
        else:
            sidecar.kill()
        return self._fault(kind, engine)

    def _pause(self, engine: Engine, kind: str, rank: int) -> Fault | None:
        if rank >= engine.shape.tp:
            return None
        longest = 1.0 if engine.name in self.spared else _LONG_STOP
        seconds = self._random.choice((0.1, 0.3, 0.6, 1.0)) * longest
        if self._random.random() < 0.5:
            self.traffic.give_up(engine, self._random.uniform(0.1, 0.9) * seconds)
        return self._stop(engine, engine.sidecars[rank], kind, seconds)

    def _pause_scheduler(self, engine: Engine) -> Fault | None:
        seconds = self._random.choice((0.2, 1.0, 3.0)) * SETTINGS["lease_seconds"]
        return self._stop(engine, engine.scheduler, "SIGSTOP scheduler", seconds)

    def _stop(self, engine: Engine, part: Part, kind: str, seconds: float) -> Fault:
        part.stop()
        fault = self._fault(kind, engine)
        fault.paused, fault.over = part, fault.at + seconds
        return fault

    def _worker(self, engine: Engine) -> Fault | None:
        self._random.choice(engine.workers).kill()
        return self._fault("SIGKILL worker", engine)

    def _scheduler(self, engine: Engine) -> Fault | None:
        engine.scheduler.kill()
        return self._fault("SIGKILL scheduler", engine)

    def _whole(self, engine: Engine) -> Fault | None:
        for member in (*engine.workers, engine.scheduler):
            member.kill()
        return self._fault("SIGKILL engine", engine)

    def _drop_peer(self, engine: Engine) -> Fault | None:
        sides = (self.traffic.producers, self.traffic.consumers)
        others = next(side for side in sides if engine not in side)
        other = self._random.choice(others)
        engine.say(DropPeer(other.name))
        return self._fault("drop_peer", engine, other)

    def _fault(self, kind: str, *engines: Engine) -> Fault:
        now = time.monotonic()
        return Fault(kind, tuple(engine.name for engine in engines), now, now)
