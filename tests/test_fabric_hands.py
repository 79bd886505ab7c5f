"""The helper that copies: its copies, what becomes of those it cannot make, and whole reads."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, cast

import msgspec
import numpy as np
import pytest

from kvagent.errors import FabricError, PeerGoneError
from kvagent.fabric.base import CancelFlag, PeerMetadata, ReadCancelled
from kvagent.fabric.pieces import NO_EXTRA, Piece, Rows

pytest.importorskip("nixl")

from kvagent.fabric import hands as hands_module
from kvagent.fabric.agent import NixlAgent, PreparedLists
from kvagent.fabric.hands import COPIED_BYTES, Hands, Source
from tests.test_fabric_nixl import BLOCKS, EXPECTED, Peer, Reader, everything, run, select
from tests.test_fabric_nixl import victim as victim

PEER = "peer/0/serve"
COUNT, SIZE = 4096, 1024
NBYTES = COUNT * SIZE
ROOM = 2 * NBYTES
PROBE = os.urandom(4096)


@dataclass(eq=False)
class Memory:
    """Theirs and ours, both in this process: a process may read itself. Theirs is random."""

    theirs: np.ndarray = field(
        default_factory=lambda: np.frombuffer(os.urandom(NBYTES), np.uint8).reshape(COUNT, SIZE)
    )
    ours: np.ndarray = field(default_factory=lambda: np.zeros((COUNT, SIZE), np.uint8))
    probe: np.ndarray = field(default_factory=lambda: np.frombuffer(PROBE, np.uint8).copy())

    def source(self, **other: Any) -> Source:
        values = {"pid": os.getpid(), "probe_address": self.probe.ctypes.data, "probe": PROBE}
        return Source(**(values | other))

    def lists(self, **kinds: Any) -> PreparedLists:
        return PreparedLists(PEER, _rows(self.ours), _rows(self.theirs), **kinds)


def _rows(memory: np.ndarray) -> Rows:
    return Rows(np.array([[memory.ctypes.data, SIZE, 0, SIZE, COUNT]], np.uint64))


def piece(local: Any, remote: Any) -> Piece:
    return Piece(
        len(local) * SIZE, np.asarray(local, np.int32), np.asarray(remote, np.int32), NO_EXTRA
    )


ALL = piece(np.arange(COUNT), np.arange(COUNT))


@pytest.fixture
def memory() -> Memory:
    return Memory()


# ---------------------------------------------------------------- one copy


@pytest.mark.parametrize("count", [1, 7, 1023, 1024, COUNT])
def test_a_copy_by_index(memory: Memory, count: int) -> None:
    order = np.random.default_rng(count).permutation(COUNT)[:count]
    source = memory.source()
    assert source.copy(memory.lists(), piece(np.arange(count), order))
    assert np.array_equal(memory.ours[:count], memory.theirs[order])
    assert not memory.ours[count:].any()
    assert not source.refused


def test_another_process_of_that_number_is_noticed(memory: Memory) -> None:
    """Its memory is at the same addresses, and full of other things."""
    source = memory.source(probe=os.urandom(4096))
    assert not source.copy(memory.lists(), ALL)
    assert source.refused
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    source = memory.source(pid=child.pid)
    assert not source.copy(memory.lists(), ALL)
    child.communicate(b"\n")
    assert not source.copy(memory.lists(), ALL), "and that there is none"
    assert source.refused


def test_a_part_that_cannot_be_read_is_noticed(memory: Memory) -> None:
    lists = memory.lists()
    beyond = np.array([[memory.theirs.ctypes.data, SIZE, 0, 1 << 40, COUNT]], np.uint64)
    lists.remote = Rows(beyond)
    source = memory.source()
    assert not source.copy(lists, ALL)
    assert source.refused


# ---------------------------------------------------------------- who copies


class Agent:
    """In the place of a `NixlAgent`: notes what it is to read."""

    def __init__(self) -> None:
        self.posted: list[Piece] = []
        self.fails: Exception | None = None
        self.flying: set[int] = set()
        self.destroyed = False

    def post(self, lists: PreparedLists, piece: Piece) -> int:
        if self.fails is not None:
            raise self.fails
        self.posted.append(piece)
        self.flying.add(len(self.posted))
        return len(self.posted)

    def done(self, handle: int, peer: str) -> bool:
        return handle in self.flying

    def free(self, handle: int) -> None:
        self.flying.remove(handle)

    def destroy(self) -> None:
        self.destroyed = True
        if self.fails is not None:
            raise self.fails


class Gate(Source):
    """A source whose copies wait for `open`."""

    def __init__(self, source: Source) -> None:
        super().__init__(source.pid, source.probe_address, source.probe)
        self.open = threading.Event()
        self.begun = 0
        self.fails: Exception | None = None

    def copy(self, lists: PreparedLists, piece: Piece) -> bool:
        self.begun += 1
        assert self.open.wait(10)
        if self.fails is not None:
            raise self.fails
        return super().copy(lists, piece)


class Pair:
    """Hands with such an agent and such a source."""

    def __init__(self, memory: Memory) -> None:
        self.agent = Agent()
        self.hands = Hands(cast(NixlAgent, self.agent), ROOM)
        self.source = Gate(memory.source())
        self.hands.meet(PEER, self.source)
        self.lists = memory.lists()

    def post(self, piece: Piece = ALL, *, more: bool = True) -> int:
        return self.hands.post(self.lists, piece, more)

    def done(self, handle: int, *, idle: bool = False) -> bool:
        return self.hands.done(handle, PEER, idle)


@pytest.fixture
def pair(memory: Memory) -> Iterator[Pair]:
    pair = Pair(memory)
    yield pair
    pair.source.open.set()
    pair.agent.fails = None
    pair.hands.destroy()
    assert not helpers()


def helpers() -> int:
    return sum(thread.name == "kvagent-copy" for thread in threading.enumerate())


def is_helpers(handle: int) -> bool:
    return handle < 0


def soon(happens: Callable[[], bool]) -> None:
    until = time.monotonic() + 10
    while not happens():
        assert time.monotonic() < until
        time.sleep(0.001)


def test_the_helper_copies(pair: Pair, memory: Memory) -> None:
    handle = pair.post()
    assert is_helpers(handle)
    assert not pair.done(handle)
    pair.source.open.set()
    soon(lambda: pair.done(handle))
    pair.hands.free(handle)
    assert np.array_equal(memory.ours, memory.theirs)
    assert not pair.agent.posted


def test_the_last_piece_and_small_ones_are_the_agents(pair: Pair) -> None:
    count = COPIED_BYTES // SIZE
    assert not is_helpers(pair.post(more=False))
    assert not is_helpers(pair.post(piece(range(count - 1), range(count - 1))))
    assert not helpers()
    assert is_helpers(pair.post(piece(range(count), range(count))))


def test_so_many_bytes_wait_and_no_more(pair: Pair) -> None:
    handles = [pair.post() for _ in range(3)]
    assert [is_helpers(handle) for handle in handles] == [True, True, False]
    pair.source.open.set()
    soon(lambda: pair.done(handles[0]))
    pair.hands.free(handles[0])
    assert is_helpers(pair.post())


@pytest.mark.parametrize("side", ["local_kind", "remote_kind"])
def test_gpu_memory_is_the_agents(pair: Pair, memory: Memory, side: str) -> None:
    pair.lists = memory.lists(**{side: "vram"})
    assert not is_helpers(pair.post())


def test_what_is_given_by_address_is_the_agents(pair: Pair, memory: Memory) -> None:
    """Only NIXL knows whether these addresses are registered."""
    none = np.empty(0, np.int32)
    extra = np.array([[memory.ours.ctypes.data, memory.theirs.ctypes.data, NBYTES]], np.uint64)
    assert not is_helpers(pair.post(Piece(NBYTES, none, none, extra)))


def test_a_peer_that_is_not_met_or_is_forgotten_is_the_agents(pair: Pair) -> None:
    pair.hands.forget(PEER)
    pair.hands.forget("another")
    assert not is_helpers(pair.post())


def test_what_cannot_be_copied_is_left_to_the_agent(pair: Pair) -> None:
    pair.source.probe = bytes(4096)
    pair.source.open.set()
    handle = pair.post()
    soon(lambda: pair.done(handle))
    assert pair.agent.posted == [ALL]
    pair.hands.free(handle)
    assert not pair.agent.flying
    assert not is_helpers(pair.post()), "there is no second try"


def test_what_is_wrong_is_what_the_agent_says(pair: Pair) -> None:
    pair.source.probe = bytes(4096)
    handle = pair.post()
    pair.agent.fails = PeerGoneError("gone")
    pair.source.open.set()
    with pytest.raises(PeerGoneError):
        soon(lambda: pair.done(handle))
    pair.hands.free(handle)


def test_a_bug_in_a_copy_is_logged_and_survived(
    pair: Pair, caplog: pytest.LogCaptureFixture
) -> None:
    pair.source.fails = ValueError("a bug")
    pair.source.open.set()
    handles = [pair.post(), pair.post()]
    for handle in handles:
        soon(lambda handle=handle: pair.done(handle))  # type: ignore[misc]
    assert pair.agent.posted == [ALL, ALL]
    assert "a bug" in caplog.text


def test_what_is_not_begun_is_taken_back_when_there_is_nothing_else_to_do(pair: Pair) -> None:
    begun, waiting = pair.post(), pair.post()
    soon(lambda: pair.source.begun == 1)
    assert not pair.done(waiting)
    assert pair.done(waiting, idle=True)
    assert not pair.done(begun, idle=True)
    pair.hands.free(waiting)
    assert pair.agent.posted == [ALL]
    pair.source.open.set()
    soon(lambda: pair.done(begun))
    third = pair.post()
    soon(lambda: pair.done(third))
    assert pair.source.begun == 2


def test_what_is_not_begun_can_be_withdrawn(pair: Pair) -> None:
    begun, waiting = pair.post(), pair.post()
    mine = pair.post(more=False)
    soon(lambda: pair.source.begun == 1)
    assert [pair.hands.withdraw(handle) for handle in (begun, waiting, mine)] == [
        False,
        True,
        False,
    ]
    pair.hands.free(waiting)
    pair.source.open.set()
    soon(lambda: pair.done(begun))
    third = pair.post()
    soon(lambda: pair.done(third))
    assert pair.source.begun == 2


def test_what_the_helper_gave_up_can_be_withdrawn(pair: Pair) -> None:
    pair.source.probe = bytes(4096)
    handle = pair.post()
    soon(lambda: pair.source.begun == 1)
    assert not pair.hands.withdraw(handle)
    pair.source.open.set()
    soon(lambda: pair.hands.withdraw(handle))
    pair.hands.free(handle)
    assert not pair.agent.posted


def test_without_a_thread_everything_is_the_agents(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(hands_module.threading.Thread, "start", start)
        handle = pair.post()
    assert pair.done(handle)
    assert pair.agent.posted == [ALL]
    assert not is_helpers(pair.post())
    assert "copied by one thread only: can't start" in caplog.text


def test_destroyed_means_that_nothing_is_written_any_more(pair: Pair, memory: Memory) -> None:
    pair.post()
    pair.post()
    soon(lambda: pair.source.begun == 1)
    threading.Timer(0.05, pair.source.open.set).start()
    pair.agent.fails = RuntimeError("held")
    with pytest.raises(RuntimeError, match="held"):
        pair.hands.destroy()
    assert pair.source.open.is_set()
    assert not helpers(), "also when the agent is still there"
    memory.ours[:] = 0
    time.sleep(0.02)
    assert not memory.ours.any()
    assert pair.source.begun == 1, "what was not begun is not begun after the end"


# ---------------------------------------------------------------- whole reads

SETTINGS = {"piece_bytes": 2 << 20, "inflight_bytes": 8 << 20}


@pytest.fixture
def copied(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """How each copy of the helper ended."""
    ends: list[bool] = []
    copy = Source.copy

    def counted(source: Source, lists: PreparedLists, piece: Piece) -> bool:
        ends.append(copy(source, lists, piece))
        return ends[-1]

    monkeypatch.setattr(Source, "copy", counted)
    return ends


def test_reads_with_a_helper_are_right(victim: Peer, copied: list[bool]) -> None:
    async def body() -> None:
        async with Reader(**SETTINGS) as reader:
            _, prepared = await reader.prepare(victim)
            for seed in range(20):
                order = np.random.default_rng(seed).permutation(BLOCKS)
                reader.memory[:] = 0xFF
                await reader.read(prepared, select(np.arange(BLOCKS), order))
                assert np.array_equal(reader.blocks(), EXPECTED.reshape(BLOCKS, -1)[order])

    run(body)
    assert len(copied) >= 20
    assert all(copied)


@pytest.mark.parametrize("how", ["cancel", "fence", "close"])
def test_a_read_that_ends_in_the_middle_of_a_copy_has_ended(
    victim: Peer, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """The helper is slow: its copies begin late, and the end waits for the one that it has."""
    begun, copy = threading.Event(), Source.copy

    def late(source: Source, lists: PreparedLists, piece: Piece) -> bool:
        begun.set()
        time.sleep(0.05)
        return copy(source, lists, piece)

    monkeypatch.setattr(Source, "copy", late)

    async def body() -> None:
        async with Reader(**SETTINGS) as reader:
            _, prepared = await reader.prepare(victim)
            flag = CancelFlag()
            reading = asyncio.create_task(reader.read(prepared, everything(), flag))
            await asyncio.to_thread(begun.wait, 10)
            match how:
                case "cancel":
                    flag.cancel("enough")
                case "fence":
                    await reader.fabric.fence()
                case "close":
                    await reader.fabric.close()
            with pytest.raises(ReadCancelled if how == "cancel" else FabricError):
                await reading
            before = reader.memory.copy()
            await asyncio.sleep(0.2)
            assert np.array_equal(reader.memory, before)
            assert begun.is_set()

    run(body)


@pytest.mark.parametrize("change", [{"pid": 0}, {"place": None}, {"namespace": "pid:[1]"}])
def test_a_process_whose_number_means_nothing_here_is_read_by_nixl(
    victim: Peer, copied: list[bool], change: dict[str, Any]
) -> None:
    meta: PeerMetadata = victim.meta
    if "namespace" in change:
        assert meta.place is not None
        place = msgspec.structs.replace(meta.place, pid_namespace=change["namespace"])
        change = {"place": place}
    victim.meta = msgspec.structs.replace(meta, **change)

    async def body() -> None:
        async with Reader(**SETTINGS) as reader:
            _, prepared = await reader.prepare(victim)
            await reader.read(prepared, everything())
            assert np.array_equal(reader.words(), EXPECTED)

    run(body)
    assert not copied


def test_another_process_in_the_place_of_the_peer(victim: Peer, copied: list[bool]) -> None:
    """Here the number is wrong from the beginning; it could also be given to another later."""
    victim.meta = msgspec.structs.replace(victim.meta, pid=os.getpid())

    async def body() -> None:
        async with Reader(**SETTINGS) as reader:
            _, prepared = await reader.prepare(victim)
            for _ in range(3):
                reader.memory[:] = 0xFF
                await reader.read(prepared, everything())
                assert np.array_equal(reader.words(), EXPECTED)

    run(body)
    assert copied == [False]


def test_over_tcp_there_is_no_helper(monkeypatch: pytest.MonkeyPatch, copied: list[bool]) -> None:
    monkeypatch.setenv("UCX_TLS", "tcp")
    peer = Peer()

    async def body() -> None:
        async with Reader(**SETTINGS) as reader:
            _, prepared = await reader.prepare(peer)
            for _ in range(5):
                await reader.read(prepared, everything())
            assert not helpers()

    try:
        run(body)
    finally:
        peer.kill()
    assert not copied
