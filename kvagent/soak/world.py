"""Sidecars and engines as processes, and their supervisor: what dies is started again, in place.

Ports, sockets and caches stay the same. A death that nobody asked for is kept in `deaths`.
"""

from __future__ import annotations

import os
import random
import signal
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path
from types import TracebackType

from kvagent.demo.processes import Children
from kvagent.memory.host import HostMemory
from kvagent.soak.messages import Event, Join, Up
from kvagent.soak.parts import Engine, Member, Part, Sidecar
from kvagent.soak.scheduler import run_scheduler
from kvagent.soak.shapes import Shape
from kvagent.soak.worker import run_worker

SETTINGS = {
    "lease_seconds": 3.0,
    "fetch_timeout": 4.0,
    "fence_seconds": 1.0,
    "handshake_timeout": 2.0,
    "call_timeout": 1.5,
    "drain_timeout": 2.0,
}
"""Of every sidecar: short, so that what goes wrong is over soon."""
SLOW = {"piece_bytes": 32 << 10, "inflight_bytes": 64 << 10}
CHAOS = {"drop": 0.03, "duplicate": 0.03, "delay": 0.05, "reorder": 0.03, "delay_seconds": 0.3}
START_SECONDS = 120.0
PORTS = range(20000, 32000)
"""Below those that the kernel hands out by itself: nobody takes one while its owner restarts."""


@dataclass(frozen=True)
class Death:
    """A process that nobody had killed."""

    part: str
    how: str
    log: Path
    known: bool
    """One of the crashes of UCX that the README lists: a producer's sidecar, over TCP."""


