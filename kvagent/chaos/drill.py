"""Carries out a schedule, with a line for each thing that happens, and sums it up.

Whatever ends the drill, what it stopped is continued. Signals that would end or suspend it are
blocked and asked for while it waits, so that none comes between a SIGSTOP and the note of it; only
a SIGKILL or SIGSTOP of the drill itself can leave a process stopped.
"""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import msgspec

from kvagent.chaos.schedule import Action, Strike
from kvagent.chaos.target import Gone, Process, Target, find_all
from kvagent.errors import ConfigError

__all__ = ["Drill", "Happened", "Tally"]

ENDINGS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGTSTP)
LOOK = 0.2
"""Seconds between looks for a killed process that should come back."""


class Happened(msgspec.Struct, frozen=True):
    """One strike; `missed` says why nobody was hit. `pid` is 0 then. `at` is when it was due."""

    at: float
    target: str
    action: Action
    pid: int
    missed: str = ""


class Tally(msgspec.Struct):
    """What happened to one target. `returns`: seconds from each SIGKILL until somebody listened
    again; fewer than `killed` when it is not found by a socket, or did not come back."""

    name: str
    killed: int = 0
    stopped: int = 0
    missed: int = 0
    returns: list[float] = msgspec.field(default_factory=list)


@dataclass
class Drill:
    """`run` once. `say` gets a line at a time."""

    targets: Sequence[Target]
    strikes: Sequence[Strike]
    say: Callable[[str], None]
    happened: list[Happened] = field(default_factory=list)
    tallies: dict[str, Tally] = field(default_factory=dict)
    interrupted: int = 0
    """The number of the signal that ended it early."""

    def __post_init__(self) -> None:
        self.tallies = {target.name: Tally(target.name) for target in self.targets}
        self._targets = {target.name: target for target in self.targets}
        self._stopped: dict[str, Process] = {}
        self._killed: dict[str, tuple[Process, float]] = {}
        """Targets that have not come back, and when they were killed."""
        self._began = 0.0
        self._endings: list[signal.Signals] = []

    def run(self) -> None:
        """Raises `ConfigError` when a target is not there at the beginning, or may not be hit."""
        for name, process in find_all(self.targets).items():
            self.say(f"{name} is pid {process.pid}")
        self._began = time.monotonic()
        with _blocked() as self._endings:
            try:
                for strike in self.strikes:
                    if not self._wait(strike.at):
                        break
                    self._strike(strike)
            finally:
                self._continue_all()

    def _wait(self, at: float) -> bool:
        """Until that time of the drill; False when it was interrupted."""
        while True:
            self._look_for_killed()
            left = self._began + at - time.monotonic()
            wait = max(0.0, min(left, LOOK) if self._killed else left)
            got = signal.sigtimedwait(self._endings, wait)
            if got is not None:
                self.interrupted = got.si_signo
                return False
            if left <= 0:
                return True

    def _strike(self, strike: Strike) -> None:
        tally = self.tallies[strike.target]
        try:
            if strike.action is Action.CONTINUE:
                process = self._stopped.pop(strike.target, None)
                if process is None:
                    return  # the fault itself was missed
            else:
                process = self._targets[strike.target].find()
            process.send(signal.Signals[strike.action.value])
        except (Gone, ConfigError) as error:
            tally.missed += strike.action is not Action.CONTINUE
            self._note(strike, 0, str(error))
            return
        if strike.action is Action.KILL:
            tally.killed += 1
            self._killed[strike.target] = (process, time.monotonic())
        elif strike.action is Action.STOP:
            tally.stopped += 1
            self._stopped[strike.target] = process
        self._note(strike, process.pid)

    def _note(self, strike: Strike, pid: int, missed: str = "") -> None:
        self.happened.append(Happened(strike.at, strike.target, strike.action, pid, missed))
        what = f"pid {pid}" if pid else f"missed: {missed}"
        self.say(f"{strike.at:8.3f} s  {strike.action.value}  {strike.target}  {what}")

    def _look_for_killed(self) -> None:
        for name, (old, since) in list(self._killed.items()):
            if self._targets[name].fixed is not None:
                del self._killed[name]  # nobody can take its place
                continue
            try:
                process = self._targets[name].find()
            except (Gone, ConfigError):
                continue
            if process == old:
                continue  # it is dying
            now = time.monotonic()
            del self._killed[name]
            self.tallies[name].returns.append(round(now - since, 3))
            self.say(
                f"{now - self._began:8.3f} s  {name} is back after {now - since:.1f} s, "
                f"pid {process.pid}"
            )

    def _continue_all(self) -> None:
        """Those that are stopped when the drill is interrupted, or fails."""
        stopped, self._stopped = self._stopped, {}
        for process in stopped.values():
            with contextlib.suppress(Gone, ConfigError):
                process.send(signal.SIGCONT)
        for name, process in stopped.items():
            self.say(f"{name}, pid {process.pid}, continued")


@contextlib.contextmanager
def _blocked() -> Iterator[list[signal.Signals]]:
    """The signals that are blocked: not those that are ignored, under nohup for example."""
    endings = [number for number in ENDINGS if signal.getsignal(number) is not signal.SIG_IGN]
    before = signal.pthread_sigmask(signal.SIG_BLOCK, endings)
    try:
        yield endings
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
