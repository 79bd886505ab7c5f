"""Another pair of hands for copies on one host.

There a read is a copy by the kernel (`process_vm_readv`, which UCX calls inside NIXL's post), and
one thread copies at about two thirds of the speed that the memory has. So while the agent reads a
piece, the helper's thread copies others, with the same call. It needs no connection and decides
nothing: a piece that it cannot copy is left to the agent, and what is wrong is what NIXL says.
Several pieces wait for it: a thread that sleeps after each is often woken on the agent's core.

Whose memory it was is not taken on trust, since the number of a process that ended may be given to
another: every call also reads the peer's probe, random bytes that are at that address in no other.
"""

from __future__ import annotations

import ctypes
import logging
import queue
import threading
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kvagent.core.runs import coalesce
from kvagent.fabric.agent import NixlAgent, PreparedLists
from kvagent.fabric.pieces import Piece

__all__ = ["Hands", "Source"]

log = logging.getLogger(__name__)

COPIED_BYTES = 512 << 10
"""A piece of less has been copied before another thread begins."""
MAX_VECTORS = 1024
"""Of one call (IOV_MAX)."""

_vector = (ctypes.c_void_p, ctypes.c_ulong)
_readv = ctypes.CDLL(None).process_vm_readv
_readv.argtypes = (ctypes.c_int, *_vector, *_vector, ctypes.c_ulong)
_readv.restype = ctypes.c_ssize_t


@dataclass(eq=False, slots=True)
class Source:
    """A process of this host: its number, and where it has which probe."""

    pid: int
    probe_address: int
    probe: bytes
    refused: bool = False
    """It cannot be copied from: there is no second try."""

    def copy(self, lists: PreparedLists, piece: Piece) -> bool:
        """False when a part did not arrive, or may be another process's."""
        runs = coalesce(
            lists.local.addresses(piece.local_index),
            lists.remote.addresses(piece.remote_index),
            lists.local.lengths(piece.local_index),
        )
        step = MAX_VECTORS - 1
        for i in range(0, len(runs[0]), step):
            if not self._read(*(column[i : i + step] for column in runs)):
                log.info("process %d is not copied from any more: NIXL reads alone", self.pid)
                self.refused = True
                return False
        return True

    def _read(
        self,
        local: npt.NDArray[np.int64],
        remote: npt.NDArray[np.int64],
        length: npt.NDArray[np.int64],
    ) -> bool:
        found = np.zeros(len(self.probe), np.uint8)
        here = _vectors(local, found.ctypes.data, length, len(found))
        there = _vectors(remote, self.probe_address, length, len(found))
        want = int(length.sum()) + len(found)
        got = _readv(self.pid, here.ctypes.data, len(here), there.ctypes.data, len(there), 0)
        return bool(got == want) and found.tobytes() == self.probe


def _vectors(
    addresses: npt.NDArray[np.int64], last: int, lengths: npt.NDArray[np.int64], length: int
) -> npt.NDArray[np.uint64]:
    """`struct iovec`s; the last one apart."""
    vectors = np.empty((len(addresses) + 1, 2), np.uint64)
    vectors[:-1, 0], vectors[:-1, 1] = addresses, lengths
    vectors[-1] = last, length
    return vectors


@dataclass(eq=False, slots=True)
class _Copy:
    """A piece that the helper was given. Whoever has `taken` it reads it; the helper then says
    whether it has `arrived`."""

    source: Source
    lists: PreparedLists
    piece: Piece
    taken: threading.Lock = field(default_factory=threading.Lock)
    arrived: bool | None = None
    handle: int = 0
    """The agent's, when it was left to that."""


