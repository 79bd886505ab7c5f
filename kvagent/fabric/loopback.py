"""A fabric inside one process, with faults to order. For tests, not for use.

Fabrics of one `LoopbackNetwork` find each other by name and copy between addresses of this
process. They keep the promises of `kvagent.fabric.base`, so that whatever is built on a fabric
can be shown every kind of trouble without a second process. Nothing depends on wall time but
`Faults.delay`.
"""

from __future__ import annotations

import asyncio
import ctypes
import hashlib
import random
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kvagent.core.regions import MemoryRange
from kvagent.core.stats import ReadStats
from kvagent.errors import FabricError, PeerGoneError
from kvagent.fabric.base import (
    PROBE_BYTES,
    CancelFlag,
    Kind,
    PeerMetadata,
    Prepared,
    ReadCancelled,
    RemoteAgent,
    RowArray,
    Selection,
    check_metadata,
    check_probe,
    ignore,
    settled,
)
from kvagent.fabric.pieces import Piece, Rows, split

__all__ = ["Faults", "LoopbackFabric", "LoopbackNetwork"]


@dataclass
class Faults:
    """What goes wrong when others read from a fabric. Reads are counted from 1, probes are not."""

    delay: float = 0.0
    """Seconds that every piece is in flight."""
    fail: set[int] = field(default_factory=set)
    """Reads that end with `FabricError` at their first piece."""
    corrupt: set[int] = field(default_factory=set)
    """Reads of which one byte arrives wrong; `seed` says which."""
    seed: int = 0


class LoopbackNetwork:
    """The fabrics that can reach each other, by agent name."""

    def __init__(self) -> None:
        self.fabrics: dict[str, LoopbackFabric] = {}


class _Prepared(Prepared):
    def __init__(self, remote: RemoteAgent, local: Rows, remote_rows: Rows) -> None:
        super().__init__(remote)
        self.local, self.remote_rows = local, remote_rows


