"""The processes of a drill: found by the socket that they listen on or by their number, and hit
only while they are who they were.

Who listens on a socket is asked with SO_PEERCRED: the kernel says who called `listen`, without a
look at other processes' descriptors. A process is signalled through a pidfd, after its start time
was compared, so that a number which was given to another process is never hit.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvagent.errors import ConfigError

__all__ = ["Gone", "Process", "Target", "find_all", "parse_targets"]

_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid


class Gone(Exception):
    """There is nobody to hit; says why."""


@dataclass(frozen=True, slots=True)
class Process:
    """`started`: in clock ticks after boot, as the kernel counts."""

    pid: int
    started: int

    @classmethod
    def of(cls, pid: int) -> Process:
        """Raises `Gone`."""
        return cls(pid, _start_time(pid))

    def send(self, number: int) -> None:
        """0 only checks. Raises `Gone`, or `ConfigError` when we may not."""
        with self._open() as fd:
            try:
                signal.pidfd_send_signal(fd, number)
            except ProcessLookupError:
                raise Gone(f"pid {self.pid} is gone") from None
            except PermissionError:
                raise ConfigError(
                    f"chaos: may not signal pid {self.pid}: run the drill as its user, or as root"
                ) from None

    @contextlib.contextmanager
    def _open(self) -> Iterator[int]:
        try:
            fd = os.pidfd_open(self.pid)
        except ProcessLookupError:
            raise Gone(f"pid {self.pid} is gone") from None
        except OSError as error:
            raise ConfigError(f"chaos: pidfd_open of {self.pid}: {error.strerror}") from error
        try:
            # Looked at while the descriptor is open: from here on it is this process's.
            if _start_time(self.pid) != self.started:
                raise Gone(f"pid {self.pid} is another process by now")
            yield fd
        finally:
            os.close(fd)


@dataclass(frozen=True, slots=True)
class Target:
    """`fixed` is None for one that is found by the path of its socket."""

    name: str
    path: str = ""
    fixed: Process | None = None

    def find(self) -> Process:
        """Whoever it is now. Raises `Gone`, or `ConfigError` for one that must not be hit."""
        if self.fixed is not None:
            if _start_time(self.fixed.pid) != self.fixed.started:
                raise Gone(f"pid {self.fixed.pid} is another process by now")
            return self.fixed
        pid = _listener(self.path)
        _refuse(self.name, pid)
        return Process.of(pid)


def parse_targets(texts: Sequence[str]) -> list[Target]:
    """From NAME=SOCKET and NAME=PID, whose processes are looked at. Raises `ConfigError`."""
    found: dict[str, Target] = {}
    for text in texts:
        name, _, value = text.partition("=")
        if not name or not value:
            raise ConfigError(f"chaos: target {text!r} is not NAME=SOCKET or NAME=PID")
        if name in found:
            raise ConfigError(f"chaos: two targets are named {name!r}")
        if value.isdecimal():
            _refuse(name, int(value))
            try:
                found[name] = Target(name, fixed=Process.of(int(value)))
            except Gone as error:
                raise ConfigError(f"chaos: target {name}: {error}") from None
        else:
            found[name] = Target(name, path=value)
    return list(found.values())


def find_all(targets: Sequence[Target]) -> dict[str, Process]:
    """All processes, by the target's name. Raises `ConfigError` when one is not there, may not be
    hit, or is there twice."""
    found: dict[str, Process] = {}
    for target in targets:
        try:
            process = target.find()
            process.send(0)
        except Gone as error:
            raise ConfigError(f"chaos: target {target.name}: {error}") from None
        for other, known in found.items():
            if known == process:
                raise ConfigError(f"chaos: {other} and {target.name} are both pid {process.pid}")
        found[target.name] = process
    return found


def _refuse(name: str, pid: int) -> None:
    if pid == 1:
        raise ConfigError(
            f"chaos: target {name} is pid 1, which starts everything else here: name a process "
            "below it (for a socket that pid 1 listens on for a service: the service's pid)"
        )
    if pid == os.getpid():
        raise ConfigError(f"chaos: target {name} is this drill itself")
    if pid < 1:
        raise ConfigError(f"chaos: target {name}: its process cannot be seen from this container")


def _listener(path: str) -> int:
    """The pid of whoever listens on a unix socket."""
    with socket.socket(socket.AF_UNIX) as sock:
        sock.setblocking(False)
        try:
            sock.connect(path)
        except (FileNotFoundError, ConnectionRefusedError):
            raise Gone(f"nobody listens on {path}") from None
        except BlockingIOError:
            raise Gone(f"{path} takes no connections") from None
        except OSError as error:
            raise ConfigError(f"chaos: {path!r} is not a socket of a sidecar: {error}") from error
        data = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid: int = _CREDENTIALS.unpack(data)[0]
    return pid


def _start_time(pid: int) -> int:
    """Raises `Gone`, for a zombie too."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        raise Gone(f"pid {pid} is gone") from None
    # The name, in parentheses, may hold anything; after it come state (3rd) and start time (22nd).
    fields = text.rpartition(")")[2].split()
    if fields[0] in "ZX":
        raise Gone(f"pid {pid} is gone")
    return int(fields[19])
