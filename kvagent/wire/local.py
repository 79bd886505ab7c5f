"""The unix socket between an engine and its sidecar: framing, descriptors, who may connect.

A frame is a little-endian u32 length and that many bytes of msgpack. File descriptors travel
beside the first byte of the frame that speaks of them. Not here: what the messages mean.
"""

from __future__ import annotations

import array
import os
import socket
import stat
import struct
import time
from collections.abc import Iterator, Sequence

from kvagent.errors import AgentLostError, ConfigError, ProtocolError
from kvagent.wire.messages import MAX_LOCAL_BYTES, Local, local_codec

LENGTH = struct.Struct("<I")
MAX_FDS = 64
"""Descriptors that one connection may have sent without a message taking them."""

_RECV_BYTES = 1 << 18
_ANCILLARY_BYTES = socket.CMSG_SPACE(MAX_FDS * array.array("i").itemsize)


def frame(message: Local) -> bytes:
    """The bytes of one frame."""
    payload = local_codec.encode(message)
    return LENGTH.pack(len(payload)) + payload


class FrameReader:
    """Cuts a byte stream into messages; knows nothing of sockets."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[Local]:
        """Yields each message that is complete; raises `ProtocolError` on the first bad one."""
        self._buffer += data
        start = 0
        try:
            while len(self._buffer) - start >= LENGTH.size:
                (length,) = LENGTH.unpack_from(self._buffer, start)
                if length > MAX_LOCAL_BYTES:
                    raise ProtocolError(f"a frame of {length} bytes, the cap is {MAX_LOCAL_BYTES}")
                end = start + LENGTH.size + length
                if len(self._buffer) < end:
                    break
                payload = bytes(self._buffer[start + LENGTH.size : end])
                start = end
                yield local_codec.decode(payload)
        finally:
            del self._buffer[:start]


def receive(sock: socket.socket) -> tuple[bytes, list[int]]:
    """One `recvmsg`: data ("" at the end of the stream) and the descriptors beside it.

    The descriptors are close-on-exec and belong to the caller.
    """
    data, ancillary, flags, _ = sock.recvmsg(
        _RECV_BYTES, _ANCILLARY_BYTES, getattr(socket, "MSG_CMSG_CLOEXEC", 0)
    )
    fds: list[int] = []
    for level, kind, payload in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            numbers = array.array("i")
            numbers.frombytes(payload[: len(payload) - len(payload) % numbers.itemsize])
            fds.extend(numbers)
    if flags & socket.MSG_CTRUNC:
        for fd in fds:
            os.close(fd)
        raise ProtocolError("more file descriptors at once than a frame may carry")
    return data, fds


def peer_uid(sock: socket.socket) -> int:
    """The uid of the process at the other end, from the kernel."""
    credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return int(struct.unpack("3i", credentials)[1])


def allowed(uid: int) -> bool:
    """Only our own user, and root who could do anything anyway."""
    return uid in (os.geteuid(), 0)


def listen(path: str) -> socket.socket:
    """Binds `path` with mode 0600 and listens.

    A socket file that nobody answers on is taken over; a live one is a `ConfigError`, as is a
    path that cannot be bound.
    """
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        _clear_stale(path)
        mask = os.umask(0o177)
        try:
            sock.bind(path)
        finally:
            os.umask(mask)
        os.chmod(path, 0o600)
        sock.listen(16)
        sock.setblocking(False)
    except OSError as error:
        sock.close()
        raise ConfigError(
            f"cannot listen on {path!r}: {error.strerror or error}; "
            "give --socket a path in a directory that you may write to"
        ) from error
    except BaseException:
        sock.close()
        raise
    return sock


def _clear_stale(path: str) -> None:
    try:
        mode = os.lstat(path).st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise ConfigError(f"{path!r} exists and is not a socket; choose another --socket")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            os.unlink(path)
        except OSError as error:
            raise ConfigError(
                f"{path!r} exists and cannot be taken over: {error}; "
                "remove it or choose another --socket"
            ) from error
        else:
            raise ConfigError(
                f"another sidecar already listens on {path!r}; choose another --socket"
            )


def connect(path: str, timeout: float) -> socket.socket:
    """A connected socket. A sidecar that is still starting is waited for.

    Raises `AgentLostError` after `timeout` seconds, saying what is missing.
    """
    until = time.monotonic() + timeout
    while True:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.settimeout(timeout)
        try:
            sock.connect(path)
        except OSError as error:
            sock.close()
            starting = isinstance(error, (FileNotFoundError, ConnectionRefusedError))
            if starting and time.monotonic() < until:
                time.sleep(0.05)
                continue
            raise AgentLostError(
                f"no sidecar answers on {path!r} ({error.strerror or error}); "
                f"start one with: kvagent serve --socket {path}"
            ) from error
        return sock


def send_with_fds(sock: socket.socket, data: bytes, fds: Sequence[int]) -> None:
    """Sends a whole frame on a blocking socket, the descriptors beside its first bytes."""
    sent = socket.send_fds(sock, [data], list(fds)) if fds else sock.send(data)
    while sent < len(data):
        sent += sock.send(data[sent:])