class LoopbackFabric:
    """A `Fabric`. `hang`, `resume`, `die` and `faults` concern those who read from it."""

    def __init__(
        self,
        network: LoopbackNetwork,
        name: str,
        *,
        options: Mapping[str, str] | None = None,
        piece_bytes: int = 16 << 20,
        vram: bool = False,
    ) -> None:
        """`vram`: what calls itself GPU memory is host memory, of a stand-in for CUDA."""
        self._vram = vram
        self.faults = Faults()
        self.trouble = ""
        self.reads = 0
        self._name = f"{name}/{uuid.uuid4().hex}"
        self._network = network
        self._options = dict(options or {})
        self._piece_bytes = piece_bytes
        self._ranges: list[MemoryRange] = []
        self._handles: set[RemoteAgent | Prepared] = set()
        self._active: dict[asyncio.Future[ReadStats], RemoteAgent] = {}
        self._ended = asyncio.Event()
        self._dead = asyncio.Event()
        self._running = asyncio.Event()
        self._running.set()
        self._random = random.Random()
        # Shared with nobody: a plain buffer of this process is memory enough.
        self._canary = ctypes.create_string_buffer(uuid.uuid4().bytes * (PROBE_BYTES // 16))

    # ------------------------------------------------------------ faults

    def hang(self) -> None:
        """Reads from here stay in flight: like a process that is stopped."""
        self._running.clear()

    def resume(self) -> None:
        self._running.set()

    def die(self) -> None:
        """Reads from here fail with `PeerGoneError`, now and later: like a process killed."""
        self._network.fabrics.pop(self._name, None)
        self._dead.set()

    # ------------------------------------------------------------ Fabric

    @property
    def metadata(self) -> PeerMetadata:
        blob = self._name.encode()
        return PeerMetadata(
            agent=self._name,
            blob=blob,
            digest=hashlib.sha256(blob).digest(),
            probe_address=ctypes.addressof(self._canary),
            probe_digest=hashlib.sha256(ctypes.string_at(self._canary, PROBE_BYTES)).digest(),
            options=self._options,
        )

    async def start(self, bind: Callable[[], None] | None = None) -> None:
        if bind is not None:
            bind()
        self._network.fabrics[self._name] = self
        probe = MemoryRange(ctypes.addressof(self._canary), PROBE_BYTES)
        self._ranges = [probe]
        self._random.seed(self.faults.seed)

    async def close(self) -> None:
        await self.fence()
        self.die()

    async def register(self, ranges: Sequence[MemoryRange]) -> None:
        self._ranges += ranges

    async def connect(self, meta: PeerMetadata) -> RemoteAgent:
        check_metadata(meta, self._options)
        remote = RemoteAgent(meta.agent)
        self._handles.add(remote)
        try:
            target = self._target(remote)
            await self._flight(target)
            self._check_range(target, meta.probe_address, PROBE_BYTES)
            probe = ctypes.string_at(meta.probe_address, PROBE_BYTES)
            check_probe(meta, probe)
        except BaseException:
            self._handles.discard(remote)
            raise
        return remote

    async def disconnect(self, remote: RemoteAgent) -> None:
        self._handles = {
            handle
            for handle in self._handles
            if handle is not remote and getattr(handle, "remote", None) is not remote
        }
        reads = [read for read, owner in self._active.items() if owner is remote]
        if reads:
            await asyncio.wait(reads)

    async def prepare(
        self,
        remote: RemoteAgent,
        local_rows: RowArray,
        remote_rows: RowArray,
        *,
        local_kind: Kind = "dram",
        remote_kind: Kind = "dram",
    ) -> Prepared:
        self._check_handle(remote)
        if "vram" in (local_kind, remote_kind) and not self._vram:
            raise FabricError("the loopback fabric copies host memory only")
        prepared = _Prepared(remote, Rows(local_rows), Rows(remote_rows))
        self._handles.add(prepared)
        return prepared

    async def read(
        self,
        prepared: Prepared,
        selection: Selection,
        cancelled: CancelFlag,
        landed: Callable[[int], None] = ignore,
    ) -> ReadStats:
        self._check_handle(prepared)
        assert isinstance(prepared, _Prepared)
        pieces = split(prepared.local, prepared.remote_rows, selection, self._piece_bytes)
        task = asyncio.ensure_future(self._run(prepared, selection, pieces, cancelled, landed))
        self._active[task] = prepared.remote
        task.add_done_callback(lambda done: self._active.pop(done, None))
        return await settled(task, cancelled)

    async def release(self, prepared: Prepared) -> None:
        self._handles.discard(prepared)

    async def fence(self) -> None:
        self._ended.set()
        if self._active:
            await asyncio.wait(list(self._active))
        self._handles.clear()
        self._ended = asyncio.Event()

    # ------------------------------------------------------------ the copying

    async def _run(
        self,
        prepared: _Prepared,
        selection: Selection,
        pieces: list[Piece],
        cancelled: CancelFlag,
        landed: Callable[[int], None],
    ) -> ReadStats:
        begin = time.perf_counter()
        target = self._target(prepared.remote)
        target.reads += 1
        number = target.reads
        for piece in pieces:
            self._check_wanted(prepared.remote, cancelled)
            await self._flight(target)
            if number in target.faults.fail:
                raise FabricError(f"read {number} was ordered to fail")
            self._copy(target, self._spans(prepared, piece))
            landed(piece.nbytes)
        if number in target.faults.corrupt:
            self._damage([span for piece in pieces for span in self._spans(prepared, piece)])
        self._check_wanted(prepared.remote, cancelled)
        return ReadStats(
            nbytes=selection.nbytes,
            descriptors=selection.descriptors,
            wire=time.perf_counter() - begin,
        )

    async def _flight(self, target: LoopbackFabric) -> None:
        """Until the piece arrives; raises when the peer dies or this fabric is fenced first."""
        arrival = asyncio.ensure_future(target._arrival())
        ends = [asyncio.ensure_future(event.wait()) for event in (self._ended, target._dead)]
        try:
            await asyncio.wait({arrival, *ends}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (arrival, *ends):
                task.cancel()
        if self._ended.is_set():
            raise FabricError("fenced")
        if target._dead.is_set():
            raise PeerGoneError(f"{target._name} is gone")

    async def _arrival(self) -> None:
        await asyncio.sleep(self.faults.delay)
        await self._running.wait()

    def _spans(self, prepared: _Prepared, piece: Piece) -> list[list[int]]:
        """(local address, remote address, bytes) of every descriptor."""
        if len(piece.extra):
            return _triples(piece.extra)
        local = prepared.local.addresses(piece.local_index)
        remote = prepared.remote_rows.addresses(piece.remote_index)
        lengths = prepared.local.lengths(piece.local_index)
        return _triples(np.column_stack((local, remote, lengths)))

    def _copy(self, target: LoopbackFabric, spans: list[list[int]]) -> None:
        for local, remote, nbytes in spans:
            self._check_range(self, local, nbytes)
            self._check_range(target, remote, nbytes)
        for local, remote, nbytes in spans:
            ctypes.memmove(local, remote, nbytes)

    def _damage(self, spans: list[list[int]]) -> None:
        address, _, nbytes = self._random.choice(spans)
        byte = ctypes.c_ubyte.from_address(address + self._random.randrange(nbytes))
        byte.value ^= 1 << self._random.randrange(8)

    # ------------------------------------------------------------ checks

    def _target(self, remote: RemoteAgent) -> LoopbackFabric:
        target = self._network.fabrics.get(remote.name)
        if target is None:
            raise PeerGoneError(f"{remote.name} is gone")
        return target

    def _check_wanted(self, remote: RemoteAgent, cancelled: CancelFlag) -> None:
        if cancelled.reason is not None:
            raise ReadCancelled(cancelled.reason)
        if remote not in self._handles:
            raise FabricError(f"{remote.name} was disconnected")

    def _check_handle(self, handle: RemoteAgent | Prepared) -> None:
        if handle not in self._handles:
            raise FabricError("the peer was disconnected, or the fabric fenced: connect again")

    @staticmethod
    def _check_range(fabric: LoopbackFabric, address: int, nbytes: int) -> None:
        if not any(
            r.address <= address and address + nbytes <= r.address + r.nbytes
            for r in fabric._ranges
        ):
            raise FabricError(f"{nbytes} bytes at {address:#x} of {fabric._name} not registered")


def _triples(array: npt.NDArray[np.generic]) -> list[list[int]]:
    triples: list[list[int]] = array.tolist()
    return triples
