"""What the fabric's thread owns: the two NIXL agents, the peers, the reads. All of it synchronous.

The **serving** agent's metadata is what peers get; it has a progress thread and lives as long as
the fabric. A **fetching** agent does our own reads and is polled only while there are any: one for
all peers whose TCP segments are ours, and one more for each other size that a peer has.
Destroying them is the fence: the only way to end a read whose peer hangs, and one that whoever
reads from us does not notice. Every incarnation of an agent has a name of its own, since NIXL
refuses a known name with new metadata.
"""

from __future__ import annotations

import hashlib
import logging
import os
import time
import uuid
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack

import numpy as np

from kvagent.core.regions import MemoryRange
from kvagent.core.stats import ReadStats
from kvagent.errors import FabricError, HandshakeError
from kvagent.fabric.agent import NixlAgent, PreparedLists
from kvagent.fabric.base import (
    PROBE_BYTES,
    CancelFlag,
    Kind,
    PeerMetadata,
    Prepared,
    RemoteAgent,
    Selection,
    ignore,
)
from kvagent.fabric.hands import Hands, Source
from kvagent.fabric.pieces import NO_EXTRA, Piece, Rows, split
from kvagent.fabric.place import Place, read_place
from kvagent.fabric.reads import Peer, Read, ReadQueue
from kvagent.fabric.segments import Segments, are_pinned, own_segments
from kvagent.fabric.witness import Carried, Witness

__all__ = ["NixlPrepared", "NixlRemote", "NixlWorker"]

log = logging.getLogger(__name__)

Resolve = Callable[[ReadStats | FabricError], None]

RETRY_SECONDS = 1.0
"""Between attempts to make a fetching agent."""

MAX_LANES = 4
"""Sizes of segments that peers may have at the same time."""

_FIRST = np.zeros(1, np.int32)


class Lane:
    """A fetching agent with its helper, and their reads."""

    def __init__(self, hands: Hands, queue: ReadQueue[PreparedLists]) -> None:
        self.hands = hands
        self.agent = hands.agent
        self.queue = queue

    def end(self, error: FabricError) -> None:
        self.hands.destroy()
        self.queue.abort(error)


class NixlRemote(RemoteAgent):
    """A peer, the page its probe is read into, and what was prepared for it."""

    def __init__(self, meta: PeerMetadata, here: Place, lane: Lane) -> None:
        super().__init__(meta.agent)
        self.meta = meta
        self.lane = lane
        self.peer = Peer(meta.agent)
        self.peer.watched.same_host = here.same_host(meta.place)
        self.landing = np.zeros(PROBE_BYTES, np.uint8)
        self.prepared: set[NixlPrepared] = set()
        self.probe = PreparedLists(
            meta.agent,
            _row(self.landing.ctypes.data),
            _row(meta.probe_address),
        )
        self.retired: list[PreparedLists] = []
        """Released, but a read may still use them."""
        self.forgotten: list[Callable[[], None]] = []
        """To be called when its last read is terminal and NIXL has dropped it."""

    @property
    def carried(self) -> Carried | None:
        return self.peer.watched.carried

    @property
    def is_copied(self) -> bool:
        """Whether a read from it is a copy by the kernel, by what is known so far."""
        carried = self.carried
        return carried is not None and carried.transport == "shared_memory"

    def as_source(self, here: Place) -> Source | None:
        """For copies of our own, when the probe is here. None if its number means nothing here."""
        place, pid = self.meta.place, self.meta.pid
        known = place is not None and place.pid_namespace == here.pid_namespace != ""
        if not (self.is_copied and known and pid):
            return None
        return Source(pid, self.meta.probe_address, self.landing.tobytes())

    @property
    def landing_range(self) -> MemoryRange:
        return MemoryRange(self.landing.ctypes.data, PROBE_BYTES)


class NixlPrepared(Prepared):
    def __init__(self, remote: NixlRemote, lists: PreparedLists) -> None:
        super().__init__(remote)
        self.lists = lists


