"""An engine that is checked, seen from the check: the processes of its ranks and sidecars."""

from __future__ import annotations

import os
import selectors
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

import msgspec

from kvagent.demo.processes import Child, Children
from kvagent.doctor.reading import WATCH
from kvagent.gpu_check.setup import Answer, Command, RankSetup, Side

__all__ = ["CheckFailed", "Engine"]

START_SECONDS = 90.0
ANSWER_SECONDS = 90.0


class CheckFailed(Exception):
    """A check that did not come out as it should; the message says how."""


@dataclass
class _Process:
    child: subprocess.Popen[bytes]
    log: Path
    buffer: bytearray = field(default_factory=bytearray)


class Engine:
    """A context manager. Make two before `start` of either, so that they start at once."""

    def __init__(self, folder: Path, engine_id: str, side: Side, *, sidecars: bool) -> None:
        self.side = side
        self._folder, self._id, self._sidecars = folder, engine_id, sidecars
        self._children = Children(folder)
        self._serving: list[Child] = []
        self._ranks: list[_Process] = []
        self._env = {**os.environ, **WATCH, **side.env}
        if sidecars:
            for rank in range(side.tp):
                self._serve(rank)

    def _serve(self, rank: int) -> None:
        command = [
            *(sys.executable, "-m", "kvagent", "serve", "--socket", self._socket(rank)),
            *("--bind", "127.0.0.1:0"),
        ]
        settings = {"KVAGENT_KV_BUFFER": self.side.kv_buffer, **WATCH, **self.side.env}
        pairs = [f"{name}={value}" for name, value in settings.items()]
        child = self._children.start(f"{self._id} sidecar {rank}", ["env", *pairs, *command])
        self._serving.append(child)

    def _socket(self, rank: int) -> str:
        return str(self._folder / f"{self._id}-{rank}.sock")

    def begin(self) -> None:
        """Rank 0's process; the others need its endpoint."""
        self._launch(0, None)

    def start(self) -> None:
        """Returns when all ranks are there and rank 0 is ready."""
        leader = self._read(0, START_SECONDS).endpoint
        for rank in range(1, self.side.tp):
            self._launch(rank, leader)
        for rank in range(1, self.side.tp):
            self._read(rank, START_SECONDS)
        self.tell(Command(do="ready"))

    def _launch(self, rank: int, leader: str | None) -> None:
        setup = RankSetup(
            engine_id=self._id,
            rank=rank,
            side=self.side,
            socket=self._socket(rank) if self._sidecars else "",
            leader=leader,
            parent=os.getpid(),
        )
        words = msgspec.json.encode(setup).decode()
        command = [sys.executable, "-m", "kvagent.gpu_check.rank", words]
        log = self._folder / f"{self._id}-rank-{rank}.log"
        with log.open("wb") as output:
            child = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=output,
                env=self._env,
            )
        self._ranks.append(_Process(child, log))

    def tell(self, command: Command, rank: int = 0) -> Answer:
        """What one rank answers. Raises `CheckFailed` with the reason when it cannot do it."""
        stdin = self._ranks[rank].child.stdin
        assert stdin is not None
        try:
            stdin.write(msgspec.json.encode(command) + b"\n")
            stdin.flush()
        except BrokenPipeError:
            pass  # it is gone, and its log says why
        return self._read(rank, ANSWER_SECONDS)

    def tell_all(self, command: Command) -> list[Answer]:
        return [self.tell(command, rank) for rank in range(self.side.tp)]

    def _read(self, rank: int, seconds: float) -> Answer:
        process = self._ranks[rank]
        stdout = process.child.stdout
        assert stdout is not None
        until = time.monotonic() + seconds
        with selectors.DefaultSelector() as selector:
            selector.register(stdout, selectors.EVENT_READ)
            while b"\n" not in process.buffer:
                if not selector.select(max(0.0, until - time.monotonic())):
                    raise CheckFailed(f"{self._id} rank {rank} does not answer: {process.log}")
                data = os.read(stdout.fileno(), 1 << 16)
                if not data:
                    code = process.child.wait()
                    last = "\n".join(_lines(process.log)[-8:])
                    raise CheckFailed(f"{self._id} rank {rank} ended with {code}:\n{last}")
                process.buffer += data
        line, _, rest = bytes(process.buffer).partition(b"\n")
        process.buffer[:] = rest
        answer = msgspec.json.decode(line, type=Answer)
        if answer.failure:
            raise CheckFailed(f"{self._id} rank {rank}: {answer.failure}")
        return answer

    def log_lines(self) -> Sequence[str]:
        """What the processes that read wrote: ranks with an agent in them, or sidecars."""
        logs = [child.log for child in self._serving] or [rank.log for rank in self._ranks]
        return [line for log in logs for line in _lines(log)]

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for rank in self._ranks:
            assert rank.child.stdin is not None
            assert rank.child.stdout is not None
            rank.child.stdin.close()
        for rank in self._ranks:
            try:
                rank.child.wait(10.0)
            except subprocess.TimeoutExpired:
                rank.child.kill()
                rank.child.wait()
            assert rank.child.stdout is not None
            rank.child.stdout.close()
        self._children.close()


def _lines(log: Path) -> list[str]:
    return log.read_text(errors="replace").splitlines()
