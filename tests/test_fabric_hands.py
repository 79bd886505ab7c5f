"""The helper for copies: with agents that do as they are told, and with NIXL's."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import pytest

from kvagent.core.regions import MemoryRange
from kvagent.errors import FabricError, PeerGoneError
from kvagent.fabric.base import PeerMetadata
from kvagent.fabric.pieces import NO_EXTRA, Piece
from kvagent.fabric.place import read_place
from kvagent.fabric.reads import UncertainError

pytest.importorskip("nixl")

from kvagent.fabric.agent import NixlAgent, PreparedLists
from kvagent.fabric.hands import COPIED_BYTES, Hands, probe_row
from kvagent.fabric.segments import LARGE
from tests.test_fabric_nixl import BLOCKS, EXPECTED, Peer, Reader, everything, run, select
from tests.test_fabric_nixl import victim as victim

LARGE_PIECE = 2 << 20
ROOM = 4 << 20
PEER = "peer/0/serve"


@dataclass(eq=False)
class Agent:
    """In the place of a `NixlAgent`. A read ends when `open` is set."""

    role: str
    calls: list[str] = field(default_factory=list)
    threads: set[int] = field(default_factory=set)
    fails: dict[str, Exception] = field(default_factory=dict)
    open: threading.Event = field(default_factory=threading.Event)
    flying: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.open.set()

    def _called(self, name: str) -> None:
        self.calls.append(name)
        self.threads.add(threading.get_ident())
        if name in self.fails:
            raise self.fails[name]

    def register(self, ranges: list[MemoryRange]) -> None:
        self._called("register")

    def load(self, blob: bytes) -> str:
        self._called("load")
        return PEER

    def connect(self, name: str) -> None:
        self._called("connect")

    def forget(self, name: str) -> None:
        self._called("forget")

    def prepare(self, lists: PreparedLists) -> None:
        self._called("prepare")
        lists.local_handle = lists.remote_handle = 1

    def unprepare(self, lists: PreparedLists) -> None:
        self._called("unprepare")
        lists.local_handle = lists.remote_handle = 0

    def post(self, lists: PreparedLists, piece: Piece) -> int:
        self._called("post")
        self.flying.add(len(self.calls))
        return len(self.calls)

    def done(self, handle: int, peer: str) -> bool:
        self._called("done")
        return self.open.is_set()

    def free(self, handle: int) -> None:
        self.flying.remove(handle)

    def destroy(self) -> None:
        self._called("destroy")


class Pair:
    """Hands whose agents are ours. `unmade`: what making the helper's agent raises."""

    def __init__(self, unmade: Exception | None = None, **fails: Exception) -> None:
        self.first = Agent("fetch")
        self.second = Agent("copy", fails=dict(fails))
        self._unmade = unmade
        self.hands = Hands(cast(Callable[[str], NixlAgent], self._make), ROOM)

    def _make(self, role: str) -> Agent:
        if role == "fetch":
            return self.first
        if self._unmade is not None:
            raise self._unmade
        return self.second

    def meet(self, **kinds: Any) -> PreparedLists:
        """Lists of a peer that is copied from; the helper has done what it was asked for."""
        self.hands.meet(META)
        lists = PreparedLists(PEER, probe_row(0x1000), probe_row(0x2000), **kinds)
        self.hands.prepare(lists)
        self.settle()
        return lists

    def settle(self) -> None:
        helper = self.hands._helper
        assert helper is not None
        soon(lambda: helper.ready or helper.broken)

    @contextmanager
    def blocked(self) -> Iterator[None]:
        """The helper begins nothing meanwhile."""
        gate = threading.Event()
        helper = self.hands._helper
        assert helper is not None

        def wait(_: object) -> None:
            gate.wait()

        helper._todo.put(wait)
        yield
        gate.set()

    def post(self, lists: PreparedLists, nbytes: int = LARGE_PIECE, *, more: bool = True) -> int:
        index = np.zeros(1, np.int32)
        return self.hands.post(lists, Piece(nbytes, index, index, NO_EXTRA), more)


META = PeerMetadata(
    agent=PEER,
    blob=b"blob",
    digest=b"",
    probe_address=0x3000,
    probe_digest=b"",
    options={},
    segments=LARGE,
    place=read_place(),
)


def soon(happens: Callable[[], bool]) -> None:
    until = time.monotonic() + 10
    while not happens():
        assert time.monotonic() < until
        time.sleep(0.001)


def is_helpers(handle: int) -> bool:
    return handle < 0


@pytest.fixture
def pair() -> Iterator[Pair]:
    made = Pair()
    yield made
    made.hands.destroy()