class Hands:
    """What posts the reads of an agent (a `Poster`): the agent, and the helper, for which about
    `helper_bytes` wait. Every method runs on the fabric's thread."""

    def __init__(self, agent: NixlAgent, helper_bytes: int) -> None:
        self.agent = agent
        self._helper_bytes = helper_bytes
        self._helper: _Helper | None = None
        self._sources: dict[str, Source] = {}
        self._copies: dict[int, _Copy] = {}
        """By handle. NIXL's handles are addresses, and these are negative numbers."""
        self._number = 0

    def destroy(self) -> None:
        """Ends all that is in flight: when it returns, no read of these writes any more."""
        if self._helper is not None:
            self._helper.stop()
        try:
            self.agent.destroy()
        finally:
            if self._helper is not None:
                self._helper.join()

    def meet(self, name: str, source: Source) -> None:
        """This peer can be copied from."""
        self._sources[name] = source

    def forget(self, name: str) -> None:
        self._sources.pop(name, None)

    def post(self, lists: PreparedLists, piece: Piece, more: bool) -> int:
        source = self._sources.get(lists.remote_name) if more else None
        prepared = not len(piece.extra)  # other addresses are checked by NIXL only
        host = lists.local_kind == lists.remote_kind == "dram"
        if source is None or not (prepared and host and self._may_help(source, piece)):
            return self.agent.post(lists, piece)
        if self._helper is None:
            self._helper = _Helper()
        self._number -= 1
        self._copies[self._number] = copy = _Copy(source, lists, piece)
        self._helper.todo.put(copy)
        return self._number

    def helps(self, name: str) -> bool:
        """Whether pieces of this peer may wait for the helper."""
        source = self._sources.get(name)
        return source is not None and not source.refused

    def _may_help(self, source: Source, piece: Piece) -> bool:
        given = sum(copy.piece.nbytes for copy in self._copies.values())
        # Pieces may be longer than they should by a part of a descriptor: hence the eighth.
        fits = COPIED_BYTES <= piece.nbytes <= self._helper_bytes * 9 // 8 - given
        alive = self._helper is None or self._helper.alive
        return fits and alive and not source.refused

    def done(self, handle: int, peer: str, idle: bool) -> bool:
        """`idle`: there is nothing else to post, so that what the helper has not begun is read."""
        copy = self._copies.get(handle)
        if copy is None:
            return self.agent.done(handle, peer)
        if copy.handle:
            return self.agent.done(copy.handle, peer)
        assert self._helper is not None
        alive = self._helper.alive  # first: it may end after it has copied
        if copy.arrived:
            return True
        left = copy.arrived is False or not alive
        if left or (idle and copy.taken.acquire(blocking=False)):
            copy.handle = self.agent.post(copy.lists, copy.piece)
            return self.agent.done(copy.handle, peer)
        return False

    def withdraw(self, handle: int) -> bool:
        """Whether nobody reads the piece, and nobody will."""
        copy = self._copies.get(handle)
        if copy is None or copy.handle:
            return False
        return copy.arrived is False or copy.taken.acquire(blocking=False)

    def free(self, handle: int) -> None:
        copy = self._copies.pop(handle, None)
        if copy is None:
            self.agent.free(handle)
        elif copy.handle:
            self.agent.free(copy.handle)


class _Helper:
    """The thread, and what waits for it."""

    def __init__(self) -> None:
        self.todo: queue.SimpleQueue[_Copy | None] = queue.SimpleQueue()
        self._stopped = False
        self._thread = threading.Thread(target=self._main, name="kvagent-copy", daemon=True)
        try:
            self._thread.start()
        except RuntimeError as error:  # too many threads
            log.warning("large reads on this host are copied by one thread only: %s", error)

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def stop(self) -> None:
        """It begins no other copy."""
        self._stopped = True
        self.todo.put(None)

    def join(self) -> None:
        """Afterwards it writes nothing any more."""
        if self._thread.ident is not None:
            self._thread.join()  # a copy takes a millisecond, and is not interrupted

    def _main(self) -> None:
        while (copy := self.todo.get()) is not None and not self._stopped:
            if not copy.taken.acquire(blocking=False):
                continue
            try:
                source = copy.source
                copy.arrived = not source.refused and source.copy(copy.lists, copy.piece)
            except Exception:
                log.exception("a copy failed; it is left to NIXL")
                copy.source.refused = True
                copy.arrived = False
