"""One measured read by a sidecar's own fabric, and which transport carried it."""

from __future__ import annotations

import asyncio
import re
import statistics
import time

import msgspec
import numpy as np

from kvagent.config import Config
from kvagent.core.regions import MemoryRange
from kvagent.fabric.base import CancelFlag, IndexArray, PeerMetadata
from kvagent.fabric.nixl import NixlFabric
from kvagent.fabric.pieces import NO_EXTRA

__all__ = ["NBYTES", "WATCH", "Reading", "carriers", "new_fabric", "read_peer"]

NBYTES = 64 << 20
BLOCK = 1 << 20
ROUNDS = 5
CONNECT_SECONDS = 30.0

WATCH = {"UCX_PROTO_INFO": "y"}
"""For the environment of the process that reads: UCX then says what it decided, to `carriers`."""

_TITLE = re.compile(r"\| (\S+?)/\S* .*cfg#\d")
_OPERATION = re.compile(r"\| (.*) by ucp_")
_WAY = re.compile(r"\| *\S+\.\.inf *\|[^|]*\| *([^|]*?) *\|")


class Reading(msgspec.Struct, frozen=True, kw_only=True):
    """`nbytes` in `seconds`, the median of some rounds; `connect_seconds` until the first bytes
    were there, the canary that every fabric checks."""

    nbytes: int
    seconds: float
    connect_seconds: float

    @property
    def rate(self) -> str:
        return f"{self.nbytes / self.seconds / 1e9:.1f} GB/s"


class Blocks:
    """A `Selection` of `count` descriptors in order."""

    def __init__(self, count: int, nbytes: int) -> None:
        self.local_index: IndexArray = np.arange(count, dtype=np.int32)
        self.remote_index = self.local_index
        self.extra = NO_EXTRA
        self.nbytes = nbytes
        self.descriptors = count


def new_fabric(name: str) -> NixlFabric:
    """One that reads as a sidecar with the default settings does."""
    settings = Config()
    return NixlFabric(
        name, piece_bytes=settings.piece_bytes, inflight_bytes=settings.inflight_bytes
    )


async def read_peer(
    fabric: NixlFabric, meta: PeerMetadata, local: MemoryRange, far: MemoryRange
) -> Reading:
    """Connects, and reads as many bytes as both ranges hold, in blocks of a MiB.

    `local` is registered. Raises what `Fabric.connect` and `Fabric.read` do.
    """
    begin = time.monotonic()
    remote = await asyncio.wait_for(fabric.connect(meta), CONNECT_SECONDS)
    connected = time.monotonic() - begin
    nbytes = min(local.nbytes, far.nbytes)
    block = min(BLOCK, nbytes)
    blocks = Blocks(nbytes // block, nbytes // block * block)
    here, there = (
        np.array([[memory.address, block, memory.device, block, blocks.descriptors]], np.uint64)
        for memory in (local, far)
    )
    prepared = await fabric.prepare(
        remote, here, there, local_kind=local.kind, remote_kind=far.kind
    )
    rounds = [await fabric.read(prepared, blocks, CancelFlag()) for _ in range(ROUNDS)]
    await fabric.disconnect(remote)
    return Reading(
        nbytes=blocks.nbytes,
        seconds=statistics.median(each.wire for each in rounds),
        connect_seconds=connected,
    )


def carriers(log: str) -> dict[str, str]:
    """By the fabric's name: the transport and device that carried its largest reads, "cma/memory",
    from UCX's log; the last one that it decided on. A fabric of which it says nothing is absent."""
    found: dict[str, str] = {}
    name = operation = ""
    for line in log.splitlines():
        if title := _TITLE.search(line):
            name, operation = title[1], ""
        elif described := _OPERATION.search(line):
            operation = described[1]
        elif operation == "remote memory read" and (way := _WAY.search(line)):
            found[name] = way[1]
    return found
