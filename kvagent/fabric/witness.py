"""Which transport carried a peer's bytes, by what can be seen from outside of UCX.

NIXL chooses a backend, UCX chooses a transport, and neither says which one a read took. But bytes
that came by TCP came through a socket of this process, and the kernel counts those (`TCP_INFO`).
So a read is watched: when its bytes are in the counters, it was TCP. When they are not, it was not,
and what is left follows from where the peer runs and from the memory: on the same host the kernel
copied them (shared memory) or one GPU read another's memory (cuda_ipc); to another host RDMA is the
only other way that UCX has. The last step is inference, and `Carried.why` says so.

Only sockets that were opened after the peer was first heard of can be its own. Reads of several
peers at once still share them. Bytes that are missing there prove the same for
all of them; bytes that are there count only when no other peer's read could have put them there:
otherwise a later read decides.
"""

from __future__ import annotations

import ctypes
import logging
import os
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

__all__ = ["TRANSPORTS", "UNKNOWN", "Carried", "Watched", "Witness", "tcp_received"]

log = logging.getLogger(__name__)

UNKNOWN = "unknown"
TRANSPORTS = ("shared_memory", "cuda_ipc", "rdma", "tcp")

MEASURE_BYTES = 64 << 10
"""From a read of so many bytes on, the answer and its bandwidth are final."""

_TCP_INFO, _IPPROTO_TCP = 11, 6
_BYTES_RECEIVED = 128
"""Offset of tcpi_bytes_received (u64) in struct tcp_info, since Linux 4.1."""


@dataclass(frozen=True, slots=True)
class Carried:
    """`nbytes` of one read took `seconds` by `transport`. `final`: it was large enough to tell."""

    transport: str
    why: str
    nbytes: int
    seconds: float
    final: bool

    @property
    def rate(self) -> float:
        """Bytes per second, 0 when the read was too small for it to mean anything."""
        return self.nbytes / self.seconds if self.final and self.seconds > 0 else 0.0


@dataclass(eq=False, slots=True)
class Watched:
    """A peer as the witness sees it. `carried` is written on the fabric's thread, and read
    anywhere."""

    same_host: bool | None = None
    """None when that cannot be told."""
    gpu: bool = False
    """Whether its memory, or ours that is read into, is a GPU's."""
    carried: Carried | None = None
    older: frozenset[int] = frozenset()
    """Sockets that were there before it: they are not its own. By inode, as all sockets here."""

    @property
    def undecided(self) -> bool:
        return self.carried is None or not self.carried.final or self.carried.transport == UNKNOWN


@dataclass(eq=False, slots=True)
class _Watch:
    peer: Watched
    before: Mapping[int, int]
    crowd: bool
    """Whether an undecided other peer was being read meanwhile."""


@dataclass(slots=True)
class Witness:
    """Watches reads until each one's peer is decided. Its errors are logged, and fail nothing."""

    counters: Callable[[], Mapping[int, int]] = field(default_factory=lambda: tcp_received)
    _reading: dict[int, Watched] = field(default_factory=dict)
    """By the identity of the read."""
    _watches: dict[int, _Watch] = field(default_factory=dict)
    _taken: dict[Watched, frozenset[int]] = field(default_factory=dict)
    """The sockets that a peer's bytes came through."""

    def meet(self, peer: Watched) -> None:
        """The peer is about to be connected."""
        try:
            peer.older = frozenset(self.counters())
        except Exception:
            log.debug("the counters of TCP cannot be read", exc_info=True)

    def begin(self, read: int, peer: Watched) -> None:
        """A read is about to be posted; `read` is a number that no other one has meanwhile."""
        self._reading[read] = peer
        if not peer.undecided:
            return
        crowd = any(other is not peer and other.undecided for other in self._reading.values())
        for other in self._watches.values():
            other.crowd |= other.peer is not peer
        try:
            self._watches[read] = _Watch(peer, self.counters(), crowd)
        except Exception:
            log.debug("the counters of TCP cannot be read", exc_info=True)

    def end(self, read: int, nbytes: int, seconds: float) -> None:
        """The read is over; `nbytes` is 0 when it failed."""
        self._reading.pop(read, None)
        watch = self._watches.pop(read, None)
        if watch is None or not nbytes or not watch.peer.undecided:
            return
        try:
            self._judge(watch, nbytes, seconds)
        except Exception:
            log.debug("the transport cannot be told", exc_info=True)

    def forget(self, peer: Watched) -> None:
        """The peer's connection is gone, and with it its sockets."""
        self._taken.pop(peer, None)

    def _judge(self, watch: _Watch, nbytes: int, seconds: float) -> None:
        peer = watch.peer
        others = peer.older.union(
            *(sockets for owner, sockets in self._taken.items() if owner is not peer)
        )
        grown = {
            socket: count - watch.before.get(socket, 0)
            for socket, count in self.counters().items()
            if socket not in others
        }
        received = sum(grown.values())
        final = nbytes >= MEASURE_BYTES
        seen = f"{received} bytes came through TCP sockets during a read of {nbytes}"
        if received < nbytes // 2:
            transport, why = _not_tcp(peer, seen)
        elif watch.crowd:
            return
        else:
            transport, why = "tcp", seen
            if final:
                self._taken[peer] = frozenset(
                    socket for socket, count in grown.items() if count >= nbytes // 8
                )
        peer.carried = Carried(transport, why, nbytes, seconds, final)


def _not_tcp(peer: Watched, seen: str) -> tuple[str, str]:
    if peer.same_host is None:
        return UNKNOWN, f"{seen}; whether the peer is on this host cannot be told"
    if not peer.same_host:
        return "rdma", f"{seen}; the peer is on another host, so it can only be RDMA (inferred)"
    if peer.gpu:
        return "cuda_ipc", f"{seen}; GPU memory of this host, so it can only be CUDA (inferred)"
    return "shared_memory", f"{seen}; the peer is on this host, so the kernel copied (inferred)"


_libc = ctypes.CDLL(None)


def tcp_received() -> dict[int, int]:
    """Bytes received so far by every TCP socket of this process, by the socket's inode.

    Takes a fraction of a millisecond.
    """
    found = {}
    info = ctypes.create_string_buffer(256)
    for name in os.listdir("/proc/self/fd"):
        size = ctypes.c_uint32(len(info))
        fd = int(name)
        # Other descriptors, and those that are closed by now, are refused.
        failed = _libc.getsockopt(fd, _IPPROTO_TCP, _TCP_INFO, info, ctypes.byref(size))
        if not failed and size.value >= _BYTES_RECEIVED + 8:
            try:
                inode = os.fstat(fd).st_ino
            except OSError:
                continue
            (found[inode],) = struct.unpack_from("<Q", info.raw, _BYTES_RECEIVED)
    return found
