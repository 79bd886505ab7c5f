"""The agent that reads, and a helper for copies.

A read on one host is a copy by the kernel, made inside NIXL's post; and one thread copies at about
two thirds of the speed that the memory has. So large reads from such peers are shared with a second
agent, which has a thread of its own and takes pieces while the first one copies others. It is an
agent like the first, and what is said of reads, failures and the fence holds for both. It has
many pieces waiting, since a thread that goes to sleep after each may be woken on the first one's
core; when the first agent has no other piece to copy, it takes those that the helper has not begun.

All that the helper's agent is asked for is asked on its thread, in order, and nobody waits for it:
as long as it is not ready for a peer, the first agent copies alone.
"""

from __future__ import annotations

import dataclasses
import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from kvagent.core.regions import MemoryRange
from kvagent.errors import FabricError
from kvagent.fabric.agent import NixlAgent, PreparedLists
from kvagent.fabric.base import PROBE_BYTES, PeerMetadata
from kvagent.fabric.pieces import NO_EXTRA, Piece, Rows
from kvagent.fabric.reads import UncertainError

__all__ = ["PROBE", "Hands", "probe_row"]

log = logging.getLogger(__name__)

COPIED_BYTES = 512 << 10
"""A piece of less has been copied before another thread begins."""
NAP = 1e-4
"""Between looks at a read that is no copy after all."""
MEET_SECONDS = 5.0
"""For the first read from a peer, which connects."""

_FIRST = np.zeros(1, np.int32)
PROBE = Piece(PROBE_BYTES, _FIRST, _FIRST, NO_EXTRA)
"""Of lists of one `probe_row` each."""


def probe_row(address: int) -> Rows:
    return Rows(np.array([[address, PROBE_BYTES, 0, PROBE_BYTES, 1]], np.uint64))


class Hands:
    """What posts the reads of one lane. `make(role)` makes an agent; at most `helper_bytes` wait
    for the helper. Every method runs on the fabric's thread."""

    def __init__(self, make: Callable[[str], NixlAgent], helper_bytes: int) -> None:
        self.agent = make("fetch")
        self._make = make
        self._helper_bytes = helper_bytes
        self._helper: _Helper | None = None
        self._ranges: list[MemoryRange] = []
        self._lists: dict[PreparedLists, PreparedLists] = {}
        """The helper's, by the agent's."""
        self._copies: dict[int, _Copy] = {}
        """By handle. NIXL's handles are addresses, and these are negative numbers."""
        self._number = 0
        self._more = False

    def destroy(self) -> None:
        """Ends all that is in flight: when it returns, no read of these writes any more."""
        self.agent.destroy()
        if self._helper is not None:
            self._helper.destroy()

    def register(self, ranges: Sequence[MemoryRange]) -> None:
        self.agent.register(ranges)
        host = [each for each in ranges if each.kind == "dram"]
        self._ranges += host
        if self._helper is not None:
            self._helper.register(host)

    # ------------------------------------------------------------ peers

    def meet(self, meta: PeerMetadata) -> None:
        """This peer, which the agent knows, is one that is copied from."""
        if self._helper is None:
            self._helper = _Helper(self._make)
            self._helper.register(self._ranges)
        self._helper.meet(meta)

    def prepare(self, lists: PreparedLists) -> None:
        self.agent.prepare(lists)
        if self._helper is not None and lists.local_kind == lists.remote_kind == "dram":
            self._lists[lists] = theirs = dataclasses.replace(
                lists, local_handle=0, remote_handle=0
            )
            self._helper.prepare(theirs)

    def unprepare(self, lists: PreparedLists) -> None:
        self.agent.unprepare(lists)
        theirs = self._lists.pop(lists, None)
        if theirs is not None and self._helper is not None:
            self._helper.unprepare(theirs)

    def forget(self, name: str) -> None:
        self.agent.forget(name)
        if self._helper is not None:
            self._helper.forget(name)

    # ------------------------------------------------------------ reads (a `Poster`)

    def post(self, lists: PreparedLists, piece: Piece, more: bool) -> int:
        self._more = more
        theirs = self._lists.get(lists)
        if more and theirs is not None and theirs.remote_handle and self._may_help(piece):
            assert self._helper is not None
            self._number -= 1
            self._copies[self._number] = copy = _Copy(lists, theirs, piece)
            self._helper.copy(copy)
            return self._number
        return self.agent.post(lists, piece)

    def _may_help(self, piece: Piece) -> bool:
        given = sum(copy.piece.nbytes for copy in self._copies.values())
        room = COPIED_BYTES <= piece.nbytes <= self._helper_bytes - given
        return room and self._helper is not None and self._helper.ready

    def done(self, handle: int, peer: str) -> bool:
        copy = self._copies.get(handle)
        if copy is None:
            return self.agent.done(handle, peer)
        assert self._helper is not None
        broken = self._helper.broken
        if (broken or not self._more) and copy.taken.acquire(blocking=False):
            copy.handle = self.agent.post(copy.ours, copy.piece)
        if copy.handle:
            return self.agent.done(copy.handle, peer)
        if not copy.ended:
            if broken:
                raise UncertainError(f"reading from {peer}: the helper has ended")
            return False
        if copy.error is not None:
            raise copy.error
        return True

    def free(self, handle: int) -> None:
        copy = self._copies.pop(handle, None)
        if copy is None:
            self.agent.free(handle)
        elif copy.handle:
            self.agent.free(copy.handle)