class World:
    """A context manager: everything ends with it. `tick` drives it."""

    def __init__(self, folder: Path, shapes: Sequence[Shape], seed: int) -> None:
        self.folder = folder
        self.deaths: list[Death] = []
        self.refusals: list[str] = []
        """What a process was told before it was let in; not an error, since it asks again."""
        self._random = random.Random(seed)
        self._tcp = any(shape.tcp for shape in shapes)
        self._children = Children(folder)
        ports = _free_ports(2 * sum(shape.tp for shape in shapes), self._random)
        self.engines = {shape.name: self._make(shape, ports) for shape in shapes}

    def __enter__(self) -> World:
        for engine in self.engines.values():
            for sidecar in engine.sidecars:
                sidecar.start(self._children, self.folder)
        for engine in self.engines.values():
            for rank in range(engine.shape.tp):
                self._start_worker(engine, rank)
            self._start_scheduler(engine)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for engine in self.engines.values():
            for member in (*engine.workers, engine.scheduler):
                if member.process is not None:
                    member.process.kill()
                    member.process.join()
                if member.pipe is not None:
                    member.pipe.connection.close()
            for part in engine.parts():
                if part.paused:
                    part.resume()
        self._children.close()
        for engine in self.engines.values():
            for memory in engine.memory:
                memory.close()

    # ------------------------------------------------------------ supervising

    def tick(self, seconds: float) -> list[tuple[Engine, Event | None]]:
        """Waits that long for news, restarts what is dead. None instead of an event: that
        engine's scheduler is another one now."""
        news: list[tuple[Engine, Event | None]] = []
        members = {
            member.pipe.connection: (engine, member)
            for engine in self.engines.values()
            for member in (*engine.workers, engine.scheduler)
            if member.pipe is not None
        }
        for connection in wait(list(members), seconds):
            engine, member = members[connection]  # type: ignore[index]
            assert member.pipe is not None
            try:
                while member.pipe.waits():
                    event = member.pipe.receive()
                    if isinstance(event, Up):
                        self._came_up(engine, member, event)
                    else:
                        news.append((engine, event))
            except (EOFError, OSError):
                member.pipe.connection.close()
                member.pipe = None
        for engine in self.engines.values():
            engine.flush()
            for part in engine.parts():
                if part.exit_code() is not None and (
                    isinstance(part, Sidecar) or (isinstance(part, Member) and part.pipe is None)
                ):
                    if not part.doomed:
                        self._note_death(engine, part)
                    self._restart(engine, part)
                    if part is engine.scheduler:
                        news.append((engine, None))
        return news

    def wait_up(self) -> None:
        """Until every process is there and joined; at start-up."""
        until = time.monotonic() + START_SECONDS
        while not all(engine.up for engine in self.engines.values()):
            self.tick(0.05)
            if self.deaths or time.monotonic() > until:
                down = [p.name for e in self.engines.values() for p in e.parts() if not p.up]
                raise RuntimeError(f"did not start: {down} {self.deaths}; logs in {self.folder}")

    def sidecars(self) -> Iterator[Sidecar]:
        for engine in self.engines.values():
            yield from engine.sidecars

    def pids(self) -> dict[str, int]:
        parts = (part for engine in self.engines.values() for part in engine.parts())
        return {part.name: part.pid for part in parts}

    def resume_all(self) -> None:
        for engine in self.engines.values():
            for part in engine.parts():
                if part.paused and part.exit_code() is None:
                    part.resume()

    # ------------------------------------------------------------ inside

    def _make(self, shape: Shape, ports: list[int]) -> Engine:
        config = self.folder / f"{shape.name}.toml"
        settings = SETTINGS | (SLOW if shape.slow else {})
        lines = [f"{name} = {value}" for name, value in settings.items()]
        if shape.chaos:
            lines += ["[chaos]", f"seed = {self._random.randrange(1 << 30)}"]
            lines += [f"{name} = {value}" for name, value in CHAOS.items()]
        config.write_text("\n".join(lines) + "\n")
        sidecars = []
        for rank in range(shape.tp):
            path = str(self.folder / f"{shape.name}-{rank}.sock")
            endpoint, http = (f"127.0.0.1:{ports.pop()}" for _ in range(2))
            command = ["env", f"UCX_TLS={'tcp' if shape.tcp else 'all'}", sys.executable]
            command += ["-m", "kvagent", "serve", "--socket", path, "--bind", endpoint]
            command += ["--http", http, "--config", str(config)]
            name = f"{shape.name} sidecar {rank}"
            sidecars.append(
                Sidecar(name, command=command, socket=path, endpoint=endpoint, http=http)
            )
        return Engine(
            shape,
            sidecars,
            [Member(f"{shape.name} worker {rank}") for rank in range(shape.tp)],
            Member(f"{shape.name} scheduler"),
            [HostMemory(shape.rank_bytes) for _ in range(shape.tp)],
        )

    def _start_worker(self, engine: Engine, rank: int) -> None:
        sidecar, leader = engine.sidecars[rank], engine.sidecars[0].endpoint
        path = _path_of(engine.memory[rank])
        engine.workers[rank].start(
            self.folder, run_worker, engine.shape, rank, path, sidecar.socket, leader
        )

    def _start_scheduler(self, engine: Engine) -> None:
        paths = [_path_of(memory) for memory in engine.memory]
        seed = self._random.randrange(1 << 30)
        engine.scheduler.start(
            self.folder, run_scheduler, engine.shape, paths, engine.sidecars[0].socket, seed
        )

    def _came_up(self, engine: Engine, member: Member, event: Up) -> None:
        member.up = member.listens = True
        self.refusals += event.refusals
        if member in engine.workers:
            sidecar = engine.sidecars[engine.workers.index(member)]
            sidecar.up = sidecar.exit_code() is None

    def _restart(self, engine: Engine, part: Part) -> None:
        if isinstance(part, Sidecar):
            part.start(self._children, self.folder)
            worker = engine.workers[engine.sidecars.index(part)]
            worker.up = False
            worker.say(Join())
            if part is engine.sidecars[0]:
                engine.scheduler.up = False
        elif part is engine.scheduler:
            engine.backlog.clear()
            self._start_scheduler(engine)
        else:
            self._start_worker(engine, engine.workers.index(part))  # type: ignore[arg-type]

    def _note_death(self, engine: Engine, part: Part) -> None:
        code = part.exit_code()
        assert code is not None
        how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        known = False
        if isinstance(part, Sidecar) and engine.name.startswith("p") and self._tcp:
            timed_out = "Endpoint timeout" in part.log.read_text(errors="replace")
            known = code == -signal.SIGSEGV or (code == -signal.SIGABRT and timed_out)
        self.deaths.append(Death(part.name, how, part.log, known))


def _path_of(memory: HostMemory) -> str:
    return f"/proc/{os.getpid()}/fd/{memory.fd}"


def _free_ports(number: int, choose: random.Random) -> list[int]:
    found: list[int] = []
    while len(found) < number:
        port = choose.choice(PORTS)
        with socket.socket() as sock:
            try:
                sock.bind(("127.0.0.1", port))
            except OSError:
                continue
        if port not in found:
            found.append(port)
    return found
