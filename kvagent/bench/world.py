"""Where the benchmark runs: the processes of two sides, and how they reach one another.

`shm` and `tcp` are two sides of one host; with `netns` each has a network namespace of its own and
a veth pair joins them, so that TCP is what two hosts would use (this needs root and `ip`).
"""

from __future__ import annotations

import itertools
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from enum import Enum
from pathlib import Path
from types import TracebackType
from typing import Literal, TypeVar

import msgspec

from kvagent.demo.processes import Child, Children
from kvagent.errors import KVAgentError

__all__ = ["Helper", "Side", "Transport", "World", "why_no_netns"]

T = TypeVar("T")

Side = Literal["producer", "consumer"]
START_SECONDS = 120.0
ANSWER_SECONDS = 300.0


class Transport(str, Enum):
    """What UCX may use."""

    shm = "shm"
    tcp = "tcp"


class Sidecar:
    """A `kvagent serve` process."""

    def __init__(self, child: Child, socket_path: Path) -> None:
        self.child = child
        self.socket = str(socket_path)

    @property
    def pid(self) -> int:
        return self.child.process.pid

    def wait(self) -> None:
        until = time.monotonic() + START_SECONDS
        while not os.path.exists(self.socket):
            if self.child.status() is not None:
                raise KVAgentError(f"a sidecar did not start:\n{self.child.tail()}")
            if time.monotonic() > until:
                raise KVAgentError(f"a sidecar did not start in {START_SECONDS:g} s")
            time.sleep(0.02)


class Helper:
    """A process of the benchmark's own that answers questions, one JSON line each."""

    def __init__(self, child: Child, listener: socket.socket) -> None:
        self.child = child
        with listener:
            listener.settimeout(0.2)
            until = time.monotonic() + START_SECONDS
            while True:
                try:
                    connection, _ = listener.accept()
                    break
                except TimeoutError:
                    if child.status() is not None or time.monotonic() > until:
                        raise KVAgentError(f"{child.name} did not start:\n{child.tail()}") from None
        connection.settimeout(ANSWER_SECONDS)
        self._file = connection.makefile("rwb")
        connection.close()  # the file keeps it open

    def tell(self, question: object) -> None:
        """Asks, without waiting for the answer."""
        self._file.write(msgspec.json.encode(question) + b"\n")
        self._file.flush()

    def answer(self, kind: type[T]) -> T:
        """Of the last question. Raises `KVAgentError` with what the process said last."""
        try:
            line = self._file.readline()
            if line:
                return msgspec.json.decode(line, type=kind)
        except (OSError, msgspec.MsgspecError) as error:
            raise KVAgentError(f"{self.child.name}: {error}\n{self.child.tail()}") from error
        raise KVAgentError(f"{self.child.name} ended:\n{self.child.tail()}")

    def ask(self, question: object, kind: type[T]) -> T:
        self.tell(question)
        return self.answer(kind)

    def close(self) -> None:
        """It ends when its connection does."""
        self._file.close()


