"""What a fabric does: read spans of bytes out of another process's registered memory.

The interface of `nixl` (the real one) and `loopback` (in-process, with faults to order). What it
promises beyond the signatures:

* All methods are called from one asyncio loop, and resolve on it.
* `read` returns, or raises, only when nothing that it posted can still write. A read in flight
  cannot be called back: cancelling it, by its flag or by cancelling the task that awaits it, means
  that no further piece is posted, and it still waits for those that were.
* `fence` is what ends a read whose peer hangs. It ends every read of this fabric; whoever reads
  *from* this fabric notices nothing.
* Whoever holds a `PeerMetadata` has power over the process that made it, and a damaged one may
  crash the process that loads it: it travels between authenticated peers only.

Which bytes to read is not decided here: see `kvagent.core.plan`.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Literal, Protocol, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from kvagent.core.regions import MemoryRange
from kvagent.core.stats import ReadStats
from kvagent.errors import FabricError, HandshakeError
from kvagent.fabric.place import Place
from kvagent.fabric.segments import UCX_DEFAULT, Segments
from kvagent.fabric.witness import Carried

__all__ = [
    "PROBE_BYTES",
    "CancelFlag",
    "Fabric",
    "Kind",
    "PeerMetadata",
    "Prepared",
    "ReadCancelled",
    "ReadFuture",
    "RemoteAgent",
    "Selection",
    "check_metadata",
    "check_probe",
    "ignore",
    "settled",
]

Kind = Literal["dram", "vram"]
IndexArray = npt.NDArray[np.int32]
RowArray = npt.NDArray[np.uint64]
T = TypeVar("T")

PROBE_BYTES = 4096
"""Size of the canary that every fabric registers and every `connect` reads."""


class ReadCancelled(FabricError):
    """The read was cancelled; nothing of it is in flight any more, part of it may have landed."""


class PeerMetadata(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a peer needs to read from us. `options` are settings that must be the same on both
    sides; the probe is `PROBE_BYTES` of random bytes at `probe_address`, known by their SHA-256."""

    agent: Annotated[str, msgspec.Meta(min_length=1, max_length=512)]
    blob: Annotated[bytes, msgspec.Meta(max_length=16 << 20)]
    digest: Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]
    """SHA-256 of `blob`."""
    probe_address: Annotated[int, msgspec.Meta(ge=0)]
    probe_digest: Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]
    options: dict[str, str]
    segments: Segments = UCX_DEFAULT
    """Of its TCP connections; whoever reads takes the same."""
    place: Place | None = None
    """Where the process runs."""
    pid: Annotated[int, msgspec.Meta(ge=0)] = 0
    """Its number in the PID namespace of its place."""


def check_metadata(meta: PeerMetadata, options: Mapping[str, str]) -> None:
    """Raises `HandshakeError` when the blob is damaged or an option is not ours."""
    if hashlib.sha256(meta.blob).digest() != meta.digest:
        raise HandshakeError(f"metadata of {meta.agent} does not match its digest")
    for name in sorted({*meta.options, *options}):
        theirs, ours = meta.options.get(name, "unset"), options.get(name, "unset")
        if theirs != ours:
            raise HandshakeError(
                f"fabric option {name} is {ours!r} here and {theirs!r} at {meta.agent}: "
                "it must be the same on both sides"
            )


def check_probe(meta: PeerMetadata, probe: bytes) -> None:
    """Raises `HandshakeError` unless `probe` is what the peer's memory holds."""
    if hashlib.sha256(probe).digest() != meta.probe_digest:
        raise HandshakeError(f"the probe read from {meta.agent} is not what it promised")


def ignore(nbytes: int) -> None:
    """For who does not want to know how far a read has got."""


class CancelFlag:
    """Says to a read that it should end; carries the first reason. Any thread may set it.

    `expired` is asked, by the thread that posts, before each piece: a reason when the right to post
    has run out, else "".
    """

    __slots__ = ("_expired", "_reason")

    def __init__(self, expired: Callable[[], str] | None = None) -> None:
        self._reason: str | None = None
        self._expired = expired

    @property
    def reason(self) -> str | None:
        if self._reason is None and self._expired is not None:
            self._reason = self._expired() or None
        return self._reason

    @property
    def cancelled(self) -> bool:
        return self.reason is not None

    def cancel(self, reason: str) -> None:
        if self._reason is None:
            self._reason = reason


