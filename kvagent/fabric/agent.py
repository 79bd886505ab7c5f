"""One NIXL agent with the UCX backend: the dozen calls that we need, with our errors.

A thin layer over `nixl._bindings`, because the Python API fixes the progress thread's delay at 0,
and that spins a core for ever. Not thread-safe; what to read and when is decided in `reads` and
`nixl`. Importing this module imports NIXL.
"""

from __future__ import annotations

import gc
import logging
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import nixl  # noqa: F401  (chooses the CUDA flavour and provides nixl._bindings)
import nixl._bindings as bindings
import numpy as np

from kvagent.core.regions import MemoryRange
from kvagent.errors import FabricError, PeerGoneError
from kvagent.fabric.base import Kind, RowArray
from kvagent.fabric.pieces import Piece, Rows
from kvagent.fabric.reads import UncertainError
from kvagent.fabric.segments import Segments

__all__ = ["NixlAgent", "PreparedLists", "nixl_version"]

log = logging.getLogger(__name__)

SERVING_POLL_MICROSECONDS = 100_000
"""The serving agent's thread sleeps in epoll, and wakes for work: the delay is only its timeout."""

MORE_LOOKS = 31
"""Each takes in what TCP has brought, a segment or so; all that is around one takes ten times as
long, and the peer waits for room meanwhile."""

_SEGMENTS = {"dram": bindings.DRAM_SEG, "vram": bindings.VRAM_SEG}
_NIXL_ERRORS = tuple(
    error
    for error in vars(bindings).values()
    if isinstance(error, type) and issubclass(error, Exception)
)
_GONE = (bindings.nixlRemoteDisconnectError, bindings.nixlNotFoundError)


def nixl_version() -> str:
    """Major and minor version, "1.5": what the metadata's format depends on."""
    return ".".join(version("nixl").split(".")[:2])


@dataclass(eq=False)
class PreparedLists:
    """A pair of prepared descriptor lists, and what else a request for them needs."""

    remote_name: str
    local: Rows
    remote: Rows
    local_kind: Kind = "dram"
    remote_kind: Kind = "dram"
    local_handle: int = 0
    remote_handle: int = 0