def test_the_helper_copies_on_its_own_thread(pair: Pair) -> None:
    lists = pair.meet()
    handle = pair.post(lists)
    assert is_helpers(handle)
    soon(lambda: pair.hands.done(handle, PEER))
    pair.hands.free(handle)
    assert not pair.second.flying
    assert len(pair.second.threads) == 1
    assert threading.get_ident() not in pair.second.threads
    assert "post" not in pair.first.calls


def test_the_last_piece_and_small_ones_are_not_given_away(pair: Pair) -> None:
    lists = pair.meet()
    assert not is_helpers(pair.post(lists, more=False))
    assert not is_helpers(pair.post(lists, COPIED_BYTES - 1))
    assert is_helpers(pair.post(lists, COPIED_BYTES))


def test_the_helper_has_so_many_bytes_at_once_and_no_more(pair: Pair) -> None:
    lists = pair.meet()
    pair.second.open.clear()
    given = [pair.post(lists) for _ in range(3)]
    assert [is_helpers(handle) for handle in given] == [True, True, False]
    assert not is_helpers(pair.post(lists, ROOM + 1))
    pair.second.open.set()
    soon(lambda: pair.hands.done(given[0], PEER))
    pair.hands.free(given[0])
    assert is_helpers(pair.post(lists))


def test_what_the_helper_has_not_begun_is_taken_back_when_nothing_else_waits(pair: Pair) -> None:
    lists = pair.meet()
    pair.second.open.clear()
    begun, waiting = pair.post(lists), pair.post(lists)
    soon(lambda: pair.second.calls[-1] == "done")
    assert not pair.hands.done(waiting, PEER), "there may be another piece"
    pair.hands.free(last := pair.post(lists, more=False))
    assert not is_helpers(last)
    assert pair.hands.done(waiting, PEER)
    assert not pair.hands.done(begun, PEER)
    pair.hands.free(waiting)
    assert not pair.first.flying
    pair.second.open.set()
    soon(lambda: pair.hands.done(begun, PEER))
    pair.hands.free(begun)
    pair.hands.meet(META)
    pair.settle()
    assert pair.second.calls.count("post") == pair.first.calls.count("post") + 1 == 3, (
        "two first reads, and the one piece that it had begun"
    )


def test_what_cannot_be_taken_back_fails(pair: Pair) -> None:
    lists = pair.meet()
    pair.second.open.clear()
    handles = [pair.post(lists), pair.post(lists)]
    soon(lambda: pair.second.calls[-1] == "done")
    pair.post(lists, more=False)
    pair.first.fails["post"] = PeerGoneError("gone")
    with pytest.raises(PeerGoneError):
        pair.hands.done(handles[1], PEER)
    pair.hands.free(handles[1])
    assert len(pair.first.flying) == 1
    pair.second.open.set()


def test_no_helper_without_a_peer_to_copy_from(pair: Pair) -> None:
    lists = PreparedLists(PEER, probe_row(0x1000), probe_row(0x2000))
    pair.hands.prepare(lists)
    assert not is_helpers(pair.post(lists))
    assert not any(thread.name == "kvagent-copy" for thread in threading.enumerate())


@pytest.mark.parametrize("side", ["local_kind", "remote_kind"])
def test_gpu_memory_is_not_for_the_helper(pair: Pair, side: str) -> None:
    assert not is_helpers(pair.post(pair.meet(**{side: "vram"})))


def test_while_the_helper_does_chores_it_gets_no_pieces(pair: Pair) -> None:
    lists = pair.meet()
    pair.second.open.clear()
    pair.hands.meet(META)  # its first read does not end
    assert not is_helpers(pair.post(lists))
    pair.second.open.set()
    pair.settle()
    assert is_helpers(pair.post(lists))


@pytest.mark.parametrize("step", ["load", "connect", "prepare", "post", "done"])
def test_a_peer_that_the_helper_cannot_meet_is_read_without_it(step: str) -> None:
    pair = Pair(**{step: PeerGoneError("no")})
    lists = pair.meet()
    assert not is_helpers(pair.post(lists))
    assert not pair.second.flying
    pair.second.fails.clear()
    pair.hands.forget(PEER)
    lists = pair.meet()
    assert is_helpers(pair.post(lists)), "and another one with it"
    pair.hands.destroy()


def test_lists_that_the_helper_cannot_prepare_are_read_without_it(pair: Pair) -> None:
    lists = pair.meet()
    pair.second.fails["prepare"] = FabricError("no")
    others = PreparedLists(PEER, probe_row(0x1000), probe_row(0x2000))
    pair.hands.prepare(others)
    pair.settle()
    assert not is_helpers(pair.post(others))
    assert is_helpers(pair.post(lists))


