"""The processes of one engine: sidecars, workers, scheduler; started, stopped and killed by hand.

Who restarts them is `world`'s business.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import httpx

from kvagent.demo.processes import Child, Children
from kvagent.memory.host import HostMemory
from kvagent.soak.messages import Command, Event, Pipe
from kvagent.soak.shapes import Shape

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["kvagent.soak.scheduler"])


@dataclass
class Part:
    """One process of an engine, in its present incarnation."""

    name: str
    up: bool = False
    doomed: bool = False
    """Somebody ended it on purpose."""
    paused: bool = False
    lives: int = 0
    started: float = 0.0
    log: Path = Path()

    @property
    def pid(self) -> int:
        raise NotImplementedError

    def exit_code(self) -> int | None:
        """None while it lives; minus the signal's number."""
        raise NotImplementedError

    def signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        self.doomed = True
        self.signal(signal.SIGKILL)

    def terminate(self) -> None:
        """SIGTERM: a sidecar drains, and ends."""
        self.doomed = True
        self.signal(signal.SIGTERM)

    def stop(self) -> None:
        self.paused = True
        self.signal(signal.SIGSTOP)

    def resume(self) -> None:
        self.paused = False
        self.signal(signal.SIGCONT)

    def _begin(self, folder: Path) -> None:
        self.lives += 1
        self.up = self.doomed = self.paused = False
        self.started = time.monotonic()
        self.log = folder / f"{self.name.replace(' ', '-')}.{self.lives}.log"


@dataclass
class Sidecar(Part):
    """It is up when its worker has joined."""

    command: Sequence[str] = ()
    socket: str = ""
    endpoint: str = ""
    http: str = ""
    child: Child | None = None

    @property
    def pid(self) -> int:
        assert self.child is not None
        return self.child.process.pid

    def exit_code(self) -> int | None:
        assert self.child is not None
        return self.child.status()

    def start(self, children: Children, folder: Path) -> None:
        self._begin(folder)
        self.child = children.start(self.log.stem, self.command)

    def status(self) -> dict[str, Any]:
        """What /status says."""
        answer: dict[str, Any] = httpx.get(f"http://{self.http}/status", timeout=5).json()
        return answer

    def resident(self) -> int:
        """Bytes of its own memory, shared memory (the cache) not counted."""
        try:
            with open(f"/proc/{self.pid}/status") as lines:
                for line in lines:
                    if line.startswith("RssAnon:"):
                        return int(line.split()[1]) * 1024
        except OSError:
            pass
        return 0


@dataclass
class Member(Part):
    """A worker or the scheduler."""

    process: BaseProcess | None = None
    pipe: Pipe[Event] | None = None
    listens: bool = False
    """It has been up in this life, and empties its pipe while it is not stopped."""

    @property
    def pid(self) -> int:
        assert self.process is not None
        assert self.process.pid is not None
        return self.process.pid

    def exit_code(self) -> int | None:
        assert self.process is not None
        return self.process.exitcode

    def start(self, folder: Path, target: Any, *arguments: Any) -> None:
        self._begin(folder)
        self.listens = False
        ours, theirs = _context.Pipe()
        self.process = _context.Process(
            target=target, args=(theirs, str(self.log), *arguments), daemon=True
        )
        self.process.start()
        theirs.close()
        self.pipe = Pipe(ours, Event)

    def say(self, message: Command) -> None:
        if self.pipe is not None:
            try:
                self.pipe.send(message)
            except OSError:
                pass  # it died; `tick` notices


@dataclass
class Engine:
    shape: Shape
    sidecars: list[Sidecar]
    workers: list[Member]
    scheduler: Member
    memory: list[HostMemory]
    backlog: list[Command] = field(default_factory=list)
    """Kept for a scheduler that does not empty its pipe."""

    @property
    def name(self) -> str:
        return self.shape.name

    @property
    def up(self) -> bool:
        return all(part.up and not part.doomed for part in self.parts())

    def parts(self) -> Iterator[Part]:
        yield from self.sidecars
        yield from self.workers
        yield self.scheduler

    def say(self, command: Command) -> None:
        """To the scheduler, now or as soon as it listens."""
        self.backlog.append(command)
        self.flush()

    def flush(self) -> None:
        if self.backlog and self.scheduler.listens and not self.scheduler.paused:
            backlog, self.backlog = self.backlog, []
            for command in backlog:
                self.scheduler.say(command)
