"""Large reads from a process of this host, which NIXL's threads copy."""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvagent.core.regions import MemoryRange
from kvagent.errors import FabricError, PeerGoneError
from kvagent.fabric.base import CancelFlag, ReadCancelled
from tests.test_fabric_nixl import (
    BLOCK,
    BLOCKS,
    EXPECTED,
    MIB,
    SIZE,
    UNTOUCHED,
    CancelAfter,
    Peer,
    Reader,
    everything,
    run,
    select,
)
from tests.test_fabric_nixl import peers as peers
from tests.test_fabric_nixl import victim as victim

pytest.importorskip("nixl")

ENOUGH = 40
"""Blocks that are more than a small read."""


@pytest.fixture
def peer(peers: dict[str, Peer]) -> Peer:
    return peers["shm"]


async def copying(reader: Reader, peer: Peer, *, opens: int = 2) -> Any:
    """Prepared, and it is known how its bytes come. `opens` so many threads."""
    before = threads()
    _, prepared = await reader.prepare(peer)
    assert threads() == before + opens
    await reader.read(prepared, select(np.arange(ENOUGH), np.arange(ENOUGH)))
    reader.memory[:] = 0xFF
    return prepared


def threads() -> int:
    """Of this process, NIXL's included."""
    return len(list(Path(f"/proc/{os.getpid()}/task").iterdir()))


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.mark.parametrize("inflight", [64 << 10, MIB, 8 * MIB])
def test_bytes(peer: Peer, inflight: int) -> None:
    async def body() -> None:
        async with Reader(piece_bytes=64 << 10, inflight_bytes=inflight) as reader:
            prepared = await copying(reader, peer)
            stats = await reader.read(prepared, everything())
            assert np.array_equal(reader.words(), EXPECTED)
            assert (stats.nbytes, stats.descriptors) == (SIZE, BLOCKS)

            order = np.random.default_rng(1).permutation(BLOCKS)
            reader.memory[:] = 0xFF
            await reader.read(prepared, select(np.arange(BLOCKS), order))
            assert np.array_equal(reader.blocks(), EXPECTED.reshape(BLOCKS, -1)[order])

            # Odd bytes go the same way; everything else stays as it was.
            reader.memory[:] = 0xFF
            places = [(3 * BLOCK + 5, 77, MIB + 1), (5 * MIB, 4 * MIB + 1, 3), (9 * MIB, 7, 4096)]
            odd = [(reader.address + a, peer.address + b, size) for a, b, size in places]
            await reader.read(prepared, select([1000], [700], odd))
            want = np.full(SIZE, 0xFF, np.uint8)
            source = EXPECTED.view(np.uint8)
            want[1000 * BLOCK : 1001 * BLOCK] = source[700 * BLOCK : 701 * BLOCK]
            for here, there, size in places:
                want[here : here + size] = source[there : there + size]
            assert np.array_equal(reader.memory, want)

    run(body)


def test_all_sizes_at_once(peer: Peer) -> None:
    async def body() -> None:
        async with Reader(piece_bytes=256 << 10, inflight_bytes=MIB) as reader:
            prepared = await copying(reader, peer)
            order = np.random.default_rng(2).permutation(BLOCKS)
            cuts = np.sort(np.random.default_rng(3).integers(0, BLOCKS, 60))
            parts = [part for part in np.split(np.arange(BLOCKS), cuts) if len(part)]
            assert min(map(len, parts)) < 32 < max(map(len, parts))
            await asyncio.gather(
                *(reader.read(prepared, select(part, order[part])) for part in parts)
            )
            assert np.array_equal(reader.blocks(), EXPECTED.reshape(BLOCKS, -1)[order])

    run(body)


def test_a_small_read_does_not_wait_for_large_ones(peer: Peer) -> None:
    async def body() -> None:
        async with Reader(piece_bytes=64 << 10, inflight_bytes=64 << 10) as reader:
            prepared = await copying(reader, peer)
            large = [asyncio.create_task(reader.read(prepared, everything())) for _ in range(8)]
            await asyncio.sleep(0)
            await reader.read(prepared, select([0], [0]))
            assert not any(each.done() for each in large)
            await asyncio.gather(*large)

    run(body)


def test_cancelled_in_the_middle(peer: Peer) -> None:
    async def body() -> None:
        async with Reader(piece_bytes=64 << 10, inflight_bytes=64 << 10) as reader:
            prepared = await copying(reader, peer)
            with pytest.raises(ReadCancelled, match="enough"):
                await reader.read(prepared, everything(), CancelAfter(10))
            arrived = (reader.words() != UNTOUCHED).sum()
            assert 0 < arrived < len(EXPECTED)
            await asyncio.sleep(0.2)
            assert (reader.words() != UNTOUCHED).sum() == arrived
            await reader.read(prepared, everything())
            assert np.array_equal(reader.words(), EXPECTED)

    run(body)


@pytest.mark.parametrize("delay", [0.0, 0.002, 0.01, 0.05])
def test_peer_killed_in_the_middle(peer: Peer, victim: Peer, delay: float) -> None:
    async def body() -> None:
        async with Reader(inflight_bytes=MIB) as reader:
            prepared = await copying(reader, victim)

            async def read_on() -> None:
                for number in itertools.count():
                    order = np.random.default_rng(number).permutation(BLOCKS)
                    await reader.read(prepared, select(np.arange(BLOCKS), order))

            readings = [asyncio.create_task(read_on()) for _ in range(3)]
            other = await copying(reader, peer, opens=0)  # which nothing happens to
            await asyncio.sleep(delay)
            victim.process.kill()
            for ended in await asyncio.gather(*readings, return_exceptions=True):
                assert isinstance(ended, PeerGoneError)
            reader.memory[:] = 0xFF
            await asyncio.sleep(0.1)
            assert (reader.memory == 0xFF).all(), "written after the end"
            await reader.read(other, everything())
            assert np.array_equal(reader.words(), EXPECTED)

    run(body)