@pytest.mark.parametrize("step", ["", "register"])
def test_without_a_helper_everything_is_read_by_the_first(
    step: str, caplog: pytest.LogCaptureFixture
) -> None:
    no = FabricError("no sockets left")
    pair = Pair(**{step: no}) if step else Pair(unmade=no)
    assert not is_helpers(pair.post(pair.meet()))
    assert "copied by one thread only: no sockets left" in caplog.text
    pair.hands.destroy()


@pytest.mark.parametrize("step", ["post", "done"])
@pytest.mark.parametrize("error", [PeerGoneError("gone"), UncertainError("what?")])
def test_what_fails_with_the_helper_fails_the_read(
    pair: Pair, step: str, error: FabricError
) -> None:
    lists = pair.meet()
    pair.second.fails[step] = error
    handle = pair.post(lists)
    with pytest.raises(type(error), match=str(error).replace("?", r"\?")):
        soon(lambda: pair.hands.done(handle, PEER))
    pair.hands.free(handle)
    pair.second.fails.clear()
    if isinstance(error, PeerGoneError):
        assert not pair.second.flying
        assert is_helpers(pair.post(lists))


def test_a_helper_that_ends_leaves_nobody_waiting(caplog: pytest.LogCaptureFixture) -> None:
    pair = Pair()
    lists = pair.meet()
    pair.second.fails["post"] = RuntimeError("a bug")
    with pair.blocked():
        begun, waiting = pair.post(lists), pair.post(lists)
    with pytest.raises(UncertainError, match="helper has ended"):
        soon(lambda: pair.hands.done(begun, PEER))
    assert pair.hands.done(waiting, PEER), "read by the first instead"
    assert pair.first.calls[-2:] == ["post", "done"]
    assert "a bug" in caplog.text
    assert not is_helpers(pair.post(lists))
    pair.hands.destroy()
    assert pair.second.calls[-1] == "destroy"


def test_destroyed_in_the_middle_of_a_read_that_does_not_end() -> None:
    pair = Pair()
    lists = pair.meet()
    pair.second.open.clear()
    handle = pair.post(lists)
    soon(lambda: pair.second.calls[-1] == "done")
    pair.hands.destroy()
    assert pair.first.calls[-1] == pair.second.calls[-1] == "destroy"
    assert handle in pair.hands._copies


def test_what_is_released_is_given_back_by_both(pair: Pair) -> None:
    lists = pair.meet()
    pair.hands.unprepare(lists)
    pair.hands.forget(PEER)
    pair.settle()
    assert pair.second.calls[-2:] == pair.first.calls[-2:] == ["unprepare", "forget"]
    assert not pair.hands._lists
    pair.hands.prepare(lists)
    pair.settle()
    assert pair.second.calls[-1] == "forget", "a peer that it does not know any more"


# ---------------------------------------------------------------- with NIXL


@pytest.fixture
def posts(monkeypatch: pytest.MonkeyPatch) -> dict[bool, int]:
    """How many pieces went to the helper, and how many did not."""
    counts = {True: 0, False: 0}
    post = Hands.post

    def counted(hands: Hands, lists: PreparedLists, piece: Piece, more: bool) -> int:
        handle = post(hands, lists, piece, more)
        counts[is_helpers(handle)] += 1
        return handle

    monkeypatch.setattr(Hands, "post", counted)
    return counts


SETTINGS = {"piece_bytes": 2 << 20, "inflight_bytes": 8 << 20}


def test_shared_reads_are_right(victim: Peer, posts: dict[bool, int]) -> None:
    async def body() -> None:
        async with Reader(**SETTINGS) as reader:
            _, prepared = await reader.prepare(victim)
            for seed in range(1000):
                order = np.random.default_rng(seed).permutation(BLOCKS)
                reader.memory[:] = 0xFF
                await reader.read(prepared, select(np.arange(BLOCKS), order))
                assert np.array_equal(reader.blocks(), EXPECTED.reshape(BLOCKS, -1)[order])
                if posts[True] > 20:
                    break
            assert posts[True] > 20, "the helper was never ready"
            assert posts[False] > 20

    run(body)


def test_over_tcp_there_is_no_helper(
    monkeypatch: pytest.MonkeyPatch, posts: dict[bool, int]
) -> None:
    monkeypatch.setenv("UCX_TLS", "tcp")
    peer = Peer()

    async def body() -> None:
        async with Reader(**SETTINGS) as reader:
            _, prepared = await reader.prepare(peer)
            for _ in range(20):
                await reader.read(prepared, everything())
                await asyncio.sleep(0.02)
            names = {thread.name for thread in threading.enumerate()}
            assert "kvagent-fabric" in names
            assert "kvagent-copy" not in names

    try:
        run(body)
    finally:
        peer.kill()
    assert not posts[True]
