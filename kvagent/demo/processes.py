"""Child processes that never outlive this one.

Each child leads a process group of its own: Ctrl-C in a terminal reaches only us, and we end the
children. Should we be killed ourselves, the kernel kills them (Linux's PR_SET_PDEATHSIG). What
they print goes to a log file each.

For the main thread of a process: the kernel watches the thread that started a child, and the
signals that arrive while children are being ended are handled.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn, TypeVar

from kvagent.errors import KVAgentError

__all__ = ["Child", "Children", "exit_on_sigterm", "until"]

T = TypeVar("T")

_POLL_SECONDS = 0.05
_TERM_SECONDS = 5.0
"""How long children may take to end when they are told to; then they are killed."""
_TAIL_LINES = 20

# Run by the child before it becomes the command. Not Popen's `preexec_fn`: that runs Python in a
# forked copy of a process that may have threads.
_TIE_TO_PARENT = """
import ctypes, os, signal, sys
PR_SET_PDEATHSIG = 1
ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
if os.getppid() != int(sys.argv[1]):
    sys.exit("the parent is gone")
os.execvp(sys.argv[2], sys.argv[2:])
"""


@dataclass(frozen=True)
class Child:
    """A process that was started, and where its output goes."""

    name: str
    process: subprocess.Popen[bytes]
    log: Path

    def status(self) -> int | None:
        """How it ended: the exit code, or minus the signal; None while it runs.

        The process is left unreaped, so that nobody else can be given its number before its whole
        group has been ended.
        """
        result = os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if result is None:
            return None
        return result.si_status if result.si_code == os.CLD_EXITED else -result.si_status

    def output(self) -> str:
        return self.log.read_text(errors="replace")

    def tail(self) -> str:
        """The last lines of its output."""
        with self.log.open(errors="replace") as lines:
            return "".join(deque(lines, _TAIL_LINES)).rstrip() or "(it printed nothing)"

    def end_group(self) -> None:
        """Kills what is left of the process and of those that it started."""
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


class Children:
    """A context manager; at its end all children are ended too. Logs are written to `folder`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._children: list[Child] = []

    def start(self, name: str, command: Sequence[str]) -> Child:
        """Starts `command`; `name` is what people call it, and the name of its log file."""
        log = self._folder / f"{name.replace(' ', '-')}.log"
        tied = [sys.executable, "-ISc", _TIE_TO_PARENT, str(os.getpid()), *command]
        with log.open("wb") as output:
            process = subprocess.Popen(
                tied,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        child = Child(name, process, log)
        self._children.append(child)
        return child

    def check(self) -> None:
        """Raises `KVAgentError`, with the end of its log, if a child has ended by itself."""
        for child in self._children:
            status = child.status()
            if status is not None:
                how = f"exit code {status}" if status >= 0 else signal.Signals(-status).name
                raise KVAgentError(f"{child.name} ended ({how}); its last words:\n{child.tail()}")

    async def run(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of `work`; gives it up and raises `KVAgentError` when a child ends."""
        task = asyncio.ensure_future(work)
        try:
            while not task.done():
                self.check()
                await asyncio.wait({task}, timeout=_POLL_SECONDS)
            self.check()
            return task.result()
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    def close(self) -> None:
        """Ends all children, the youngest first; those that take long are killed, and all of
        them at once if a signal tells us to hurry."""
        deadline = time.monotonic() + _TERM_SECONDS

        def hurry(*_: object) -> None:
            nonlocal deadline
            deadline = 0.0

        before = {
            number: signal.signal(number, hurry) for number in (signal.SIGINT, signal.SIGTERM)
        }
        try:
            running = [child for child in reversed(self._children) if child.status() is None]
            for child in running:
                child.process.terminate()
            while any(child.status() is None for child in running) and time.monotonic() < deadline:
                time.sleep(_POLL_SECONDS)
            while self._children:
                self._children.pop().end_group()
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def __enter__(self) -> Children:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


async def until(condition: Callable[[], T], what: str, seconds: float) -> T:
    """The first result of `condition` that is true; `KVAgentError` says what took too long."""
    deadline = time.monotonic() + seconds
    while not (result := condition()):
        if time.monotonic() > deadline:
            raise KVAgentError(f"{what}: not ready after {seconds:g} s")
        await asyncio.sleep(_POLL_SECONDS)
    return result


@contextmanager
def exit_on_sigterm() -> Iterator[None]:
    """SIGTERM and SIGHUP become `SystemExit`, so that children are ended on the way out."""

    def leave(number: int, _: object) -> NoReturn:
        sys.exit(128 + number)

    numbers = (signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, leave) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