class NixlWorker:
    """Every method runs on the fabric's thread."""

    def __init__(self, name: str, piece_bytes: int, inflight_bytes: int) -> None:
        self._prefix = name
        self._segments = own_segments(os.environ)
        self._pinned = are_pinned(os.environ)
        self._piece_bytes = piece_bytes
        self._inflight_bytes = inflight_bytes
        self._helper_bytes = 2 * inflight_bytes
        self._ranges: list[MemoryRange] = []
        self._canary = np.frombuffer(os.urandom(PROBE_BYTES), np.uint8)
        self._remotes: dict[str, NixlRemote] = {}
        self._leaving: set[NixlRemote] = set()
        """Remotes with something to let go once they have no read."""
        self._lanes: dict[Segments, Lane] = {}
        """By what their peers have; without the one for our own, nothing can be read."""
        self._open_at = 0.0
        self.trouble = ""
        """Why nothing can be read for the moment."""
        self._place = read_place()
        self._witness = Witness()
        self._serving = self._new_agent("serve", self._segments)
        self._serving.register([MemoryRange(self._canary.ctypes.data, PROBE_BYTES)])
        self._open(self._segments)

    def _open(self, segments: Segments) -> Lane:
        agent = self._new_agent("fetch", segments)
        agent.register(self._ranges)
        hands = Hands(agent, self._helper_bytes)
        queue: ReadQueue[PreparedLists] = ReadQueue(
            hands, self._inflight_bytes, time.monotonic, self._witness, self._inflight_bytes // 2
        )
        self._lanes[segments] = lane = Lane(hands, queue)
        return lane

    def _lane(self, segments: Segments) -> Lane:
        """For peers that have such segments."""
        if not self._lanes:
            raise FabricError(f"nothing can be read: {self.trouble}")
        lane = self._lanes.get(segments)
        if lane is None:
            if self._pinned:
                own = self._segments
                raise HandshakeError(
                    f"its TCP segments are {segments.send} and {segments.receive} bytes, and here "
                    f"UCX_TCP_TX_SEG_SIZE or UCX_TCP_RX_SEG_SIZE make them {own.send} and "
                    f"{own.receive}: unset both, and the right ones are chosen"
                )
            if len(self._lanes) >= MAX_LANES:
                raise HandshakeError(
                    f"its TCP segments are {segments.send} and {segments.receive} bytes, and "
                    f"{MAX_LANES} other sizes are in use: give all sidecars the same "
                    "UCX_TCP_TX_SEG_SIZE and UCX_TCP_RX_SEG_SIZE, or none"
                )
            lane = self._open(segments)
        return lane

    def _new_agent(self, role: str, segments: Segments) -> NixlAgent:
        name = f"{self._prefix}/{uuid.uuid4().hex}/{role}"
        return NixlAgent(name, serving=role == "serve", segments=segments)

    @property
    def active(self) -> bool:
        """Whether `step` has anything to do."""
        return any(lane.queue.reads for lane in self._lanes.values())

    def close(self) -> None:
        self._end("the fabric was closed")
        self._serving.destroy()

    def fence(self, reason: str) -> None:
        begin = time.monotonic()
        self._end(reason)
        self._open_again(begin)
        log.info("%s: fenced in %.3f s: %s", self._prefix, time.monotonic() - begin, reason)

    def _open_again(self, now: float) -> None:
        """UCX makes no agent while a network device that it was told to use has no link: then this
        is tried again, and what we serve is not concerned."""
        try:
            self._open(self._segments)
        except FabricError as error:
            if not self.trouble:
                log.error("%s: no fetching agent, trying again: %s", self._prefix, error)
            self.trouble, self._open_at = str(error), now + RETRY_SECONDS
        else:
            if self.trouble:
                log.info("%s: there is a fetching agent again", self._prefix)
            self.trouble = ""

    def _end(self, reason: str) -> None:
        lanes, self._lanes = list(self._lanes.values()), {}
        with ExitStack() as stack:  # every one, even when another cannot be destroyed
            for lane in lanes:
                stack.callback(lane.end, FabricError(f"fenced: {reason}"))
        self._leaving.clear()
        remotes, self._remotes = self._remotes, {}
        for remote in remotes.values():
            self._witness.forget(remote.peer.watched)
            for done in remote.forgotten:
                done()

    def step(self) -> bool:
        """One round of the queues. True when anything has changed."""
        if not self._lanes:
            if (now := time.monotonic()) >= self._open_at:
                self._open_again(now)
            return False
        changed = False
        for lane in self._lanes.values():
            changed |= lane.queue.step()
            if lane.queue.uncertain is not None:
                self.fence(str(lane.queue.uncertain))
                return True
        for remote in [peer for peer in self._leaving if not peer.lane.queue.busy(peer.peer)]:
            self._leaving.discard(remote)
            if remote.forgotten:
                self._drop(remote)
            else:
                self._unprepare_retired(remote)
        return changed

    # ------------------------------------------------------------ memory

    def register(self, ranges: Sequence[MemoryRange]) -> None:
        self._serving.register(ranges)
        for lane in self._lanes.values():
            lane.agent.register(ranges)
        self._ranges += ranges

    def metadata(self, options: dict[str, str]) -> PeerMetadata:
        blob = self._serving.metadata()
        return PeerMetadata(
            agent=self._serving.name,
            blob=blob,
            digest=hashlib.sha256(blob).digest(),
            probe_address=self._canary.ctypes.data,
            probe_digest=hashlib.sha256(self._canary.tobytes()).digest(),
            options=options,
            segments=self._segments,
            place=self._place,
            pid=os.getpid(),
        )

    # ------------------------------------------------------------ peers

    def load(self, meta: PeerMetadata) -> NixlRemote:
        """A peer whose probe has still to be read."""
        if meta.agent in self._remotes:
            raise FabricError(f"{meta.agent} is connected already, or reads from it have to end")
        remote = NixlRemote(meta, self._place, self._lane(meta.segments))
        agent = remote.lane.agent
        self._witness.meet(remote.peer.watched)
        name = agent.load(meta.blob)
        if name != meta.agent:
            agent.forget(name)
            raise HandshakeError(f"metadata of {name!r} came as that of {meta.agent!r}")
        self._remotes[name] = remote
        try:
            agent.register([remote.landing_range])
            agent.connect(name)
            agent.prepare(remote.probe)
        except FabricError:
            self._drop(remote)
            raise
        return remote

    def probe(self, remote: NixlRemote, cancelled: CancelFlag, resolve: Resolve) -> None:
        piece = Piece(PROBE_BYTES, _FIRST, _FIRST, NO_EXTRA)

        def resolved(outcome: ReadStats | FabricError) -> None:
            source = remote.as_source(self._place)
            if source is not None and not isinstance(outcome, FabricError):
                remote.lane.hands.meet(remote.name, source)
            resolve(outcome)

        probe = [(remote.probe, piece)]
        self._add(remote, probe, PROBE_BYTES, 1, cancelled, ignore, 0.0, resolved)

    def forget(self, remote: RemoteAgent, done: Callable[[], None]) -> None:
        """Ends the peer's reads; `done` is called when it is forgotten, or was long ago."""
        known = self._remotes.get(remote.name)
        if known is None or known is not remote:
            done()
            return
        known.forgotten.append(done)
        if known.lane.queue.busy(known.peer):
            known.lane.queue.stop(known.peer, FabricError(f"{known.name} was disconnected"))
            self._leaving.add(known)
        else:
            self._leaving.discard(known)
            self._drop(known)

    def _unprepare_retired(self, remote: NixlRemote) -> None:
        for lists in remote.retired:
            remote.lane.agent.unprepare(lists)
        remote.retired.clear()

    def _drop(self, remote: NixlRemote) -> None:
        remote.retired += [remote.probe, *(prepared.lists for prepared in remote.prepared)]
        remote.prepared.clear()
        self._unprepare_retired(remote)
        remote.lane.agent.forget(remote.name)
        remote.lane.hands.forget(remote.name)
        remote.lane.agent.deregister(remote.landing_range)
        del self._remotes[remote.name]
        self._witness.forget(remote.peer.watched)
        for done in remote.forgotten:
            done()

    # ------------------------------------------------------------ reads

    def prepare(
        self, remote: RemoteAgent, local: Rows, far: Rows, local_kind: Kind, remote_kind: Kind
    ) -> NixlPrepared:
        known = self._known(remote)
        lists = PreparedLists(remote.name, local, far, local_kind, remote_kind)
        known.lane.agent.prepare(lists)
        prepared = NixlPrepared(known, lists)
        known.prepared.add(prepared)
        known.peer.watched.gpu |= "vram" in (local_kind, remote_kind)
        return prepared

    def release(self, prepared: Prepared) -> None:
        remote = self._remotes.get(prepared.remote.name)
        if remote is prepared.remote and prepared in remote.prepared:
            assert isinstance(prepared, NixlPrepared)
            remote.prepared.discard(prepared)
            remote.retired.append(prepared.lists)
            self._leaving.add(remote)

    def read(
        self,
        prepared: Prepared,
        selection: Selection,
        cancelled: CancelFlag,
        landed: Callable[[int], None],
        submitted: float,
        resolve: Resolve,
    ) -> None:
        remote = self._known(prepared.remote)
        if prepared not in remote.prepared:
            raise FabricError("these descriptor lists were released")
        assert isinstance(prepared, NixlPrepared)
        lists = prepared.lists
        # A post that copies is over when it returns: several of them in flight are of no use.
        piece_bytes = self._inflight_bytes if remote.is_copied else self._piece_bytes
        helped = remote.lane.hands.helps(remote.name) and not remote.peer.watched.gpu
        remote.peer.waiting = self._helper_bytes if helped else 0
        pieces = split(lists.local, lists.remote, selection, piece_bytes)
        self._add(
            remote,
            [(lists, piece) for piece in pieces],
            selection.nbytes,
            selection.descriptors,
            cancelled,
            landed,
            submitted,
            resolve,
        )

    def _add(
        self,
        remote: NixlRemote,
        pieces: list[tuple[PreparedLists, Piece]],
        nbytes: int,
        descriptors: int,
        cancelled: CancelFlag,
        landed: Callable[[int], None],
        submitted: float,
        resolve: Resolve,
    ) -> None:
        remote.lane.queue.add(
            Read(
                peer=remote.peer,
                pieces=deque(pieces),
                nbytes=nbytes,
                descriptors=descriptors,
                cancelled=cancelled,
                submitted=submitted,
                resolve=resolve,
                landed=landed,
            )
        )

    def _known(self, remote: RemoteAgent) -> NixlRemote:
        known = self._remotes.get(remote.name)
        if known is not remote or known.forgotten:
            raise FabricError(f"{remote.name} was disconnected, or the fabric fenced: connect anew")
        return known


def _row(address: int) -> Rows:
    return Rows(np.array([[address, PROBE_BYTES, 0, PROBE_BYTES, 1]], np.uint64))
