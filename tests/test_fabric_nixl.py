"""NIXL between processes, over shared memory and over TCP. The peer only serves."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import pytest

from kvagent.core.regions import MemoryRange
from kvagent.errors import (
    BlockRangeError,
    ConfigError,
    FabricError,
    GeometryError,
    HandshakeError,
    PeerGoneError,
)
from kvagent.fabric.base import CancelFlag, PeerMetadata, ReadCancelled, RemoteAgent
from kvagent.fabric.nixl import NixlFabric
from kvagent.fabric.segments import LARGE, Segments, own_segments

pytest.importorskip("nixl")

MIB = 1 << 20
SIZE = 32 * MIB
BLOCK = 16384
BLOCKS = SIZE // BLOCK
LIMIT = 30.0
"""Seconds that only a hang can take."""

PEER = """
import asyncio, mmap, sys
import msgspec, numpy as np
from kvagent.core.regions import MemoryRange
from kvagent.fabric.nixl import NixlFabric

async def main(size):
    memory = np.frombuffer(mmap.mmap(-1, size), np.uint32)
    memory[:] = np.arange(size // 4, dtype=np.uint32)
    address = memory.ctypes.data
    fabric = NixlFabric("peer/0")
    await fabric.start()
    await fabric.register([MemoryRange(address, size)])
    sys.stdout.buffer.write(msgspec.json.encode((fabric.metadata, address)) + b"\\n")
    sys.stdout.flush()
    await asyncio.to_thread(sys.stdin.read)
    await fabric.close()

asyncio.run(main(int(sys.argv[1])))
"""


class Peer:
    """A process whose memory holds the numbers 0, 1, 2, ... as uint32."""

    def __init__(self, env: dict[str, str] | None = None) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", PEER, str(SIZE)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, **(env or {})},
        )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        self.meta, self.address = msgspec.json.decode(line, type=tuple[PeerMetadata, int])

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)
        if number == signal.SIGSTOP:
            os.waitid(os.P_PID, self.process.pid, os.WSTOPPED)

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture(scope="module")
def peers() -> Iterator[dict[str, Peer]]:
    """One process per transport, for the tests that leave it as it was."""
    started: dict[str, Peer] = {}
    try:
        started["shm"] = Peer()
        started["tcp"] = Peer({"UCX_TLS": "tcp"})
        yield started
    finally:
        for peer in started.values():
            peer.kill()


@pytest.fixture(params=["shm", "tcp"])
def transport(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "tcp":
        monkeypatch.setenv("UCX_TLS", "tcp")
    name: str = request.param
    return name


@pytest.fixture
def peer(peers: dict[str, Peer], transport: str) -> Peer:
    return peers[transport]


@pytest.fixture
def tcp_peer(peers: dict[str, Peer], monkeypatch: pytest.MonkeyPatch) -> Peer:
    monkeypatch.setenv("UCX_TLS", "tcp")
    return peers["tcp"]


@pytest.fixture
def victim() -> Iterator[Peer]:
    """A process of the test's own, on the transport of this one."""
    peer = Peer()
    try:
        yield peer
    finally:
        peer.kill()


@dataclass
class Selected:
    local_index: np.ndarray
    remote_index: np.ndarray
    extra: np.ndarray
    nbytes: int
    descriptors: int


def select(local: Any, remote: Any, extra: Any = (), size: int = BLOCK) -> Selected:
    rows = np.array(extra, np.uint64).reshape(-1, 3)
    nbytes = len(local) * size + int(rows[:, 2].sum())
    return Selected(
        np.asarray(local, np.int32),
        np.asarray(remote, np.int32),
        rows,
        nbytes,
        len(local) + len(rows),
    )


def everything() -> Selected:
    return select(np.arange(BLOCKS), np.arange(BLOCKS))


def rows(address: int, size: int = BLOCK, count: int = BLOCKS) -> np.ndarray:
    return np.array([[address, size, 0, size, count]], np.uint64)


class CancelAfter(CancelFlag):
    """Set by being looked at so many times: cancels between two pieces, without a race."""

    def __init__(self, looks: int) -> None:
        self.looks = looks

    @property
    def reason(self) -> str | None:  # type: ignore[override]
        self.looks -= 1
        return None if self.looks >= 0 else "enough"


class Reader:
    """A fabric with memory to read into, filled with ones."""

    def __init__(self, **settings: Any) -> None:
        self.memory = np.full(SIZE, 0xFF, np.uint8)
        self.address = self.memory.ctypes.data
        self.fabric = NixlFabric("reader/0", **settings)

    async def __aenter__(self) -> Reader:
        await self.fabric.start()
        await self.fabric.register([MemoryRange(self.address, SIZE)])
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.wait_for(self.fabric.close(), LIMIT)

    async def prepare(self, peer: Peer) -> tuple[RemoteAgent, Any]:
        remote = await asyncio.wait_for(self.fabric.connect(peer.meta), LIMIT)
        prepared = await self.fabric.prepare(remote, rows(self.address), rows(peer.address))
        return remote, prepared

    async def read(
        self, prepared: Any, selection: Selected, cancelled: CancelFlag | None = None
    ) -> Any:
        return await asyncio.wait_for(
            self.fabric.read(prepared, selection, cancelled or CancelFlag()), LIMIT
        )

    def words(self) -> np.ndarray:
        return self.memory.view(np.uint32)

    def blocks(self) -> np.ndarray:
        return self.words().reshape(BLOCKS, -1)


EXPECTED = np.arange(SIZE // 4, dtype=np.uint32)
UNTOUCHED = np.uint32(0xFFFFFFFF)


def run(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(test())


def test_bytes(peer: Peer) -> None:
    async def body() -> None:
        async with Reader(piece_bytes=MIB, inflight_bytes=4 * MIB) as reader:
            remote, prepared = await reader.prepare(peer)

            stats = await reader.read(prepared, everything())
            assert np.array_equal(reader.words(), EXPECTED)
            assert (stats.nbytes, stats.descriptors) == (SIZE, BLOCKS)

            order = np.random.default_rng(1).permutation(BLOCKS)
            reader.memory[:] = 0xFF
            await reader.read(prepared, select(np.arange(BLOCKS), order))
            assert np.array_equal(reader.blocks(), EXPECTED.reshape(BLOCKS, -1)[order])

            # A few blocks and odd bytes; everything else stays as it was.
            reader.memory[:] = 0xFF
            places = [(3 * BLOCK + 5, 77, 1001), (5 * BLOCK, 4 * MIB + 1, 3), (7, 9 * MIB, 4096)]
            odd = [(reader.address + a, peer.address + b, size) for a, b, size in places]
            await reader.read(prepared, select([9, 1], [2, 700], odd))
            want = np.full(SIZE, 0xFF, np.uint8)
            source = EXPECTED.view(np.uint8)
            want[9 * BLOCK : 10 * BLOCK] = source[2 * BLOCK : 3 * BLOCK]
            want[BLOCK : 2 * BLOCK] = source[700 * BLOCK : 701 * BLOCK]
            for here, there, size in places:
                want[here : here + size] = source[there : there + size]
            assert np.array_equal(reader.memory, want)

            await reader.read(prepared, select([], []))
            with pytest.raises(BlockRangeError):
                await reader.read(prepared, select([BLOCKS], [0]))
            outside = (reader.address, peer.address + SIZE, 8)
            with pytest.raises(FabricError, match="reading from peer/0"):
                await reader.read(prepared, select([], [], [outside]))
            await reader.read(prepared, select([0], [0]))

            await reader.fabric.release(prepared)
            with pytest.raises(FabricError, match="released"):
                await reader.read(prepared, select([0], [0]))
            await reader.fabric.disconnect(remote)
            with pytest.raises(FabricError, match="disconnected"):
                await reader.fabric.prepare(remote, rows(reader.address), rows(peer.address))

    run(body)


def test_rows_of_several_lengths(peer: Peer) -> None:
    async def body() -> None:
        async with Reader() as reader:
            remote = await reader.fabric.connect(peer.meta)
            # Descriptors 0..3 are of 4 KiB with gaps, then those of 64 bytes.
            local = [[reader.address, 4096, 0, 8192, 4], [reader.address + MIB, 64, 0, 64, 16]]
            far = [[peer.address, 4096, 0, 4096, 4], [peer.address + 2 * MIB, 64, 0, 128, 32]]
            prepared = await reader.fabric.prepare(
                remote, np.array(local, np.uint64), np.array(far, np.uint64)
            )
            picked = select([1, 4, 19], [3, 4, 35])
            await reader.read(prepared, picked)
            source = EXPECTED.view(np.uint8)
            assert np.array_equal(reader.memory[8192:12288], source[3 * 4096 : 4 * 4096])
            assert np.array_equal(reader.memory[MIB : MIB + 64], source[2 * MIB : 2 * MIB + 64])
            assert np.array_equal(
                reader.memory[MIB + 15 * 64 : MIB + 16 * 64],
                source[2 * MIB + 31 * 128 :][:64],
            )
            with pytest.raises(GeometryError, match="length"):
                await reader.read(prepared, select([0], [4]))

    run(body)


def test_many_reads_at_once(peer: Peer) -> None:
    async def body() -> None:
        async with Reader(piece_bytes=256 << 10, inflight_bytes=MIB) as reader:
            _, prepared = await reader.prepare(peer)
            order = np.random.default_rng(2).permutation(BLOCKS)
            parts = np.array_split(np.arange(BLOCKS), 32)
            await asyncio.gather(
                *(reader.read(prepared, select(part, order[part])) for part in parts)
            )
            assert np.array_equal(reader.blocks(), EXPECTED.reshape(BLOCKS, -1)[order])

    run(body)


def test_cancelled_in_the_middle(peer: Peer) -> None:
    async def body() -> None:
        async with Reader(piece_bytes=256 << 10, inflight_bytes=256 << 10) as reader:
            _, prepared = await reader.prepare(peer)
            with pytest.raises(ReadCancelled, match="enough"):
                await reader.read(prepared, everything(), CancelAfter(10))
            arrived = (reader.words() != UNTOUCHED).sum()
            assert 0 < arrived < len(EXPECTED)
            await asyncio.sleep(0.2)
            assert (reader.words() != UNTOUCHED).sum() == arrived
            # The peer is none the worse for it.
            await reader.read(prepared, everything())
            assert np.array_equal(reader.words(), EXPECTED)

    run(body)


def test_peer_killed_in_the_middle(peer: Peer, victim: Peer) -> None:
    async def body() -> None:
        async with Reader() as reader:
            remote, prepared = await reader.prepare(victim)

            async def read_on() -> None:
                while True:
                    await reader.read(prepared, everything())

            reading = asyncio.create_task(read_on())
            await asyncio.sleep(0.1)
            victim.process.kill()
            with pytest.raises(PeerGoneError, match="gone"):
                await asyncio.wait_for(reading, 5)
            with pytest.raises(PeerGoneError):
                await reader.read(prepared, select([0], [0]))
            await reader.fabric.disconnect(remote)
            with pytest.raises(PeerGoneError):
                await asyncio.wait_for(reader.fabric.connect(victim.meta), LIMIT)
            # Another peer is read as ever.
            _, prepared = await reader.prepare(peer)
            reader.memory[:] = 0xFF
            await reader.read(prepared, everything())
            assert np.array_equal(reader.words(), EXPECTED)

    run(body)


def test_handshakes_refused(tcp_peer: Peer) -> None:
    good = tcp_peer.meta

    async def body() -> None:
        async with Reader() as reader:
            damaged = msgspec.structs.replace(good, blob=good.blob[:-1] + b"\0")
            with pytest.raises(HandshakeError, match="digest"):
                await reader.fabric.connect(damaged)
            other = msgspec.structs.replace(good, options={**good.options, "nixl": "0.9"})
            with pytest.raises(HandshakeError, match=r"nixl is '.*' here and '0\.9' at peer/0"):
                await reader.fabric.connect(other)
            promised = msgspec.structs.replace(good, probe_digest=bytes(32))
            with pytest.raises(HandshakeError, match="probe"):
                await reader.fabric.connect(promised)
            renamed = msgspec.structs.replace(good, agent="somebody/0")
            with pytest.raises(HandshakeError, match="came as that of"):
                await reader.fabric.connect(renamed)
            remote = await reader.fabric.connect(good)
            with pytest.raises(FabricError, match="connected already"):
                await reader.fabric.connect(good)
            await reader.fabric.disconnect(remote)
            await reader.fabric.connect(good)

    run(body)


def segmented(send: str, receive: str) -> Peer:
    return Peer({"UCX_TLS": "tcp", "UCX_TCP_TX_SEG_SIZE": send, "UCX_TCP_RX_SEG_SIZE": receive})


def test_who_reads_takes_the_segments_of_its_peer(tcp_peer: Peer) -> None:
    """A mismatch would kill the peer in the middle of a large read (2 of 3 times)."""
    others = [segmented("8k", "64k"), segmented("1M", "1048576")]
    try:

        async def body() -> None:
            async with Reader(inflight_bytes=8 * MIB) as reader:
                for _ in range(2):
                    for peer in (tcp_peer, *others):
                        remote, prepared = await reader.prepare(peer)
                        reader.memory[:] = 0xFF
                        await reader.read(prepared, everything())
                        found = reader.memory.view(np.uint32)
                        assert np.array_equal(found, np.arange(SIZE // 4, dtype=np.uint32))
                        await reader.fabric.disconnect(remote)
                connected = [await reader.prepare(peer) for peer in (tcp_peer, *others)]
                reads = [reader.read(prepared, everything()) for _, prepared in connected]
                await asyncio.gather(*reads)
                await reader.fabric.fence()  # all of them are gone, and can be had again
                for peer in (tcp_peer, *others):
                    _, prepared = await reader.prepare(peer)
                    await reader.read(prepared, select([1], [0]))

        run(body)
        assert all(peer.process.poll() is None for peer in (tcp_peer, *others))
    finally:
        for peer in others:
            peer.kill()


def test_segments_from_the_environment_must_be_the_same(
    tcp_peer: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UCX_TCP_TX_SEG_SIZE", "64k")
    monkeypatch.setenv("UCX_TCP_RX_SEG_SIZE", "64k")
    alike = segmented("65536", "64K")
    try:

        async def body() -> None:
            async with Reader() as reader:
                with pytest.raises(
                    HandshakeError, match=r"are 262144 and 262144 .* 65536 and 65536"
                ):
                    await reader.fabric.connect(tcp_peer.meta)
                _, prepared = await reader.prepare(alike)
                await reader.read(prepared, everything())

        run(body)
    finally:
        alike.kill()


def test_peers_may_not_have_any_number_of_segment_sizes(tcp_peer: Peer) -> None:
    async def body() -> None:
        async with Reader() as reader:
            for size in range(3):
                odd = msgspec.structs.replace(
                    tcp_peer.meta, agent=f"nobody/{size}", segments=Segments(4096 << size, 65536)
                )
                with pytest.raises(HandshakeError, match="came as that of"):
                    await reader.fabric.connect(odd)
            odd = msgspec.structs.replace(odd, segments=Segments(100_000, 65536))
            with pytest.raises(HandshakeError, match="give all sidecars the same UCX_TCP_TX"):
                await reader.fabric.connect(odd)
            await reader.prepare(tcp_peer)

    run(body)


@pytest.mark.parametrize(
    ("environ", "found"),
    [
        ({}, LARGE),
        ({"UCX_TCP_RX_SEG_SIZE": "1mb"}, Segments(8192, 1 << 20)),
        ({"UCX_TCP_TX_SEG_SIZE": "32768", "UCX_TCP_RX_SEG_SIZE": "64K"}, Segments(32768, 65536)),
    ],
)
def test_own_segments(environ: dict[str, str], found: Segments) -> None:
    assert own_segments(environ) == found


@pytest.mark.parametrize("text", ["auto", "inf", "", "12", "1g", "-1k"])
def test_segments_that_are_no_sizes(text: str) -> None:
    with pytest.raises(ConfigError, match=r"UCX_TCP_TX_SEG_SIZE=.*: kvagent needs a size from 1k"):
        own_segments({"UCX_TCP_TX_SEG_SIZE": text})


@pytest.fixture
def tcp_victim(tcp_peer: Peer, victim: Peer) -> Peer:
    """Stopped by its test. (UCX aborts a process that wakes up and finds its readers gone, so it
    is of no further use.)"""
    return victim


def test_fence_ends_the_reads_of_a_stopped_peer(tcp_peer: Peer, tcp_victim: Peer) -> None:
    async def body() -> None:
        async with Reader(piece_bytes=MIB, inflight_bytes=8 * MIB) as reader:
            _, stuck = await reader.prepare(tcp_victim)
            _, prepared = await reader.prepare(tcp_peer)
            tcp_victim.signal(signal.SIGSTOP)
            flag = CancelFlag()
            reading = asyncio.create_task(reader.fabric.read(stuck, everything(), flag))
            await asyncio.sleep(0.1)
            flag.cancel("deadline")
            await reader.read(prepared, select([0], [0]))  # others are not held up
            await asyncio.sleep(0.2)
            assert not reading.done()  # cancelled, and in flight for ever

            await asyncio.wait_for(reader.fabric.fence(), LIMIT)
            with pytest.raises(ReadCancelled, match="deadline"):
                await reading
            reader.memory[:] = 0xAA
            tcp_victim.signal(signal.SIGCONT)
            await asyncio.sleep(0.5)
            assert (reader.memory == 0xAA).all()  # no late byte

            with pytest.raises(FabricError, match="fenced"):
                await reader.read(prepared, everything())
            _, prepared = await reader.prepare(tcp_peer)
            await reader.read(prepared, everything())
            assert np.array_equal(reader.words(), EXPECTED)

    run(body)


def test_close_ends_reads_too(tcp_victim: Peer) -> None:
    async def body() -> None:
        async with Reader() as reader:
            _, prepared = await reader.prepare(tcp_victim)
            tcp_victim.signal(signal.SIGSTOP)
            reading = asyncio.create_task(reader.fabric.read(prepared, everything(), CancelFlag()))
            await asyncio.sleep(0.1)
            await asyncio.wait_for(reader.fabric.close(), LIMIT)
            with pytest.raises(FabricError, match="closed"):
                await reading
            with pytest.raises(FabricError, match="not running"):
                await reader.fabric.fence()

    run(body)


def test_connecting_to_a_stopped_peer_can_be_given_up(tcp_peer: Peer) -> None:
    async def body() -> None:
        async with Reader() as reader:
            tcp_peer.signal(signal.SIGSTOP)
            try:
                with pytest.raises(asyncio.TimeoutError):
                    await asyncio.wait_for(reader.fabric.connect(tcp_peer.meta), 0.3)
                with pytest.raises(FabricError, match="connected already"):
                    await reader.fabric.connect(tcp_peer.meta)
            finally:
                tcp_peer.signal(signal.SIGCONT)
            deadline = time.monotonic() + LIMIT
            while True:  # until the probe that was given up has ended
                try:
                    await reader.prepare(tcp_peer)
                    return
                except FabricError:
                    assert time.monotonic() < deadline
                    await asyncio.sleep(0.02)

    run(body)


def test_nixl_is_imported_only_when_a_fabric_starts() -> None:
    code = (
        "import sys, kvagent.fabric.nixl, kvagent.fabric.loopback; assert 'nixl' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_no_agent_can_be_made_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    """As when a link is down: reads fail, others go on reading from us, and it heals by itself."""
    from kvagent.fabric import worker as module

    real = module.NixlAgent
    down: list[bool] = []

    def agent(name: str, **options: Any) -> Any:
        if down and name.endswith("/fetch"):
            raise FabricError("network device is not available")
        return real(name, **options)

    monkeypatch.setattr(module, "NixlAgent", agent)
    monkeypatch.setattr(module, "RETRY_SECONDS", 0.1)

    async def work() -> None:
        here, there = NixlFabric("here"), NixlFabric("there")
        await here.start()
        await there.start()
        try:
            await here.connect(there.metadata)
            down.append(True)
            await here.fence()
            while not here.trouble:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            with pytest.raises(FabricError, match="nothing can be read: network device"):
                await here.connect(there.metadata)
            down.clear()
            await there.connect(here.metadata)  # what we serve is not concerned
            while here.trouble:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            await here.connect(there.metadata)
        finally:
            await here.close()
            await there.close()
        assert here.trouble == "the fabric is not running"

    asyncio.run(asyncio.wait_for(work(), 60))
