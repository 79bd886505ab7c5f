"""The queue of reads, with a transport that does as it is told; and how reads are cut."""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvagent.core.stats import ReadStats
from kvagent.errors import BlockRangeError, FabricError, GeometryError, PeerGoneError
from kvagent.fabric.base import CancelFlag, ReadCancelled
from kvagent.fabric.pieces import NO_EXTRA, Piece, Rows, split
from kvagent.fabric.reads import Peer, Read, ReadQueue, UncertainError

NO_INDEX = np.empty(0, np.int32)


@dataclass
class Transport:
    """A `Poster` whose pieces stay in flight until they are `finished` or `broken`."""

    inflight: dict[int, str] = field(default_factory=dict)
    posted: list[str] = field(default_factory=list)
    pieces: list[Piece] = field(default_factory=list)
    finished: set[int] = field(default_factory=set)
    broken: dict[int, FabricError] = field(default_factory=dict)
    refuse: FabricError | None = None
    more: list[bool] = field(default_factory=list)
    withdrawn: int = 0
    waiting: set[int] = field(default_factory=set)
    """Not begun; they are when nothing else is to be done."""

    def post(self, lists: str, piece: Piece, more: bool) -> int:
        if self.refuse is not None:
            raise self.refuse
        handle = len(self.posted)
        self.more.append(more)
        self.posted.append(lists)
        self.pieces.append(piece)
        self.inflight[handle] = lists
        return handle

    def done(self, handle: int, peer: str, idle: bool) -> bool:
        if idle:
            self.waiting.discard(handle)
        if handle in self.broken:
            raise self.broken[handle]
        return handle in self.finished

    def withdraw(self, handle: int) -> bool:
        self.withdrawn += handle in self.waiting
        return handle in self.waiting

    def free(self, handle: int) -> None:
        del self.inflight[handle]


@dataclass
class Desk:
    """A queue with its transport, a clock that ticks when asked, and what became of its reads."""

    window: int = 100
    together: int = 0
    transport: Transport = field(default_factory=Transport)
    outcomes: dict[str, ReadStats | FabricError] = field(default_factory=dict)
    landed: dict[str, int] = field(default_factory=dict)
    now: float = 1.0

    def __post_init__(self) -> None:
        self.queue = ReadQueue(
            self.transport, self.window, lambda: self.now, together=self.together
        )

    def read(
        self, name: str, peer: Peer, pieces: int, size: int = 10, *, lists: str = ""
    ) -> CancelFlag:
        """`lists` are its own unless they are named."""
        flag = CancelFlag()
        self.landed[name] = 0

        def landed(nbytes: int) -> None:
            self.landed[name] += nbytes

        def resolve(outcome: ReadStats | FabricError) -> None:
            assert name not in self.outcomes
            assert name not in self.transport.inflight.values() or self.queue.uncertain
            self.outcomes[name] = outcome

        index = np.full(size, len(self.landed), np.int32)
        piece = Piece(size, index, -index, NO_EXTRA)
        self.queue.add(
            Read(
                peer=peer,
                pieces=deque([(lists or name, piece)] * pieces),
                nbytes=pieces * size,
                descriptors=pieces,
                cancelled=flag,
                submitted=0.5,
                resolve=resolve,
                landed=landed,
            )
        )
        return flag

    def steps(self) -> None:
        while self.queue.step():
            pass

    def finish_all(self) -> None:
        self.transport.finished |= set(range(1000))
        self.steps()


def test_reads_take_turns_under_the_window() -> None:
    desk, near, far = Desk(window=30), Peer("near"), Peer("far")
    desk.read("a", near, 4)
    desk.read("b", near, 2)
    desk.read("c", far, 1)
    desk.steps()
    assert desk.transport.posted == ["a", "b", "c", "a"]  # three pieces of 10 for `near`
    desk.transport.finished.add(0)
    desk.steps()
    assert desk.transport.posted == ["a", "b", "c", "a", "b"]
    assert not desk.outcomes
    desk.now = 3.0
    desk.finish_all()
    assert desk.outcomes["a"] == ReadStats(nbytes=40, descriptors=4, wait=0.5, wire=2.0)
    assert set(desk.outcomes) == {"a", "b", "c"}
    assert not desk.transport.inflight
    assert near.inflight == far.inflight == 0
    assert not desk.queue.reads