class RemoteAgent:
    """A peer that `connect` has verified. A handle: valid until `disconnect` or `fence`."""

    def __init__(self, name: str) -> None:
        self.name = name

    @property
    def carried(self) -> Carried | None:
        """What carried its bytes; None when that is not known, or not yet."""
        return None


class Prepared:
    """Descriptor lists for one peer. A handle: valid until `release`, or as long as its peer."""

    def __init__(self, remote: RemoteAgent) -> None:
        self.remote = remote


class Selection(Protocol):
    """What to read. Entry k of the index arrays reads descriptor `remote_index[k]` of the prepared
    remote rows into `local_index[k]` of the local ones; `extra` is M x 3 uint64, each row a local
    address, a remote address and a length."""

    @property
    def local_index(self) -> IndexArray: ...
    @property
    def remote_index(self) -> IndexArray: ...
    @property
    def extra(self) -> RowArray: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def descriptors(self) -> int: ...


class Fabric(Protocol):
    """See the module. Every method may raise `FabricError`; what else it may raise is said."""

    trouble: str
    """Why nothing can be read for the moment, or any more; empty when all is well."""

    @property
    def metadata(self) -> PeerMetadata:
        """Opens everything that is registered by now to a peer."""

    async def start(self, bind: Callable[[], None] | None = None) -> None:
        """`bind`, when memory of a GPU will be registered: binds its context to the calling thread.
        It runs first on the thread that registers and reads."""

    async def close(self) -> None:
        """Ends all reads, as `fence` does, and serves no more. Safe to call twice."""

    async def register(self, ranges: Sequence[MemoryRange]) -> None:
        """Adds memory, to read into and to be read from, which stays mapped until `close`. `device`
        of a GPU's ("vram") is the number that this process has for it."""

    async def connect(self, meta: PeerMetadata) -> RemoteAgent:
        """Loads the peer's metadata and reads its probe, which also warms the path up.

        `HandshakeError`: damaged metadata, other options, or other bytes than promised;
        `PeerGoneError`: it cannot be reached or read; `FabricError`: it is connected already, or
        an attempt that was given up has yet to end. Cancelling it does not wait: give it a time
        limit, since a peer that is stopped never answers."""

    async def disconnect(self, remote: RemoteAgent) -> None:
        """Ends its reads, waits for them, forgets the peer and what was prepared for it."""

    async def prepare(
        self,
        remote: RemoteAgent,
        local_rows: RowArray,
        remote_rows: RowArray,
        *,
        local_kind: Kind = "dram",
        remote_kind: Kind = "dram",
    ) -> Prepared:
        """Rows are N x 5: (address, length, device, stride, count), `count` descriptors each; the
        same N and lengths on both sides, one kind of memory and one device per side."""

    async def read(
        self,
        prepared: Prepared,
        selection: Selection,
        cancelled: CancelFlag,
        landed: Callable[[int], None] = ignore,
    ) -> ReadStats:
        """`landed` is told of the bytes of each piece that has arrived, on whatever thread.

        Raises `ReadCancelled`, `PeerGoneError` (disconnect, and connect anew), another
        `FabricError`, or, with nothing posted, `BlockRangeError` (an index that was not prepared)
        or `GeometryError` (the two sides do not fit together)."""

    async def release(self, prepared: Prepared) -> None:
        """Gives the lists up; a read that still uses them goes on."""

    async def fence(self) -> None:
        """Ends every read at once, so that none of them writes any more; each raises `FabricError`.
        All `RemoteAgent` and `Prepared` handles become invalid: connect again. A fabric also does
        this by itself when a read fails and does not say whether parts of it are in flight."""


class ReadFuture(asyncio.Future[ReadStats]):
    """A read's, that one task awaits. Cancelling the task cancels the read by its flag, and the
    task goes on until the read is over: as `settled`, without a task more."""

    def __init__(self, cancelled: CancelFlag, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(loop=loop)
        self._flag = cancelled

    def cancel(self, msg: object = None) -> bool:
        self._flag.cancel("the task that waited for the read was cancelled")
        return False  # so the task is cancelled when this is done


async def settled(future: asyncio.Future[T], cancelled: CancelFlag) -> T:
    """The result of a read's future, waited for even when the awaiting task is cancelled."""
    interrupted: asyncio.CancelledError | None = None
    while not future.done():
        try:
            await asyncio.wait({future})
        except asyncio.CancelledError as error:
            interrupted = error
            cancelled.cancel("the task that waited for the read was cancelled")
    if interrupted is not None:
        if not future.cancelled():
            future.exception()
        raise interrupted
    return future.result()
