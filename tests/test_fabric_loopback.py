"""The in-process fabric keeps the promises of the interface, and fails as ordered."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import pytest

from kvagent.core.regions import MemoryRange
from kvagent.errors import BlockRangeError, FabricError, HandshakeError, PeerGoneError
from kvagent.fabric.base import CancelFlag, PeerMetadata, ReadCancelled
from kvagent.fabric.loopback import LoopbackFabric, LoopbackNetwork

BLOCK, BLOCKS = 64, 100
SIZE = BLOCK * BLOCKS


@dataclass
class Selected:
    local_index: np.ndarray
    remote_index: np.ndarray
    extra: np.ndarray
    nbytes: int = SIZE
    descriptors: int = BLOCKS


def select(local: Any, remote: Any, extra: Any = ()) -> Selected:
    return Selected(
        np.asarray(local, np.int32),
        np.asarray(remote, np.int32),
        np.array(extra, np.uint64).reshape(-1, 3),
    )


EVERYTHING = select(np.arange(BLOCKS), np.arange(BLOCKS))


class Pair:
    """`reader` reads from `server`; ten blocks to a piece."""

    def __init__(self) -> None:
        self.network = LoopbackNetwork()
        self.server = LoopbackFabric(self.network, "server/0")
        self.reader = LoopbackFabric(self.network, "reader/0", piece_bytes=10 * BLOCK)
        self.source = np.random.default_rng(0).integers(1, 256, SIZE).astype(np.uint8)
        self.target = np.zeros(SIZE, np.uint8)
        self.prepared: Any = None

    def rows(self, memory: np.ndarray) -> np.ndarray:
        return np.array([[memory.ctypes.data, BLOCK, 0, BLOCK, BLOCKS]], np.uint64)

    async def prepare(self) -> None:
        self.remote = await self.reader.connect(self.server.metadata)
        self.prepared = await self.reader.prepare(
            self.remote, self.rows(self.target), self.rows(self.source)
        )

    def read(self, selection: Selected = EVERYTHING, flag: CancelFlag | None = None) -> Any:
        return asyncio.ensure_future(
            self.reader.read(self.prepared, selection, flag or CancelFlag())
        )

    def arrived(self) -> int:
        return int((self.target != 0).sum())


@asynccontextmanager
async def pair() -> AsyncIterator[Pair]:
    both = Pair()
    for fabric, memory in ((both.server, both.source), (both.reader, both.target)):
        await fabric.start()
        await fabric.register([MemoryRange(memory.ctypes.data, SIZE)])
    await both.prepare()
    yield both
    await both.reader.close()
    await both.server.close()


async def a_while() -> None:
    for _ in range(100):
        await asyncio.sleep(0)


def with_pair(test: Callable[[Pair], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    async def body() -> None:
        async with pair() as both:
            await test(both)

    def run() -> None:
        asyncio.run(asyncio.wait_for(body(), 10))

    run.__name__ = test.__name__
    return run


@with_pair
async def test_bytes(both: Pair) -> None:
    stats = await both.read()
    assert np.array_equal(both.target, both.source)
    assert (stats.nbytes, stats.descriptors) == (SIZE, BLOCKS)
    order = np.random.default_rng(1).permutation(BLOCKS)
    await both.read(select(np.arange(BLOCKS), order))
    assert np.array_equal(both.target.reshape(BLOCKS, -1), both.source.reshape(BLOCKS, -1)[order])
    both.target[:] = 0
    here, there = both.target.ctypes.data, both.source.ctypes.data
    await both.read(select([3], [5], [(here + 1, there + 7, 9), (here + 20, there, 1)]))
    assert np.array_equal(both.target[1:10], both.source[7:16])
    assert np.array_equal(both.target[3 * BLOCK : 4 * BLOCK], both.source[5 * BLOCK : 6 * BLOCK])
    assert both.arrived() == BLOCK + 10


@with_pair
async def test_what_is_not_registered_is_refused(both: Pair) -> None:
    with pytest.raises(BlockRangeError):
        await both.read(select([BLOCKS], [0]))
    here, there = both.target.ctypes.data, both.source.ctypes.data
    for spot in ((here, there + SIZE - 1, 2), (here - 1, there, 2)):
        with pytest.raises(FabricError, match="not registered"):
            await both.read(select([], [], [spot]))
    with pytest.raises(FabricError, match="host memory"):
        await both.reader.prepare(
            both.remote, both.rows(both.target), both.rows(both.source), remote_kind="vram"
        )


@with_pair
async def test_handshakes_refused(both: Pair) -> None:
    good = both.server.metadata
    assert msgspec.json.decode(msgspec.json.encode(good), type=PeerMetadata) == good
    for change, match in (
        ({"blob": b"damaged"}, "digest"),
        ({"probe_digest": bytes(32)}, "probe"),
        ({"options": {"segment": "64k"}}, "segment is 'unset' here and '64k' at server/0"),
    ):
        with pytest.raises(HandshakeError, match=match):
            await both.reader.connect(msgspec.structs.replace(good, **change))
    both.server.die()
    with pytest.raises(PeerGoneError):
        await both.reader.connect(good)


@with_pair
async def test_cancel_stops_between_pieces(both: Pair) -> None:
    both.server.hang()
    flag = CancelFlag()
    reading = both.read(flag=flag)
    await a_while()
    flag.cancel("deadline")
    await a_while()
    assert not reading.done()
    both.server.resume()
    with pytest.raises(ReadCancelled, match="deadline"):
        await reading
    assert both.arrived() == 10 * BLOCK  # the piece that was in flight


@with_pair
async def test_cancelling_the_task_waits_too(both: Pair) -> None:
    both.server.hang()
    reading = both.read()
    await a_while()
    reading.cancel()
    await a_while()
    reading.cancel()
    await a_while()
    assert not reading.done()
    both.server.resume()
    with pytest.raises(asyncio.CancelledError):
        await reading
    assert both.arrived() == 10 * BLOCK


@with_pair
async def test_fence_ends_a_read_that_hangs(both: Pair) -> None:
    both.server.hang()
    reading = both.read()
    await a_while()
    await both.reader.fence()
    with pytest.raises(FabricError, match="fenced"):
        await reading
    both.server.resume()
    await a_while()
    assert both.arrived() == 0
    with pytest.raises(FabricError, match="connect again"):
        await both.read()
    await both.prepare()
    await both.read()
    assert np.array_equal(both.target, both.source)


@with_pair
async def test_a_peer_that_dies(both: Pair) -> None:
    both.server.hang()
    reading = both.read()
    await a_while()
    both.server.die()
    for read in (reading, both.read()):
        with pytest.raises(PeerGoneError, match="gone"):
            await read


@with_pair
async def test_disconnect_waits_for_its_reads(both: Pair) -> None:
    both.server.hang()
    reading = both.read()
    await a_while()
    leaving = asyncio.ensure_future(both.reader.disconnect(both.remote))
    await a_while()
    assert not leaving.done()
    both.server.resume()
    await leaving
    with pytest.raises(FabricError, match="disconnected"):
        await reading
    assert both.arrived() == 10 * BLOCK
    with pytest.raises(FabricError):
        await both.read()


@with_pair
async def test_ordered_faults(both: Pair) -> None:
    both.server.faults.fail = {1}
    both.server.faults.corrupt = {2, 4}
    with pytest.raises(FabricError, match="ordered"):
        await both.read()
    wrong = []
    for _ in range(3):
        await both.read()
        wrong.append(int((both.target != both.source).sum()))
    assert wrong == [1, 0, 1]
    both.server.faults.delay = 0.001
    await both.read()
    assert np.array_equal(both.target, both.source)


@with_pair
async def test_released_lists_are_refused(both: Pair) -> None:
    await both.reader.release(both.prepared)
    with pytest.raises(FabricError):
        await both.read()