def test_small_pieces_of_the_same_lists_are_posted_together() -> None:
    desk, peer = Desk(together=40), Peer("p")
    for name in ("a", "b", "c", "d", "e"):
        desk.read(name, peer, 1, lists="lists")
    desk.read("other", peer, 1)
    desk.steps()
    assert desk.transport.posted == ["lists", "lists", "other"]
    first, second, _ = desk.transport.pieces
    assert first.nbytes == 40
    assert first.local_index.tolist() == [n for n in (1, 2, 3, 4) for _ in range(10)]
    assert (first.remote_index == -first.local_index).all()
    assert second.nbytes == 10
    assert peer.inflight == 60
    desk.transport.finished.add(0)
    desk.steps()
    assert set(desk.outcomes) == {"a", "b", "c", "d"}
    assert all(desk.landed[name] == (0 if name in ("e", "other") else 10) for name in desk.landed)
    assert peer.inflight == 20
    desk.finish_all()
    assert set(desk.outcomes) == {"a", "b", "c", "d", "e", "other"}
    assert peer.inflight == 0
    assert not desk.transport.inflight


def test_who_is_cancelled_is_not_taken_along() -> None:
    desk, peer = Desk(together=40), Peer("p")
    desk.read("a", peer, 1, lists="lists")
    flag = desk.read("b", peer, 1, lists="lists")
    desk.read("c", peer, 1, lists="lists")
    flag.cancel("enough")
    desk.steps()
    assert [piece.nbytes for piece in desk.transport.pieces] == [20]
    desk.finish_all()
    assert isinstance(desk.outcomes["b"], ReadCancelled)
    assert desk.landed == {"a": 10, "b": 0, "c": 10}


@pytest.mark.parametrize("posted", [False, True])
def test_those_posted_together_fail_together(posted: bool) -> None:
    desk, peer = Desk(together=40), Peer("p")
    error = PeerGoneError("p is gone")
    for name in ("a", "b"):
        desk.read(name, peer, 2, lists="lists")
    if posted:
        desk.queue.step()
        desk.transport.broken[0] = error
    else:
        desk.transport.refuse = error
    desk.finish_all()
    assert desk.outcomes == {"a": error, "b": error}
    assert peer.gone
    assert peer.inflight == 0
    assert not desk.queue.reads
    assert not desk.transport.inflight


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(1, 30), st.sampled_from("xy")), max_size=12),
    st.integers(0, 60),
    st.integers(10, 100),
    st.randoms(use_true_random=False),
)
def test_every_byte_is_posted_once_whatever_is_together(
    reads: list[tuple[int, int, str]], together: int, window: int, rng: random.Random
) -> None:
    desk, peer = Desk(window=window, together=together), Peer("p")
    for i, (pieces, size, lists) in enumerate(reads):
        desk.read(str(i), peer, pieces, size, lists=lists)
    while len(desk.outcomes) < len(reads):
        desk.steps()
        assert peer.inflight < window + max(together, 30)
        if desk.transport.inflight:
            desk.transport.finished.add(rng.choice(list(desk.transport.inflight)))
    posted = np.concatenate([NO_INDEX, *(piece.local_index for piece in desk.transport.pieces)])
    for i, (pieces, size, _) in enumerate(reads):
        assert np.count_nonzero(posted == i + 1) == desk.landed[str(i)] == pieces * size
        assert desk.outcomes[str(i)] == ReadStats(
            nbytes=pieces * size, descriptors=pieces, wait=0.5
        )
    assert peer.inflight == 0
    assert not desk.transport.inflight


def test_a_piece_larger_than_the_window_goes_alone() -> None:
    desk = Desk(window=30)
    desk.read("a", Peer("p"), 2, size=50)
    desk.steps()
    assert desk.transport.posted == ["a"]
    desk.finish_all()
    assert isinstance(desk.outcomes["a"], ReadStats)


def test_who_posts_knows_whether_another_piece_waits() -> None:
    desk, peer = Desk(), Peer("p")
    desk.read("a", peer, 2)
    desk.read("b", peer, 1)
    desk.steps()
    assert desk.transport.more == [True, True, False]


def test_more_may_be_posted_when_it_is_not_begun() -> None:
    desk, peer = Desk(window=20), Peer("p", waiting=20)
    desk.read("a", peer, 9)
    desk.steps()
    assert len(desk.transport.posted) == 4
    peer.waiting = 0
    desk.transport.finished |= {0, 1}
    desk.steps()
    assert len(desk.transport.posted) == 4
    desk.transport.finished.add(2)
    desk.steps()
    assert len(desk.transport.posted) == 5


def test_what_is_not_begun_is_begun_when_nothing_can_be_posted() -> None:
    """A piece of a peer whose window is full is none that can be posted."""
    desk, peer = Desk(window=10), Peer("p")
    desk.read("a", peer, 2)
    assert desk.queue.step()
    desk.transport.waiting = {0}
    assert not desk.queue.step()
    assert not desk.transport.waiting


