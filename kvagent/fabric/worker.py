"""What the fabric's thread owns: the two NIXL agents, the peers, the reads. All of it synchronous.

The **serving** agent's metadata is what peers get; it has a progress thread and lives as long as
the fabric. The **fetching** agents (`lanes`) do our own reads and are polled only while there are
any. Destroying them is the fence: the only way to end a read whose peer hangs, and one that whoever
reads from us does not notice. Every incarnation of an agent has a name of its own, since NIXL
refuses a known name with new metadata.
"""

from __future__ import annotations

import dataclasses
import hashlib
import logging
import os
import time
import uuid
from collections import deque
from collections.abc import Callable, Sequence

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
)
from kvagent.fabric.lanes import COPIED_BYTES, Lane, Lanes
from kvagent.fabric.pieces import NO_EXTRA, Piece, Rows, split
from kvagent.fabric.place import Place, read_place
from kvagent.fabric.reads import Peer, Read, UncertainError
from kvagent.fabric.segments import are_pinned, own_segments
from kvagent.fabric.witness import Carried, Witness

__all__ = ["NixlPrepared", "NixlRemote", "NixlWorker"]

log = logging.getLogger(__name__)

Resolve = Callable[[ReadStats | FabricError], None]

RETRY_SECONDS = 1.0
"""Between attempts to make a fetching agent."""

WARM_UPS = 3
WARM_UP_SECONDS = 1.0

_FIRST = np.zeros(1, np.int32)


class NixlRemote(RemoteAgent):
    """A peer, the page its probe is read into, and what was prepared for it."""

    def __init__(self, meta: PeerMetadata, here: Place, lane: Lane) -> None:
        super().__init__(meta.agent)
        self.meta = meta
        self.lane = lane
        self.copier: Lane | None = None
        """For large reads, once it is known that they are copies on this host."""
        self.peer = Peer(meta.agent)
        self.peer.watched.same_host = here.same_host(meta.place)
        self.copied = Peer(meta.agent, watched=self.peer.watched)
        """The same peer, with the copier's bytes in flight."""
        self.landing = np.zeros(PROBE_BYTES, np.uint8)
        self.prepared: set[NixlPrepared] = set()
        self.probe = PreparedLists(
            meta.agent,
            _row(self.landing.ctypes.data),
            _row(meta.probe_address),
        )
        self.retired: list[NixlPrepared] = []
        """Released, but a read may still use them."""
        self.forgotten: list[Callable[[], None]] = []
        """To be called when its last read is terminal and NIXL has dropped it."""

    @property
    def carried(self) -> Carried | None:
        return self.peer.watched.carried

    @property
    def is_copied(self) -> bool:
        """By what is known so far."""
        return self.carried is not None and self.carried.transport == "shared_memory"

    @property
    def busy(self) -> bool:
        copying = self.copier is not None and self.copier.queue.busy(self.copied)
        return copying or self.lane.queue.busy(self.peer)

    @property
    def landing_range(self) -> MemoryRange:
        return MemoryRange(self.landing.ctypes.data, PROBE_BYTES)


class NixlPrepared(Prepared):
    def __init__(self, remote: NixlRemote, lists: PreparedLists) -> None:
        super().__init__(remote)
        self.lists = lists
        self.copied: PreparedLists | None = None
        """The same for the copier."""


