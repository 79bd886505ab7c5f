"""The reads in flight: who posts next, what is finished, what failed. No thread, and no NIXL.

Reads take turns, a piece each, under a bound of bytes in flight per peer. Small pieces of several
reads that use the same lists are posted together: a post costs as much as some tens of KiB, and a
wait for the interpreter besides. A read is resolved when
every piece that it posted is terminal. Its first failure stops its posting, and is what it ends
with, after the rest of it has ended.

What is reported is what NIXL reports, and over shared memory that takes one thing on trust: that
registered memory stays readable. UCX 1.23 does not notice when the kernel copies only a part
(`process_vm_readv` that meets a page it cannot read), and a later read over the same endpoint does
not tell either.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from kvagent.core.stats import ReadStats
from kvagent.errors import FabricError, PeerGoneError
from kvagent.fabric.base import CancelFlag, ReadCancelled, ignore
from kvagent.fabric.pieces import Piece, joined
from kvagent.fabric.witness import Watched, Witness

__all__ = ["Peer", "Poster", "Read", "ReadQueue", "UncertainError"]

L = TypeVar("L")
L_contra = TypeVar("L_contra", contravariant=True)


class UncertainError(FabricError):
    """A posted piece failed in a way that does not say whether parts of it are still in flight."""


class Poster(Protocol[L_contra]):
    """What starts and checks the read of one piece: `Hands`, with prepared lists. `more`: another
    piece waits to be posted; `idle`: none could be. What is not begun may be withdrawn: then it is
    over."""

    def post(self, lists: L_contra, piece: Piece, more: bool) -> int: ...
    def done(self, handle: int, peer: str, idle: bool) -> bool: ...
    def withdraw(self, handle: int) -> bool: ...
    def free(self, handle: int) -> None: ...


@dataclass(eq=False, slots=True)
class Peer:
    """A remote agent as the queue sees it; `inflight` bytes are posted and not terminal. `waiting`
    bytes more may be, since so many are not begun."""

    name: str
    inflight: int = 0
    waiting: int = 0
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
    inflight: int = 0
    """Pieces posted and not terminal."""
    error: FabricError | None = None
    first_post: float = 0.0
    post_seconds: float = 0.0

    def fail(self, error: FabricError) -> None:
        self.error = self.error or error
        self.pieces.clear()


@dataclass(eq=False, slots=True)
class Posted(Generic[L]):
    """What was handed to the transport at once, and whose pieces that are."""

    handle: int
    peer: Peer
    shares: list[tuple[Read[L], Piece]]


class ReadQueue(Generic[L]):
    """All unresolved reads of one agent. `window` is in bytes, `clock` in seconds; pieces are put
    together up to `together` bytes."""

    def __init__(
        self,
        poster: Poster[L],
        window: int,
        clock: Callable[[], float],
        witness: Witness | None = None,
        together: int = 0,
    ) -> None:
        self.reads: deque[Read[L]] = deque()
        self.uncertain: UncertainError | None = None
        """Set when only `abort` can make sure that nothing is in flight."""
        self._posted: list[Posted[L]] = []
        self._poster = poster
        self._window = window
        self._together = together
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
        reads, self.reads, self._posted = self.reads, deque(), []
        for read in reads:
            self._witness.end(id(read), 0, 0.0)
            read.resolve(read.error or error)

    def step(self) -> bool:
        """Posts one piece if one may be, and checks all. True when anything has changed."""
        idle = not self._post_next()
        changed = not idle
        for posted in list(self._posted):
            changed |= self._check(posted, idle)
        for read in [read for read in self.reads if not read.inflight and not read.pieces]:
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
        if not read.pieces or read.peer.inflight >= self._window + read.peer.waiting:
            return False
        lists, piece = read.pieces.popleft()
        shares = [(read, piece), *self._company(read, lists, piece)]
        if len(shares) > 1:
            piece = joined([piece for _, piece in shares])
        begin = self._clock()
        for each, _ in shares:
            each.first_post = each.first_post or begin
        try:
            handle = self._poster.post(lists, piece, any(each.pieces for each in self.reads))
        except FabricError as error:
            self._failed(shares, error)
        else:
            for each, _ in shares:
                each.inflight += 1
            read.peer.inflight += piece.nbytes
            self._posted.append(Posted(handle, read.peer, shares))
        spent = self._clock() - begin
        for each, share in shares:
            each.post_seconds += spent * share.nbytes / piece.nbytes
        return True

    def _company(self, read: Read[L], lists: L, piece: Piece) -> list[tuple[Read[L], Piece]]:
        """Other reads' next pieces that can be posted with this one."""
        found: list[tuple[Read[L], Piece]] = []
        room = self._together - piece.nbytes
        if room <= 0 or len(piece.extra):
            return found
        for other in self.reads:
            if other is read or not other.pieces or other.pieces[0][0] is not lists:
                continue
            nbytes, extra = other.pieces[0][1].nbytes, other.pieces[0][1].extra
            if nbytes > room or len(extra) or other.cancelled.cancelled:
                continue
            found.append((other, other.pieces.popleft()[1]))
            room -= nbytes
        return found

    def _check(self, posted: Posted[L], idle: bool) -> bool:
        wanted = any(read.error is None for read, _ in posted.shares)
        if wanted or not self._poster.withdraw(posted.handle):
            try:
                if not self._poster.done(posted.handle, posted.peer.name, idle):
                    return False
            except FabricError as error:
                self._failed(posted.shares, error)
            else:
                for read, piece in posted.shares:
                    read.landed(piece.nbytes)
        self._poster.free(posted.handle)
        self._posted.remove(posted)
        for read, piece in posted.shares:
            read.inflight -= 1
            posted.peer.inflight -= piece.nbytes
        return True

    def _failed(self, shares: Sequence[tuple[Read[L], Piece]], error: FabricError) -> None:
        for read, _ in shares:
            if read.peer.gone and not isinstance(error, UncertainError | PeerGoneError):
                error = PeerGoneError(f"{read.peer.name} is gone")  # NIXL does not know it any more
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