def test_what_is_not_begun_of_a_read_that_failed_is_withdrawn() -> None:
    desk, peer = Desk(), Peer("p")
    flag = desk.read("a", peer, 3)
    desk.read("b", Peer("q"), 1)
    desk.steps()
    assert desk.transport.posted == ["a", "b", "a", "a"]
    desk.transport.waiting = {0, 2, 3}
    flag.cancel("enough")
    desk.steps()
    assert isinstance(desk.outcomes["a"], ReadCancelled)
    assert desk.transport.withdrawn == 3
    assert desk.landed["a"] == 0
    assert set(desk.transport.inflight.values()) == {"b"}
    assert peer.inflight == 0


def test_a_peer_that_is_gone_is_gone_whatever_its_other_pieces_say() -> None:
    """NIXL does not know it any more, and says so of pieces that were posted later."""
    desk, peer = Desk(), Peer("p")
    desk.read("a", peer, 1)
    desk.read("b", peer, 1)
    desk.steps()
    desk.transport.broken = {0: PeerGoneError("gone"), 1: FabricError("not found")}
    desk.steps()
    assert isinstance(desk.outcomes["a"], PeerGoneError)
    assert isinstance(desk.outcomes["b"], PeerGoneError)


def test_an_empty_read_succeeds() -> None:
    desk = Desk()
    desk.read("a", Peer("p"), 0)
    desk.steps()
    assert desk.outcomes["a"] == ReadStats(wait=0.5)


def test_cancel_waits_for_what_is_in_flight() -> None:
    desk = Desk(window=20)
    flag = desk.read("a", Peer("p"), 5)
    desk.steps()
    flag.cancel("too late")
    flag.cancel("another reason")
    desk.steps()
    assert not desk.outcomes
    desk.transport.finished.add(0)
    desk.steps()
    assert not desk.outcomes
    desk.finish_all()
    assert isinstance(desk.outcomes["a"], ReadCancelled)
    assert str(desk.outcomes["a"]) == "too late"
    assert len(desk.transport.posted) == 2


def test_the_first_failure_is_the_outcome() -> None:
    desk = Desk(window=20)
    flag = desk.read("a", Peer("p"), 5)
    desk.steps()
    desk.transport.broken[0] = FabricError("first")
    desk.steps()
    flag.cancel("second")
    desk.transport.broken[1] = FabricError("third")
    desk.steps()
    assert str(desk.outcomes["a"]) == "first"


def test_a_peer_that_is_gone_fails_its_reads_only() -> None:
    desk, dead, alive = Desk(window=10), Peer("dead"), Peer("alive")
    desk.read("a", dead, 2)
    desk.read("b", dead, 2)
    desk.read("c", alive, 1)
    desk.steps()
    desk.transport.broken[0] = PeerGoneError("dead is gone")
    desk.finish_all()
    assert isinstance(desk.outcomes["a"], PeerGoneError)
    assert isinstance(desk.outcomes["b"], PeerGoneError)
    assert isinstance(desk.outcomes["c"], ReadStats)
    assert desk.transport.posted == ["a", "c"]


def test_a_refused_post_is_a_failure() -> None:
    desk = Desk()
    desk.transport.refuse = FabricError("not registered")
    desk.read("a", Peer("p"), 2)
    desk.steps()
    assert str(desk.outcomes["a"]) == "not registered"


def test_an_uncertain_failure_resolves_only_by_abort() -> None:
    desk = Desk()
    desk.read("a", Peer("p"), 1)
    desk.read("b", Peer("q"), 1)
    desk.queue.step()
    desk.queue.step()
    desk.transport.broken[0] = UncertainError("who knows")
    desk.queue.step()
    assert desk.queue.uncertain is not None
    assert not desk.outcomes
    desk.queue.abort(FabricError("fenced"))
    assert {name: str(error) for name, error in desk.outcomes.items()} == {
        "a": "who knows",
        "b": "fenced",
    }
    assert not desk.queue.reads


def test_stop_ends_the_reads_of_a_peer() -> None:
    desk, peer = Desk(window=10), Peer("p")
    desk.read("a", peer, 3)
    desk.read("b", Peer("q"), 1)
    desk.steps()
    desk.queue.stop(peer, FabricError("disconnected"))
    assert desk.queue.busy(peer)
    desk.finish_all()
    assert str(desk.outcomes["a"]) == "disconnected"
    assert isinstance(desk.outcomes["b"], ReadStats)
    assert not desk.queue.busy(peer)