@dataclass(eq=False, slots=True)
class _Copy:
    """A piece that the helper was given, and whoever has `taken` reads; `ended` is written last."""

    ours: PreparedLists
    lists: PreparedLists
    piece: Piece
    taken: threading.Lock = field(default_factory=threading.Lock)
    handle: int = 0
    """Of the first agent, when it took it back."""
    error: FabricError | None = None
    ended: bool = False


class _Helper:
    """The second agent and its thread. What it is asked for is done later, and in order."""

    def __init__(self, make: Callable[[str], NixlAgent]) -> None:
        self.broken = False
        self._asked = self._done = 0
        """Chores: all but copies. The first is the fabric thread's to count, the other its own."""
        self._landing = np.zeros(PROBE_BYTES, np.uint8)
        self._met: set[str] = set()
        self._stopped = False
        self._agent: NixlAgent | None = None
        self._todo: queue.SimpleQueue[Callable[[NixlAgent], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(
            target=self._main, args=(make,), name="kvagent-copy", daemon=True
        )
        self._thread.start()

    @property
    def ready(self) -> bool:
        """Whether it would copy at once: some chores take a tenth of a second."""
        return self._asked == self._done and not self.broken

    def destroy(self) -> None:
        self._stopped = True
        self._todo.put(None)
        self._thread.join()  # a copy takes a millisecond, and is not interrupted
        if self._agent is not None:
            self._agent.destroy()

    # ------------------------------------------------------------ asked by the fabric's thread

    def register(self, ranges: Sequence[MemoryRange]) -> None:
        ranges = list(ranges)
        self._ask(lambda agent: agent.register(ranges))

    def meet(self, meta: PeerMetadata) -> None:
        self._ask(lambda agent: self._meet(agent, meta))

    def prepare(self, lists: PreparedLists) -> None:
        self._ask(lambda agent: self._prepare(agent, lists))

    def unprepare(self, lists: PreparedLists) -> None:
        self._ask(lambda agent: agent.unprepare(lists))

    def forget(self, name: str) -> None:
        self._ask(lambda agent: self._forget(agent, name))

    def copy(self, copy: _Copy) -> None:
        self._todo.put(lambda agent: self._copy(agent, copy))

    def _ask(self, chore: Callable[[NixlAgent], None]) -> None:
        def run(agent: NixlAgent) -> None:
            chore(agent)
            self._done += 1

        self._asked += 1
        self._todo.put(run)

    # ------------------------------------------------------------ on its thread

    def _main(self, make: Callable[[str], NixlAgent]) -> None:
        try:
            self._agent = make("copy")
            here = MemoryRange(self._landing.ctypes.data, PROBE_BYTES)
            self._agent.register([here])
            while not self._stopped and (errand := self._todo.get()) is not None:
                errand(self._agent)
        except FabricError as error:
            log.warning("large reads on this host are copied by one thread only: %s", error)
        except Exception:
            log.exception("large reads on this host are copied by one thread only")
        finally:
            self.broken = True

    def _meet(self, agent: NixlAgent, meta: PeerMetadata) -> None:
        """With a first read, for which UCX connects: nobody waits for the bytes of this one."""
        name = meta.agent
        here, there = probe_row(self._landing.ctypes.data), probe_row(meta.probe_address)
        probe = PreparedLists(name, here, there)
        try:
            agent.load(meta.blob)
            agent.connect(name)
            agent.prepare(probe)
            self._read(agent, probe, PROBE, time.monotonic() + MEET_SECONDS)
        except UncertainError:
            raise
        except FabricError as error:  # the first agent will find out, if it matters
            log.debug("%s: no second way to it: %s", name, error)
        else:
            self._met.add(name)
        agent.unprepare(probe)

    def _prepare(self, agent: NixlAgent, lists: PreparedLists) -> None:
        if lists.remote_name not in self._met:
            return
        try:
            agent.prepare(lists)
        except FabricError as error:
            log.debug("%s: not prepared: %s", lists.remote_name, error)

    def _forget(self, agent: NixlAgent, name: str) -> None:
        self._met.discard(name)
        agent.forget(name)

    def _copy(self, agent: NixlAgent, copy: _Copy) -> None:
        if not copy.taken.acquire(blocking=False):
            return
        try:
            if not self._read(agent, copy.lists, copy.piece):
                return
        except FabricError as error:
            copy.error = error
        copy.ended = True

    def _read(
        self, agent: NixlAgent, lists: PreparedLists, piece: Piece, until: float | None = None
    ) -> bool:
        """False when it was stopped meanwhile: then only `destroy` ends the read."""
        handle = agent.post(lists, piece)
        try:
            while not agent.done(handle, lists.remote_name):
                if self._stopped:
                    return False
                if until is not None and time.monotonic() > until:
                    raise UncertainError(f"{lists.remote_name} does not answer")
                time.sleep(NAP)
        except UncertainError:
            raise
        except FabricError:
            agent.free(handle)
            raise
        agent.free(handle)
        return True
