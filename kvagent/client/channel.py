"""One blocking connection to a sidecar: a call and its answer, descriptors included."""

from __future__ import annotations

import os
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Sequence
from types import TracebackType

from kvagent import errors
from kvagent.errors import AgentError, AgentLostError, KVAgentError
from kvagent.wire import local
from kvagent.wire.messages import Failed, Local

Address = str | socket.socket
"""The path of a sidecar's unix socket, or an open socket to an embedded agent."""


def open_socket(address: Address, timeout: float) -> socket.socket:
    return local.connect(address, timeout) if isinstance(address, str) else address


def error_of(failed: Failed) -> KVAgentError:
    """The exception that the sidecar's answer names, or `AgentError`."""
    kind = getattr(errors, failed.code, None)
    if isinstance(kind, type) and issubclass(kind, KVAgentError):
        return kind(failed.message)
    return AgentError(f"{failed.code}: {failed.message}")


class Channel:
    """Calls in turn; safe to use from several threads."""

    def __init__(self, address: Address, timeout: float) -> None:
        self._socket = open_socket(address, timeout)
        self._timeout = timeout
        self._reader = local.FrameReader()
        self._arrived: deque[Local] = deque()
        self._fds: list[int] = []
        self._lock = threading.Lock()
        self._dead = False
        """A call got no answer: a later one must not take that for its own."""

    def call(self, message: Local, fds: Sequence[int] = (), timeout: float = 0) -> Local:
        """Sends `message` with `fds` beside it and waits for the answer."""
        with self._lock:
            if self._dead:
                raise AgentLostError("an earlier call got no answer; open a new client")
            try:
                self._socket.settimeout(self._timeout)
                try:
                    local.send_with_fds(self._socket, local.frame(message), fds)
                except BrokenPipeError:
                    pass  # it closed the connection; what it said before is still to be read
                until = time.monotonic() + (timeout or self._timeout)
                while not self._arrived:
                    self._socket.settimeout(max(0.001, until - time.monotonic()))
                    data, fresh = local.receive(self._socket)
                    self._fds += fresh
                    if not data:
                        raise AgentLostError("the sidecar closed the connection; see its log")
                    self._arrived.extend(self._reader.feed(data))
            except TimeoutError as error:
                self._dead = True
                raise AgentLostError(
                    f"the sidecar did not answer {type(message).__name__} in time"
                ) from error
            except OSError as error:
                raise AgentLostError(f"the sidecar is gone: {error}") from error
            answer = self._arrived.popleft()
        if isinstance(answer, Failed):
            raise error_of(answer)
        return answer

    def wait_closed(self, timeout: float | None) -> bool:
        """Waits until the other end is closed; False after `timeout` seconds."""
        hangup = select.poll()
        hangup.register(self._socket, select.POLLRDHUP)
        return bool(hangup.poll(None if timeout is None else timeout * 1000))

    def take_fd(self) -> int:
        """The oldest descriptor that came and was not taken; the caller owns it."""
        if not self._fds:
            raise AgentError("the sidecar announced a descriptor and sent none")
        return self._fds.pop(0)

    def close(self) -> None:
        for fd in self._fds:
            os.close(fd)
        self._fds.clear()
        self._socket.close()

    def __enter__(self) -> Channel:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
