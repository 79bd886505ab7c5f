"""The unix socket server: connections, their descriptors, and what each message asks for.

One connection is either a worker's (it speaks of memory) or a scheduler's (it speaks of
transfers). Messages of one connection are taken in order; a bad one ends its connection with a
`Failed` that says why, and nothing else. So does one refusal too many. Nothing more is read while
much of what came has yet to be looked at.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import time
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from functools import partial
from typing import Any

from kvagent.errors import KVAgentError, ProtocolError
from kvagent.wire import local
from kvagent.wire.messages import Failed, Local
from kvagent.wire.refusals import Patience

log = logging.getLogger("kvagent.local")

MAX_UNSENT = 256 << 20
"""Bytes kept for a scheduler that does not read; beyond that it is taken for dead."""
MAX_WAITING = 1 << 20
"""Bytes that may have come and not been looked at, beyond one message."""
MAX_REFUSALS = 500
REFUSALS_PER_SECOND = 10.0
"""Of one connection: so many at once, and so many in the long run."""
MAX_CONNECTIONS = 64
ACCEPT_PAUSE = 1.0
"""Seconds without accepting after it failed."""

Handler = Callable[["Connection", Local], Coroutine[Any, Any, None] | None]
"""Does what a message asks for at once, or takes its time."""


class Connection:
    """One engine process. `closed` is called once, when it has gone, whatever the reason."""

    def __init__(
        self, sock: socket.socket, handler: Handler, closed: Callable[[Connection], Awaitable[None]]
    ) -> None:
        self.role = ""
        self.in_process = False
        self._socket = sock
        self._handler = handler
        self._closed = closed
        self._loop = asyncio.get_running_loop()
        self._reader = local.FrameReader()
        self._inbox: deque[Local] = deque()
        """What came while `_task` was at work."""
        self._waiting = 0
        self._paused = False
        self._patience = Patience(REFUSALS_PER_SECOND, MAX_REFUSALS)
        self._unsent = bytearray()
        self._fds: list[int] = []
        self._open = True
        self._deaf = False
        self.ended_by_us = False
        sock.setblocking(False)
        self._loop.add_reader(sock.fileno(), self._readable)
        self._task: asyncio.Task[None] | None = None
        self._over: asyncio.Task[None] | None = None

    def send(self, message: Local, fds: Sequence[int] = ()) -> None:
        """Queues a frame. Descriptors go at once: the socket of a waiting caller is empty."""
        if not self._open or self._deaf:
            return
        data = local.frame(message)
        try:
            if fds:
                sent = socket.send_fds(self._socket, [data], list(fds))
            elif not self._unsent:
                sent = self._socket.send(data)
            else:
                sent = 0
        except BlockingIOError:
            sent = 0
        except OSError as error:
            self._hung_up(error)
            return
        if sent < len(data):
            self._unsent += memoryview(data)[sent:]
            if len(self._unsent) > MAX_UNSENT:
                self._end("it does not read", by_us=True)
                return
            self._loop.add_writer(self._socket.fileno(), self._writable)

    def take_fds(self, count: int) -> list[int]:
        """The `count` descriptors that came with this message; the caller owns them."""
        if len(self._fds) < count:
            raise ProtocolError(f"{count} descriptors announced, {len(self._fds)} came")
        taken, self._fds = self._fds[:count], self._fds[count:]
        return taken

    async def close(self) -> None:
        self._end("the sidecar is stopping")
        if self._task is not None:
            self._task.cancel()
        if self._over is not None:
            await asyncio.gather(self._over, return_exceptions=True)

    def _readable(self) -> None:
        try:
            data, fds = local.receive(self._socket)
            self._fds += fds
            if len(self._fds) > local.MAX_FDS:
                raise ProtocolError("more descriptors than messages that take them")
            if not data:
                self._end("end of stream")
                return
            for message in self._reader.feed(data):
                self._take(message)
            self._waiting += len(data)
            if not self._inbox:
                self._waiting = 0
            elif self._waiting > MAX_WAITING and self._open:
                self._paused = True
                self._loop.remove_reader(self._socket.fileno())
        except BlockingIOError:
            return
        except ProtocolError as error:
            self.send(Failed(code="ProtocolError", message=str(error)))
            self._end(f"bad message: {error}", by_us=True)
        except OSError as error:
            self._end(str(error))

    def _looked_at(self) -> None:
        """All that came."""
        self._waiting = 0
        if self._paused and self._open:
            self._paused = False
            self._loop.add_reader(self._socket.fileno(), self._readable)

    def _writable(self) -> None:
        try:
            sent = self._socket.send(self._unsent)
        except BlockingIOError:
            return
        except OSError as error:
            self._hung_up(error)
            return
        del self._unsent[:sent]
        if not self._unsent:
            self._loop.remove_writer(self._socket.fileno())

    def _hung_up(self, error: OSError) -> None:
        """Nobody reads there any more. What they said before they went is still to be read, up to
        the end of the stream."""
        log.debug("send to %s: %s", self.role or "nobody", error)
        self._deaf = True
        self._unsent.clear()
        self._loop.remove_writer(self._socket.fileno())

    def _end(self, why: str, *, by_us: bool = False) -> None:
        if not self._open:
            return
        self._open = False
        self.ended_by_us = by_us
        log.debug("connection of %s ended: %s", self.role or "nobody", why)
        self._loop.remove_reader(self._socket.fileno())
        self._loop.remove_writer(self._socket.fileno())
        for fd in self._fds:
            os.close(fd)
        self._fds.clear()
        self._over = asyncio.create_task(self._finish())

    def _take(self, message: Local) -> None:
        """Most messages are done with at once; those behind one that is not wait for it."""
        if self._task is not None:
            self._inbox.append(message)
        elif not self.ended_by_us:
            self._begin(message)

    def _begin(self, message: Local) -> None:
        try:
            work = self._handler(self, message)
        except Exception as error:
            self._failed(message, error)
            return
        if work is not None:
            self._task = asyncio.create_task(work)
            self._task.add_done_callback(partial(self._done, message))

    def _done(self, message: Local, task: asyncio.Task[None]) -> None:
        self._task = None
        if task.cancelled():
            self._inbox.clear()
        elif isinstance(error := task.exception(), Exception):
            self._failed(message, error)
        while self._inbox and self._task is None and not self.ended_by_us:
            self._begin(self._inbox.popleft())
        if not self._inbox:
            self._looked_at()

    def _failed(self, message: Local, error: Exception) -> None:
        if not isinstance(error, KVAgentError):
            log.error("%s failed", type(message).__name__, exc_info=error)
            self.send(Failed(code="AgentError", message=f"internal error: {error!r}"))
            return
        log.warning("%s refused: %s", type(message).__name__, error)
        self.send(Failed(code=type(error).__name__, message=str(error)))
        self._patience.refused(b"", time.monotonic())
        if self._patience.lost(b"", time.monotonic()):
            self._end("it is refused again and again", by_us=True)

    async def _finish(self) -> None:
        """After what was being looked at."""
        try:
            while self._task is not None:
                await asyncio.wait({self._task})
            await self._closed(self)
        finally:
            self._socket.close()


class LocalServer:
    """Listens on the unix socket, and lets in only processes of our own user."""

    def __init__(self, handler: Handler, gone: Callable[[Connection], Awaitable[None]]) -> None:
        self._handler = handler
        self._gone = gone
        self._connections: set[Connection] = set()
        self._listener: socket.socket | None = None
        self._path = ""

    def listen(self, path: str) -> None:
        self._listener = local.listen(path)
        self._path = path
        asyncio.get_running_loop().add_reader(self._listener.fileno(), self._accept)

    def adopt(self, sock: socket.socket, *, in_process: bool) -> Connection:
        """Serves an open socket. `in_process`: the other end is a thread of this process."""
        connection = Connection(sock, self._handler, self._closed)
        connection.in_process = in_process
        self._connections.add(connection)
        return connection

    def _accept(self) -> None:
        assert self._listener is not None
        try:
            sock, _ = self._listener.accept()
        except OSError as error:
            # Out of descriptors, most likely: the socket stays readable, so look away for a while.
            log.warning("accept: %s; waiting %g s", error, ACCEPT_PAUSE)
            loop = asyncio.get_running_loop()
            loop.remove_reader(self._listener.fileno())
            loop.call_later(ACCEPT_PAUSE, self._resume)
            return
        try:
            uid = local.peer_uid(sock)
        except OSError:
            sock.close()
            return
        if not local.allowed(uid) or len(self._connections) >= MAX_CONNECTIONS:
            why = "too many connections" if local.allowed(uid) else f"uid {uid} is not ours"
            log.warning("connection refused: %s", why)
            try:
                sock.send(local.frame(Failed(code="AgentError", message=f"refused: {why}")))
            except OSError:
                pass
            sock.close()
            return
        self.adopt(sock, in_process=False)

    def _resume(self) -> None:
        if self._listener is not None and self._listener.fileno() >= 0:
            asyncio.get_running_loop().add_reader(self._listener.fileno(), self._accept)

    async def _closed(self, connection: Connection) -> None:
        self._connections.discard(connection)
        await self._gone(connection)

    async def close(self) -> None:
        if self._listener is not None:
            asyncio.get_running_loop().remove_reader(self._listener.fileno())
            self._listener.close()
            try:
                os.unlink(self._path)
            except OSError:
                pass
        for connection in list(self._connections):
            await connection.close()