@given(st.data())
def test_every_read_is_resolved_once_and_only_when_it_is_terminal(data: st.DataObject) -> None:
    desk = Desk(window=data.draw(st.integers(1, 40), label="window"))
    peers = [Peer("p"), Peer("q")]
    flags = [
        desk.read(
            f"r{i}", peers[i % 2], data.draw(st.integers(0, 4)), data.draw(st.integers(1, 20))
        )
        for i in range(data.draw(st.integers(1, 5), label="reads"))
    ]
    for _ in range(data.draw(st.integers(0, 30), label="events")):
        event = data.draw(st.sampled_from(["step", "finish", "break", "gone", "cancel"]))
        pending = sorted(desk.transport.inflight)
        if event == "cancel":
            data.draw(st.sampled_from(flags)).cancel("asked")
        elif event == "step" or not pending:
            desk.queue.step()
        elif event == "finish":
            desk.transport.finished.add(data.draw(st.sampled_from(pending)))
        else:
            error = PeerGoneError("gone") if event == "gone" else FabricError("broken")
            desk.transport.broken[data.draw(st.sampled_from(pending))] = error
        for peer in peers:
            names = {f"r{i}" for i in range(len(flags)) if peers[i % 2] is peer}
            assert (peer.inflight > 0) == any(
                name in names for name in desk.transport.inflight.values()
            )
    desk.finish_all()  # `resolve` checks the rest
    assert len(desk.outcomes) == len(flags)


# ---------------------------------------------------------------- cutting


@dataclass
class Selected:
    local_index: np.ndarray
    remote_index: np.ndarray
    extra: np.ndarray
    nbytes: int = 0
    descriptors: int = 0


@st.composite
def sides(draw: st.DrawFn) -> tuple[Rows, Rows]:
    """Local and remote rows: the same lengths, other addresses, strides and counts."""
    lengths = draw(st.lists(st.integers(1, 50), min_size=1, max_size=4))

    def side() -> Rows:
        address, stride, count = st.integers(0, 1000), st.integers(0, 100), st.integers(1, 6)
        rows = [[draw(address), length, 0, draw(stride), draw(count)] for length in lengths]
        return Rows(np.array(rows, np.uint64))

    return side(), side()


def expanded(rows: Rows) -> list[tuple[int, int, int]]:
    """(row, address, length) of every descriptor, by the definition."""
    return [
        (i, int(address + k * stride), int(length))
        for i, (address, length, _, stride, count) in enumerate(rows.array.tolist())
        for k in range(count)
    ]


@given(sides(), st.data())
def test_pieces_are_the_selection_in_order(pair: tuple[Rows, Rows], data: st.DataObject) -> None:
    local, remote = pair
    here, there = expanded(local), expanded(remote)
    assert (local.count, remote.count) == (len(here), len(there))
    everything = np.arange(local.count, dtype=np.int32)
    assert local.addresses(everything).tolist() == [address for _, address, _ in here]
    assert local.lengths(everything).tolist() == [length for _, _, length in here]

    fitting = [
        (i, j)
        for i, (row, _, _) in enumerate(here)
        for j, (r, _, _) in enumerate(there)
        if r == row
    ]
    chosen = data.draw(st.lists(st.sampled_from(fitting), max_size=20))
    extra = data.draw(st.lists(st.tuples(*[st.integers(1, 90)] * 3), max_size=8))
    size = data.draw(st.integers(1, 120), label="piece_bytes")
    pieces = split(
        local,
        remote,
        Selected(
            np.array([i for i, _ in chosen], np.int32),
            np.array([j for _, j in chosen], np.int32),
            np.array(extra, np.uint64).reshape(-1, 3),
        ),
        size,
    )
    assert [i for p in pieces for i in p.local_index.tolist()] == [i for i, _ in chosen]
    assert [j for p in pieces for j in p.remote_index.tolist()] == [j for _, j in chosen]
    assert [tuple(row) for p in pieces for row in p.extra.tolist()] == extra
    for piece in pieces:
        lengths = [here[i][2] for i in piece.local_index] + [int(n) for n in piece.extra[:, 2]]
        assert piece.nbytes == sum(lengths) > 0
        assert not (len(piece.extra) and len(piece.local_index))
        assert piece.nbytes < size + max(lengths)


def test_what_does_not_fit_is_refused() -> None:
    rows = Rows(np.array([[0, 8, 0, 8, 4], [100, 16, 0, 16, 2]], np.uint64))

    def cut(local: list[int], remote: list[int]) -> list[Piece]:
        chosen = Selected(np.array(local, np.int32), np.array(remote, np.int32), NO_EXTRA)
        return split(rows, rows, chosen, 100)

    for bad in (-1, 6):
        with pytest.raises(BlockRangeError, match=f"{bad} of 6"):
            cut([0, bad], [0, 1])
        with pytest.raises(BlockRangeError, match="remote"):
            cut([0, 1], [0, bad])
    with pytest.raises(GeometryError, match="length"):
        cut([0], [4])
    with pytest.raises(GeometryError, match="1 local and 2 remote"):
        cut([0], [1, 2])
    with pytest.raises(GeometryError, match="N x 5"):
        Rows(np.zeros((1, 3), np.uint64))
    with pytest.raises(GeometryError, match="one device"):
        Rows(np.array([[0, 8, 0, 8, 4], [0, 8, 1, 8, 4]], np.uint64))