class NixlAgent:
    """`serving`: with a progress thread, to be read from. Otherwise it reads, when polled, from
    agents with the same `segments`; None: what UCX and its environment say.

    NIXL could let several threads share a read (`num_threads`). It is not asked to: destroying
    such an agent after a peer was killed in the middle of a read aborts the process, inside UCX.
    """

    def __init__(self, name: str, *, serving: bool, segments: Segments | None) -> None:
        config = bindings.nixlAgentConfig()
        config.useProgThread = serving
        config.pthrDelay = SERVING_POLL_MICROSECONDS
        config.syncMode = (
            bindings.NIXL_THREAD_SYNC_STRICT if serving else bindings.NIXL_THREAD_SYNC_NONE
        )
        self.name = name
        try:
            self._agent: Any = bindings.nixlAgent(name, config)
            defaults, _ = self._agent.getPluginParams("UCX")
            params = defaults | (segments.params if segments is not None else {})
            self._backends = [self._agent.createBackend("UCX", params)]
        except _NIXL_ERRORS as error:
            raise FabricError(f"NIXL agent {name}: {error}") from error

    def destroy(self) -> None:
        """Ends all that is in flight: when it returns, no read of this agent writes any more.
        Raises `RuntimeError` when something still holds NIXL's agent: then nothing has ended."""
        held, self._agent = weakref.ref(self._agent), None
        if held() is not None:
            gc.collect()
        if held() is not None:
            raise RuntimeError(f"NIXL agent {self.name} is held by {gc.get_referrers(held())}")

    # ------------------------------------------------------------ memory

    def register(self, ranges: Sequence[MemoryRange]) -> None:
        for kind, segment in _SEGMENTS.items():
            rows = [(r.address, r.nbytes, r.device, "") for r in ranges if r.kind == kind]
            if rows:
                try:
                    self._agent.registerMem(bindings.nixlRegDList(segment, rows), self._backends)
                except _NIXL_ERRORS as error:
                    raise FabricError(f"registering {len(rows)} {kind} ranges: {error}") from error

    def deregister(self, memory: MemoryRange) -> None:
        row = (memory.address, memory.nbytes, memory.device, "")
        rows = bindings.nixlRegDList(_SEGMENTS[memory.kind], [row])
        self._give_back(self._agent.deregisterMem, rows, self._backends)

    def metadata(self) -> bytes:
        blob: bytes = self._agent.getLocalMD()
        return blob

    # ------------------------------------------------------------ peers

    def load(self, blob: bytes) -> str:
        """The peer's name. The caller has checked the digest: damaged metadata crashes."""
        try:
            name: bytes = self._agent.loadRemoteMD(blob)
        except bindings.nixlBackendError as error:  # it opens an endpoint, too
            raise PeerGoneError(f"the peer cannot be reached: {error}") from error
        except _NIXL_ERRORS as error:
            raise FabricError(f"loading a peer's metadata: {error}") from error
        return name.decode()

    def connect(self, name: str) -> None:
        try:
            self._agent.makeConnection(name, self._backends)
        except _GONE as error:
            raise PeerGoneError(f"{name} cannot be reached: {error}") from error
        except _NIXL_ERRORS as error:
            raise FabricError(f"connecting to {name}: {error}") from error

    def forget(self, name: str) -> None:
        try:
            self._agent.invalidateRemoteMD(name)
        except _NIXL_ERRORS:
            pass  # NIXL forgot it by itself when the connection broke

    def prepare(self, lists: PreparedLists) -> None:
        try:
            lists.local_handle = self._agent.prepXferDlist(
                bindings.NIXL_INIT_AGENT,
                _SEGMENTS[lists.local_kind],
                lists.local.array,
                self._backends,
            )
            lists.remote_handle = self._agent.prepXferDlist(
                lists.remote_name, _SEGMENTS[lists.remote_kind], lists.remote.array, self._backends
            )
        except _NIXL_ERRORS as error:
            self.unprepare(lists)
            raise FabricError(f"preparing for {lists.remote_name}: {error}") from error

    def unprepare(self, lists: PreparedLists) -> None:
        for handle in (lists.local_handle, lists.remote_handle):
            if handle:
                self._give_back(self._agent.releasedDlistH, handle)
        lists.local_handle = lists.remote_handle = 0

    # ------------------------------------------------------------ reads

    def post(self, lists: PreparedLists, piece: Piece) -> int:
        """Starts a read; on shared memory it is over when this returns. The handle needs `free`.

        `PeerGoneError` and plain `FabricError`: nothing of it is in flight.
        """
        name = lists.remote_name
        try:
            handle: int = self._request(lists, piece)
        except _NIXL_ERRORS as error:
            raise _translate(error, name, posted=False) from error
        try:
            self._agent.postXferReq(handle, b"")
        except _NIXL_ERRORS as error:
            self.free(handle)
            raise _translate(error, name, posted=True) from error
        return handle

    def _request(self, lists: PreparedLists, piece: Piece) -> Any:
        if not len(piece.extra):
            return self._agent.makeXferReq(
                bindings.NIXL_READ,
                lists.local_handle,
                piece.local_index,
                lists.remote_handle,
                piece.remote_index,
                b"",
                self._backends,
                False,
            )
        return self._agent.createXferReq(
            bindings.NIXL_READ,
            _descriptors(lists.local_kind, piece.extra, 0, lists.local.device),
            _descriptors(lists.remote_kind, piece.extra, 1, lists.remote.device),
            lists.remote_name,
            b"",
            self._backends,
        )

    def done(self, handle: int, peer: str) -> bool:
        """Makes progress; False while the read is in flight. Errors as in `post`."""
        # No name here for a method of NIXL's agent: whoever keeps the error keeps this frame, and
        # with it an agent that the fence means to destroy.
        try:
            state = self._agent.getXferStatus(handle)
            for _ in range(MORE_LOOKS):
                if state != bindings.NIXL_IN_PROG:
                    break
                state = self._agent.getXferStatus(handle)
        except _NIXL_ERRORS as error:
            raise _translate(error, peer, posted=True) from error
        if state == bindings.NIXL_IN_PROG:
            return False
        if state != bindings.NIXL_SUCCESS:
            raise UncertainError(f"reading from {peer}: {state}")
        return True

    def free(self, handle: int) -> None:
        self._give_back(self._agent.releaseXferReq, handle)

    def _give_back(self, call: Callable[..., object], *args: object) -> None:
        """What NIXL will not take back stays until the agent is destroyed; that fails no read."""
        try:
            call(*args)
        except _NIXL_ERRORS as error:
            # As text: the error has this frame, and with `call` the agent, and logs are kept.
            log.warning("%s: %s: %s", self.name, call.__name__, str(error))


def _descriptors(kind: Kind, extra: RowArray, column: int, device: int) -> Any:
    rows = np.ascontiguousarray(extra[:, [column, 2, 2]])  # NIXL takes row-major arrays only
    rows[:, 2] = device
    return bindings.nixlXferDList(_SEGMENTS[kind], rows)


def _translate(error: Exception, name: str, *, posted: bool) -> FabricError:
    if isinstance(error, bindings.nixlRemoteDisconnectError):
        return PeerGoneError(f"{name} is gone: {error}")
    if not posted:
        return FabricError(f"reading from {name}: {error}")
    # NIXL drops a peer whose connection broke, and then does not find it for its other reads.
    if isinstance(error, bindings.nixlNotFoundError):
        return PeerGoneError(f"{name} is gone")
    return UncertainError(f"reading from {name}: {error}")
