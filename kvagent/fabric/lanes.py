"""The fetching agents. Each is a lane: an agent, and the reads that it does.

A lane's agent has its peers' sizes of TCP segments. One that **copies** is for large reads from
peers of this host: there a read is a copy by the kernel, and one thread copies at half the speed of
the memory. NIXL's own threads share these reads' descriptors. They are for nothing else: over TCP
they spin as long as a read is in flight, and when one thread's part fails, NIXL calls the other's
over while it is not. (A copy that fails, fails because its process is gone, and with it all that
could be copied.)
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from kvagent.core.regions import MemoryRange
from kvagent.errors import FabricError, HandshakeError
from kvagent.fabric.agent import NixlAgent, PreparedLists
from kvagent.fabric.reads import ReadQueue
from kvagent.fabric.segments import RECEIVE, SEND, Segments
from kvagent.fabric.witness import Witness

__all__ = ["COPIED_BYTES", "Lane", "Lanes"]

COPIED_BYTES = 512 << 10
"""A read of less is over before another thread has begun."""
COPY_THREADS = 2
COPY_PIECES = 4
"""In flight at once, so that no thread waits for the next one."""
MAX_SIZES = 4
"""Sizes of segments that peers may have at the same time."""


class Lane:
    """A fetching agent and its reads. `piece_bytes`: what it is given at once."""

    def __init__(
        self, agent: NixlAgent, queue: ReadQueue[PreparedLists], piece_bytes: int, *, copies: bool
    ) -> None:
        self.agent = agent
        self.queue = queue
        self.piece_bytes = piece_bytes
        self.copies = copies


class _Kind(NamedTuple):
    segments: Segments
    copies: bool


class Lanes:
    """Those that are open. `own` are our segments, which the user may have `pinned`."""

    def __init__(
        self,
        prefix: str,
        own: Segments,
        *,
        pinned: bool,
        piece_bytes: int,
        inflight_bytes: int,
        witness: Witness,
    ) -> None:
        self._prefix = prefix
        self._own = own
        self._pinned = pinned
        self._piece_bytes = piece_bytes
        self._inflight_bytes = inflight_bytes
        self._witness = witness
        self._ranges: list[MemoryRange] = []
        self._open: dict[_Kind, Lane] = {}

    def __iter__(self) -> Iterator[Lane]:
        return iter(self._open.values())

    def __bool__(self) -> bool:
        """Without the one for our own segments nothing can be read, and there is no other."""
        return bool(self._open)

    def register(self, ranges: Sequence[MemoryRange]) -> None:
        for lane in self:
            lane.agent.register(ranges)
        self._ranges += ranges

    def start(self) -> None:
        self._new(_Kind(self._own, copies=False))

    def end(self, reason: str) -> None:
        """Afterwards no read of any of them writes any more, and all have failed."""
        lanes, self._open = list(self), {}
        for lane in lanes:
            lane.agent.destroy()
            lane.queue.abort(FabricError(f"fenced: {reason}"))

    def of(self, segments: Segments) -> Lane:
        """For peers that have such segments. Raises `HandshakeError` when there can be none."""
        kind = _Kind(segments, copies=False)
        if kind in self._open:
            return self._open[kind]
        theirs = f"its TCP segments are {segments.send} and {segments.receive} bytes"
        if self._pinned:
            raise HandshakeError(
                f"{theirs}, and here {SEND} or {RECEIVE} make them {self._own.send} and "
                f"{self._own.receive}: unset both, and the right ones are chosen"
            )
        if sum(not lane.copies for lane in self) >= MAX_SIZES:
            raise HandshakeError(
                f"{theirs}, and {MAX_SIZES} other sizes are in use: give all sidecars the same "
                f"{SEND} and {RECEIVE}, or none"
            )
        return self._new(kind)

    def copying(self, segments: Segments) -> Lane:
        """The one for large reads from this host."""
        kind = _Kind(segments, copies=True)
        return self._open.get(kind) or self._new(kind)

    def close(self, lane: Lane) -> None:
        """One that nobody reads with any more: UCX keeps the sockets of the peers it had."""
        self._open = {kind: each for kind, each in self._open.items() if each is not lane}
        lane.agent.destroy()

    def _new(self, kind: _Kind) -> Lane:
        """Raises `FabricError`."""
        agent = NixlAgent(
            f"{self._prefix}/{uuid.uuid4().hex}/{'copy' if kind.copies else 'fetch'}",
            serving=False,
            segments=kind.segments,
            threads=COPY_THREADS if kind.copies else 0,
        )
        agent.register(self._ranges)
        piece = self._inflight_bytes if kind.copies else self._piece_bytes
        queue: ReadQueue[PreparedLists] = ReadQueue(
            agent,
            self._inflight_bytes * (COPY_PIECES if kind.copies else 1),
            time.monotonic,
            self._witness,
            self._inflight_bytes // 2,
        )
        lane = self._open[kind] = Lane(agent, queue, piece, copies=kind.copies)
        return lane
