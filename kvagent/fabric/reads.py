"""The reads in flight: who posts next, what is finished, what failed. No thread, and no NIXL.

Reads take turns, a piece each, under a bound of bytes in flight per peer. A read is resolved when
every piece that it posted is terminal. Its first failure stops its posting, and is what it ends
with, after the rest of it has ended.

What is reported is what NIXL reports, and over shared memory that takes one thing on trust: that
registered memory stays readable. UCX 1.23 does not notice when the kernel copies only a part
(`process_vm_readv` that meets a page it cannot read), and a later read over the same endpoint does
not tell either.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from kvagent.core.stats import ReadStats
from kvagent.errors import FabricError, PeerGoneError
from kvagent.fabric.base import CancelFlag, ReadCancelled, ignore
from kvagent.fabric.pieces import Piece
from kvagent.fabric.witness import Watched, Witness

__all__ = ["Peer", "Poster", "Read", "ReadQueue", "UncertainError"]

L = TypeVar("L")
L_contra = TypeVar("L_contra", contravariant=True)


class UncertainError(FabricError):
    """A posted piece failed in a way that does not say whether parts of it are still in flight."""


class Poster(Protocol[L_contra]):
    """What starts and checks the read of one piece: `NixlAgent`, with its prepared lists."""

    def post(self, lists: L_contra, piece: Piece) -> int: ...
    def done(self, handle: int, peer: str) -> bool: ...
    def free(self, handle: int) -> None: ...


@dataclass(eq=False, slots=True)
class Peer:
    """A remote agent as the queue sees it; `inflight` bytes are posted and not terminal."""

    name: str
    inflight: int = 0
    gone: bool = False
    watched: Watched = field(default_factory=Watched)


@dataclass(eq=False, slots=True)
class Read(Generic[L]):
    """One read. `resolve` is called exactly once, with its stats or its error."""

    peer: Peer
    pieces: deque[tuple[L, Piece]]
    nbytes: int
    descriptors: int
    cancelled: CancelFlag
    submitted: float
    resolve: Callable[[ReadStats | FabricError], None]
    landed: Callable[[int], None] = ignore
    """Told of the bytes of every piece that has arrived."""
    inflight: list[tuple[int, int]] = field(default_factory=list)
    """(handle, bytes) of the pieces posted and not terminal."""
    error: FabricError | None = None
    first_post: float = 0.0
    post_seconds: float = 0.0

    def fail(self, error: FabricError) -> None:
        self.error = self.error or error
        self.pieces.clear()


class ReadQueue(Generic[L]):
    """All unresolved reads of one agent. `window` is in bytes, `clock` in seconds."""

    def __init__(
        self,
        poster: Poster[L],
        window: int,
        clock: Callable[[], float],
        witness: Witness | None = None,
    ) -> None:
        self.reads: deque[Read[L]] = deque()
        self.uncertain: UncertainError | None = None
        """Set when only `abort` can make sure that nothing is in flight."""
        self._poster = poster
        self._window = window
        self._clock = clock
        self._witness = witness or Witness(dict)

    def add(self, read: Read[L]) -> None:
        self._witness.begin(id(read), read.peer.watched)
        self.reads.append(read)

    def busy(self, peer: Peer) -> bool:
        return any(read.peer is peer for read in self.reads)

    def stop(self, peer: Peer, error: FabricError) -> None:
        """Fails the peer's reads; they resolve when what they posted is terminal."""
        for read in self.reads:
            if read.peer is peer:
                read.fail(error)

    def abort(self, error: FabricError) -> None:
        """Resolves every read. Only when the agent is destroyed: nothing is in flight any more."""
        reads, self.reads = self.reads, deque()
        for read in reads:
            self._witness.end(id(read), 0, 0.0)
            read.resolve(read.error or error)

    def step(self) -> bool:
        """Posts one piece if one may be, and checks all. True when anything has changed."""
        changed = self._post_next()
        for read in [read for read in self.reads if read.inflight or not read.pieces]:
            changed |= self._check(read)
            if not read.inflight and not read.pieces:
                self._finish(read)
                changed = True
        return changed

    def _post_next(self) -> bool:
        for read in self.reads:
            if read.cancelled.reason is not None:
                read.fail(ReadCancelled(read.cancelled.reason))
            elif read.peer.gone:
                read.fail(PeerGoneError(f"{read.peer.name} is gone"))
            if self._post(read):
                self.reads.remove(read)
                self.reads.append(read)
                return True
        return False

    def _post(self, read: Read[L]) -> bool:
        if not read.pieces or read.peer.inflight >= self._window:
            return False
        lists, piece = read.pieces.popleft()
        begin = self._clock()
        read.first_post = read.first_post or begin
        try:
            handle = self._poster.post(lists, piece)
        except FabricError as error:
            self._failed(read, error)
        else:
            read.inflight.append((handle, piece.nbytes))
            read.peer.inflight += piece.nbytes
        read.post_seconds += self._clock() - begin
        return True

    def _check(self, read: Read[L]) -> bool:
        changed = False
        for handle, nbytes in list(read.inflight):
            try:
                if not self._poster.done(handle, read.peer.name):
                    continue
            except FabricError as error:
                self._failed(read, error)
            else:
                read.landed(nbytes)
            self._poster.free(handle)
            read.inflight.remove((handle, nbytes))
            read.peer.inflight -= nbytes
            changed = True
        return changed

    def _failed(self, read: Read[L], error: FabricError) -> None:
        read.fail(error)
        if isinstance(error, PeerGoneError):
            read.peer.gone = True
        if isinstance(error, UncertainError):
            self.uncertain = error

    def _finish(self, read: Read[L]) -> None:
        if self.uncertain is not None:
            return
        self.reads.remove(read)
        now = self._clock()
        begin = read.first_post or now  # an empty read posts nothing
        self._witness.end(id(read), 0 if read.error else read.nbytes, now - begin)
        if read.error is not None:
            read.resolve(read.error)
            return
        read.resolve(
            ReadStats(
                nbytes=read.nbytes,
                descriptors=read.descriptors,
                wait=begin - read.submitted,
                post=read.post_seconds,
                wire=now - begin,
            )
        )