class World:
    """A context manager; at its end all its processes and namespaces are gone."""

    def __init__(self, transport: Transport, *, netns: bool = False, host: str = "") -> None:
        """`host`: the address to bind to, when the other side is another machine."""
        self.transport = transport
        self.netns = netns
        self._host = host
        self._folder = Path(tempfile.mkdtemp(prefix="kvagent-bench-"))
        self._children = Children(self._folder)
        self._sidecars: dict[Side, list[Sidecar]] = {"producer": [], "consumer": []}
        self._raw: dict[Side, list[Helper]] = {"producer": [], "consumer": []}
        self._count = 0
        self._names: dict[Side, str] = {}
        if netns:
            self._join_namespaces()

    def _join_namespaces(self) -> None:
        """10.77.x.1 and .2, x from our process id, so that two benchmarks do not collide."""
        number = os.getpid()
        self._names = {"producer": f"kvbench-{number}-p", "consumer": f"kvbench-{number}-c"}
        names, links = [*self._names.values()], [f"kvb{number % 10**8}{end}" for end in "pc"]
        try:
            for name in names:
                _ip("netns", "add", name)
            _ip("link", "add", links[0], "type", "veth", "peer", "name", links[1])
            for side, name, link in zip(self._names, names, links, strict=True):
                _ip("link", "set", link, "netns", name)
                _ip("-n", name, "address", "add", f"{self.address(side)}/24", "dev", link)
                _ip("-n", name, "link", "set", link, "up")
                _ip("-n", name, "link", "set", "lo", "up")
        except BaseException:
            self.close()
            raise

    def address(self, side: Side) -> str:
        """That the other side reaches this one at."""
        if self.netns:
            return f"10.77.{os.getpid() % 256}.{1 if side == 'producer' else 2}"
        return self._host or "127.0.0.1"

    @property
    def local(self) -> bool:
        """Both sides are on this host, in one network."""
        return not self.netns and not self._host

    # ------------------------------------------------------------ processes

    def start(self, side: Side, name: str, command: Sequence[str], **env: str) -> Child:
        """A process on one side. `env` comes on top of what the transport needs."""
        if self.transport is Transport.tcp:
            env = {"UCX_TLS": "tcp", **env}
        if self.local:
            env = {"UCX_NET_DEVICES": "lo", **env}
        prefix = ["ip", "netns", "exec", self._names[side]] if self.netns else []
        self._count += 1
        words = [f"{key}={value}" for key, value in env.items()]
        return self._children.start(
            f"{side} {name} {self._count}", [*prefix, "env", *words, *command]
        )

    def helper(self, side: Side, command: Sequence[str], **env: str) -> Helper:
        """A process that is told the path of a unix socket to connect to, as last argument."""
        path = self._folder / f"helper-{self._count}.sock"
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(str(path))
        listener.listen(1)
        return Helper(self.start(side, "helper", [*command, str(path)], **env), listener)

    def sidecars(self, side: Side, count: int) -> list[Sidecar]:
        """`count` running sidecars of a side, for an engine to join; they are kept and reused."""
        pool = self._sidecars[side]
        fresh = []
        while len(pool) < count:
            path = self._folder / f"{side}-{len(pool)}.sock"
            command = [sys.executable, "-m", "kvagent", "serve", "--socket", str(path)]
            if not self.local:
                command += ["--bind", f"{self.address(side)}:0", "--insecure"]
            fresh.append(Sidecar(self.start(side, f"sidecar {len(pool)}", command), path))
            pool.append(fresh[-1])
        for sidecar in fresh:
            sidecar.wait()
        return pool[:count]

    def raw_ranks(self, side: Side, count: int) -> list[Helper]:
        """The same for `raw` ranks."""
        pool = self._raw[side]
        while len(pool) < count:
            pool.append(self.helper(side, [sys.executable, "-m", "kvagent.bench.raw"]))
        return pool[:count]

    def close(self) -> None:
        for helper in itertools.chain(*self._raw.values()):
            helper.close()
        self._children.close()
        for name in self._names.values():
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)
        shutil.rmtree(self._folder, ignore_errors=True)

    def __enter__(self) -> World:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _ip(*words: str) -> None:
    done = subprocess.run(["ip", *words], capture_output=True, text=True, check=False)
    if done.returncode:
        raise KVAgentError(f"ip {' '.join(words)}: {done.stderr.strip()}")


def why_no_netns() -> str:
    """Empty when network namespaces can be made here."""
    if shutil.which("ip") is None:
        return "there is no `ip` program (iproute2)"
    if os.geteuid() != 0:
        return "making network namespaces needs root"
    name = f"kvbench-{os.getpid()}-try"
    try:
        _ip("netns", "add", name)
    except KVAgentError as error:
        return str(error)
    _ip("netns", "delete", name)
    return ""