def test_fence_and_disconnect(peer: Peer) -> None:
    async def body() -> None:
        async with Reader(piece_bytes=64 << 10, inflight_bytes=64 << 10) as reader:
            for end in ("fence", "disconnect"):
                _, prepared = await reader.prepare(peer)
                for _ in range(2):
                    await reader.read(prepared, everything())
                reading = asyncio.create_task(reader.read(prepared, everything()))
                await asyncio.sleep(0.001)
                if end == "fence":
                    await reader.fabric.fence()
                else:
                    await reader.fabric.disconnect(prepared.remote)
                reader.memory[:] = 0xFF
                with pytest.raises(FabricError, match=r"fenced|disconnected"):
                    await reading
                await asyncio.sleep(0.05)
                assert (reader.memory == 0xFF).all(), "written after the end"
            prepared = (await reader.prepare(peer))[1]
            for _ in range(2):
                reader.memory[:] = 0xFF
                await reader.read(prepared, everything())
                assert np.array_equal(reader.words(), EXPECTED)

    run(body)


def test_who_keeps_an_error_does_not_keep_the_agent(peer: Peer, victim: Peer) -> None:
    """Else a fence would destroy nothing, and its threads would go on writing."""

    async def body() -> None:
        async with Reader(inflight_bytes=MIB) as reader:
            doomed = await copying(reader, victim)
            reading = asyncio.create_task(read_until_it_fails(reader, doomed))
            await asyncio.sleep(0.02)
            victim.process.kill()
            kept = await reading
            before = threads()
            other = await copying(reader, peer, opens=0)
            reads = [asyncio.create_task(reader.read(other, everything())) for _ in range(16)]
            await asyncio.sleep(0.001)
            await reader.fabric.fence()
            reader.memory[:] = 0xFF
            ends = await asyncio.gather(*reads, return_exceptions=True)
            assert any(isinstance(end, FabricError) for end in ends)
            assert threads() == before - 2
            await asyncio.sleep(0.05)
            assert (reader.memory == 0xFF).all(), "written after the end"
            assert isinstance(kept, PeerGoneError)

    run(body)


async def read_until_it_fails(reader: Reader, prepared: Any) -> FabricError:
    while True:
        try:
            await reader.read(prepared, everything())
        except FabricError as error:
            return error


def test_connected_again_and_again(peer: Peer) -> None:
    """UCX keeps a peer's sockets as long as the agent that had it."""

    async def body() -> None:
        async with Reader() as reader:
            found = []
            for _ in range(12):
                prepared = await copying(reader, peer)
                found.append(open_files())
                await reader.fabric.disconnect(prepared.remote)
            assert found[-1] - found[3] <= 2 * (len(found) - 4), found

    run(body)


def test_released_and_prepared_anew(peer: Peer) -> None:
    async def body() -> None:
        async with Reader() as reader:
            prepared = await copying(reader, peer)
            reading = asyncio.create_task(reader.read(prepared, everything()))
            await asyncio.sleep(0.001)
            await reader.fabric.release(prepared)
            await reading  # it was there first
            assert np.array_equal(reader.words(), EXPECTED)
            with pytest.raises(FabricError, match="released"):
                await reader.read(prepared, everything())
            rows = prepared.lists.local.array, prepared.lists.remote.array
            again = await reader.fabric.prepare(prepared.remote, *rows)
            reader.memory[:] = 0xFF
            await reader.read(again, everything())
            assert np.array_equal(reader.words(), EXPECTED)

    run(body)


def test_without_threads_it_is_read_all_the_same(
    peer: Peer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from kvagent.fabric import lanes

    real = lanes.NixlAgent

    def agent(name: str, **options: Any) -> Any:
        if options["threads"]:
            raise FabricError("too many open files")
        return real(name, **options)

    monkeypatch.setattr(lanes, "NixlAgent", agent)

    async def body() -> None:
        async with Reader() as reader:
            _, prepared = await reader.prepare(peer)
            for _ in range(3):
                reader.memory[:] = 0xFF
                await reader.read(prepared, everything())
                assert np.array_equal(reader.words(), EXPECTED)

    with caplog.at_level(logging.WARNING):
        run(body)
    assert [record.getMessage() for record in caplog.records] == [
        f"{peer.meta.agent}: large reads take the way of small ones: too many open files"
    ]


def test_over_tcp_there_are_none(peers: dict[str, Peer], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_TLS", "tcp")

    async def body() -> None:
        async with Reader() as reader:
            before = threads()
            _, prepared = await reader.prepare(peers["tcp"])
            for _ in range(3):
                await reader.read(prepared, everything(), CancelFlag())
            assert threads() == before
            assert np.array_equal(reader.words(), EXPECTED)

    run(body)


def test_a_log_record_does_not_keep_the_agent(caplog: pytest.LogCaptureFixture) -> None:
    from kvagent.fabric.agent import NixlAgent
    from kvagent.fabric.segments import LARGE

    agent = NixlAgent("reader/0/fetch", serving=False, segments=LARGE)
    agent.deregister(MemoryRange(0x1000, 4096))  # which was never registered
    assert "deregisterMem" in caplog.text
    agent.destroy()