class NixlWorker:
    """Every method runs on the fabric's thread."""

    def __init__(self, name: str, piece_bytes: int, inflight_bytes: int) -> None:
        self._prefix = name
        self._segments = own_segments(os.environ)
        self._canary = np.frombuffer(os.urandom(PROBE_BYTES), np.uint8)
        self._remotes: dict[str, NixlRemote] = {}
        self._leaving: set[NixlRemote] = set()
        """Remotes with something to let go once they have no read."""
        self._open_at = 0.0
        self.trouble = ""
        """Why nothing can be read for the moment."""
        self._place = read_place()
        self._witness = Witness()
        self._serving = NixlAgent(
            f"{name}/{uuid.uuid4().hex}/serve", serving=True, segments=self._segments
        )
        self._serving.register([MemoryRange(self._canary.ctypes.data, PROBE_BYTES)])
        self._lanes = Lanes(
            name,
            self._segments,
            pinned=are_pinned(os.environ),
            piece_bytes=piece_bytes,
            inflight_bytes=inflight_bytes,
            witness=self._witness,
        )
        self._lanes.start()

    @property
    def active(self) -> bool:
        """Whether `step` has anything to do."""
        return any(lane.queue.reads for lane in self._lanes)

    @property
    def copies_only(self) -> bool:
        """Whether all that is being read comes by itself, and polling only takes time from it."""
        return all(lane.copies for lane in self._lanes if lane.queue.reads)

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
            self._lanes.start()
        except FabricError as error:
            if not self.trouble:
                log.error("%s: no fetching agent, trying again: %s", self._prefix, error)
            self.trouble, self._open_at = str(error), now + RETRY_SECONDS
        else:
            if self.trouble:
                log.info("%s: there is a fetching agent again", self._prefix)
            self.trouble = ""

    def _end(self, reason: str) -> None:
        self._lanes.end(reason)
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
        for lane in self._lanes:
            changed |= lane.queue.step()
            if lane.queue.uncertain is not None:
                self.fence(str(lane.queue.uncertain))
                return True
        for remote in [remote for remote in self._leaving if not remote.busy]:
            self._leaving.discard(remote)
            if remote.forgotten:
                self._drop(remote)
            else:
                self._unprepare_retired(remote)
        return changed

    # ------------------------------------------------------------ memory

    def register(self, ranges: Sequence[MemoryRange]) -> None:
        self._serving.register(ranges)
        self._lanes.register(ranges)

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
        )

    # ------------------------------------------------------------ peers

    def load(self, meta: PeerMetadata) -> NixlRemote:
        """A peer whose probe has still to be read."""
        if meta.agent in self._remotes:
            raise FabricError(f"{meta.agent} is connected already, or reads from it have to end")
        if not self._lanes:
            raise FabricError(f"nothing can be read: {self.trouble}")
        remote = NixlRemote(meta, self._place, self._lanes.of(meta.segments))
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
        remote.lane.queue.add(
            Read(
                peer=remote.peer,
                pieces=deque([(remote.probe, piece)]),
                nbytes=PROBE_BYTES,
                descriptors=1,
                cancelled=cancelled,
                submitted=0.0,
                resolve=resolve,
            )
        )

    def forget(self, remote: RemoteAgent, done: Callable[[], None]) -> None:
        """Ends the peer's reads; `done` is called when it is forgotten, or was long ago."""
        known = self._remotes.get(remote.name)
        if known is None or known is not remote:
            done()
            return
        known.forgotten.append(done)
        if known.busy:
            error = FabricError(f"{known.name} was disconnected")
            known.lane.queue.stop(known.peer, error)
            if known.copier is not None:
                known.copier.queue.stop(known.copied, error)
            self._leaving.add(known)
        else:
            self._leaving.discard(known)
            self._drop(known)

    def _unprepare_retired(self, remote: NixlRemote) -> None:
        for prepared in remote.retired:
            remote.lane.agent.unprepare(prepared.lists)
            if prepared.copied is not None and remote.copier is not None:
                remote.copier.agent.unprepare(prepared.copied)
        remote.retired.clear()

    def _drop(self, remote: NixlRemote) -> None:
        remote.retired += remote.prepared
        remote.prepared.clear()
        self._unprepare_retired(remote)
        copier, remote.copier = remote.copier, None
        if copier is not None:
            copier.agent.forget(remote.name)
            copier.agent.deregister(remote.landing_range)
            if not any(other.copier is copier for other in self._remotes.values()):
                self._lanes.close(copier)
        agent = remote.lane.agent
        agent.unprepare(remote.probe)
        agent.forget(remote.name)
        agent.deregister(remote.landing_range)
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
            remote.retired.append(prepared)
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
        lane, peer, lists = remote.lane, remote.peer, prepared.lists
        if selection.nbytes >= COPIED_BYTES:
            copied = self._lists_of_copier(remote, prepared)
            if copied is not None and remote.copier is not None:
                lane, peer, lists = remote.copier, remote.copied, copied
        pieces = split(lists.local, lists.remote, selection, lane.piece_bytes)
        lane.queue.add(
            Read(
                peer=peer,
                pieces=deque((lists, piece) for piece in pieces),
                nbytes=selection.nbytes,
                descriptors=selection.descriptors,
                cancelled=cancelled,
                submitted=submitted,
                resolve=resolve,
                landed=landed,
            )
        )

    def _lists_of_copier(self, remote: NixlRemote, prepared: NixlPrepared) -> PreparedLists | None:
        """None when its reads are no copies, or not known to be."""
        if remote.copier is None or remote.peer.watched.undecided or not remote.is_copied:
            return None
        if prepared.copied is None:
            lists = dataclasses.replace(prepared.lists, local_handle=0, remote_handle=0)
            remote.copier.agent.prepare(lists)
            prepared.copied = lists
        return prepared.copied

    def meet_copier(self, remote: NixlRemote) -> None:
        """After the probe, and before anybody waits for bytes: a new agent takes 0.1 s, a peer that
        is new to one some hundredths. Without a copier large reads take the way of small ones."""
        if remote is not self._remotes.get(remote.name) or not remote.is_copied:
            return
        try:
            lane = self._lanes.copying(remote.meta.segments)
            agent = lane.agent
            agent.load(remote.meta.blob)
            try:
                agent.connect(remote.name)
                agent.register([remote.landing_range])
                self._warm_up(remote, agent)
            except FabricError:
                agent.forget(remote.name)
                raise
        except UncertainError as error:
            self.fence(str(error))
            raise
        except FabricError as error:
            log.warning("%s: large reads take the way of small ones: %s", remote.name, error)
            return
        remote.copier = lane

    @staticmethod
    def _warm_up(remote: NixlRemote, agent: NixlAgent) -> None:
        """Each of its threads connects with its first read."""
        here, there = remote.landing.ctypes.data, remote.meta.probe_address
        lists = PreparedLists(remote.name, _bytes_at(here), _bytes_at(there))
        agent.prepare(lists)
        index = np.array([0, 2], np.int32)  # not neighbours, which would be merged
        until = time.monotonic() + WARM_UP_SECONDS
        try:
            for _ in range(WARM_UPS):
                handle = agent.post(lists, Piece(2, index, index, NO_EXTRA))
                while not agent.done(handle, remote.name):
                    if time.monotonic() > until:
                        raise UncertainError(f"the threads for {remote.name} do not read")
                    time.sleep(0)
                agent.free(handle)
        finally:
            agent.unprepare(lists)

    def _known(self, remote: RemoteAgent) -> NixlRemote:
        known = self._remotes.get(remote.name)
        if known is not remote or known.forgotten:
            raise FabricError(f"{remote.name} was disconnected, or the fabric fenced: connect anew")
        return known


def _row(address: int) -> Rows:
    return Rows(np.array([[address, PROBE_BYTES, 0, PROBE_BYTES, 1]], np.uint64))


def _bytes_at(address: int) -> Rows:
    return Rows(np.array([[address, 1, 0, 1, PROBE_BYTES]], np.uint64))
