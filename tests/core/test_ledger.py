"""The ledger of blocks, and which blocks a fetch writes."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import msgspec
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from rigs import full, layout, worker

from kvagent.core.ledger import BlockState, Holding, Ledger, written_blocks
from kvagent.core.plan import assign, make_plan
from kvagent.core.regions import CacheGroup, RankLayout
from kvagent.core.specs import CacheSpec, MambaSpec, TokenShard
from kvagent.errors import BlockInUseError

Ids = npt.NDArray[np.int32]


def ids(*numbers: int) -> Ids:
    return np.array(numbers, np.int32)


def group(index: int, num_blocks: int) -> CacheGroup:
    return CacheGroup(index=index, block_size=16, num_blocks=num_blocks)


@pytest.fixture
def ledger() -> Ledger:
    """Eight blocks of group 0 and four of group 1."""
    ledger = Ledger()
    ledger.know([group(0, 8), group(1, 4)])
    return ledger


def busy(ledger: Ledger) -> dict[str, int]:
    """Counts of all that is not free, and what is not zero."""
    return {k: n for k, n in ledger.counts().items() if n and k != "free"}


# ---------------------------------------------------------------- holdings


def test_every_block_is_counted_once_over_all_groups(ledger: Ledger) -> None:
    ledger.lend([ids(0, 1), ids(0)])
    ledger.reserve({0: ids(2), 1: ids(1, 2)})
    assert ledger.counts() == {
        "free": 6,
        "offered": 3,
        "claimed": 0,
        "reserved": 3,
        "in_flight": 0,
        "quarantined": 0,
    }


def test_shared_blocks_show_the_strongest_lease_until_the_last_ends(ledger: Ledger) -> None:
    first, second = ledger.lend([ids(0, 1, 2)]), ledger.lend([ids(1, 2, 3)])
    assert busy(ledger) == {"offered": 4}
    second.move(BlockState.CLAIMED)
    assert busy(ledger) == {"offered": 1, "claimed": 3}
    second.move(BlockState.FREE)
    assert busy(ledger) == {"offered": 3}
    first.move(BlockState.FREE)
    assert busy(ledger) == {}


def test_an_ended_holding_moves_no_more(ledger: Ledger) -> None:
    one = ledger.reserve({0: ids(1)})
    one.move(BlockState.QUARANTINED)
    one.move(BlockState.FREE)
    other = ledger.reserve({0: ids(1)})
    one.move(BlockState.FREE)
    one.move(BlockState.QUARANTINED)
    assert busy(ledger) == {"reserved": 1}
    other.move(BlockState.IN_FLIGHT)
    assert busy(ledger) == {"in_flight": 1}


def test_a_block_named_twice_is_held_once(ledger: Ledger) -> None:
    one = ledger.lend([ids(5, 5, 5)])
    assert busy(ledger) == {"offered": 1}
    one.move(BlockState.FREE)
    assert busy(ledger) == {}


@pytest.mark.parametrize("state", [BlockState.RESERVED, BlockState.IN_FLIGHT])
def test_what_is_written_is_neither_lent_nor_written_again(
    ledger: Ledger, state: BlockState
) -> None:
    ledger.reserve({1: ids(2)}).move(state)
    with pytest.raises(BlockInUseError, match=f"block 2 of group 1 is {state.value}"):
        ledger.lend([ids(0), ids(3, 2)])
    with pytest.raises(BlockInUseError, match=f"block 2 of group 1 is {state.value}"):
        ledger.reserve({0: ids(0), 1: ids(2)})
    assert busy(ledger) == {state.value: 1}, "the refused ones took nothing, of no group"


def test_what_is_lent_is_not_written(ledger: Ledger) -> None:
    lease = ledger.lend([ids(4)])
    with pytest.raises(BlockInUseError, match="block 4 of group 0 is offered"):
        ledger.reserve({0: ids(3, 4)})
    lease.move(BlockState.CLAIMED)
    with pytest.raises(BlockInUseError, match="block 4 of group 0 is claimed"):
        ledger.reserve({0: ids(3, 4)})
    lease.move(BlockState.FREE)
    ledger.reserve({0: ids(3, 4)})


def test_equal_numbers_of_two_groups_are_two_blocks(ledger: Ledger) -> None:
    ledger.reserve({0: ids(2)})
    ledger.lend([ids(), ids(2)])
    assert busy(ledger) == {"reserved": 1, "offered": 1}


def test_what_the_cache_does_not_have_is_not_its_business(ledger: Ledger) -> None:
    held = [
        ledger.lend([ids(-1, 8, 2**31 - 1, 7), ids(), ids(0)]),
        ledger.reserve({0: ids(-(2**31), 6), 9: ids(1)}),
    ]
    assert busy(ledger) == {"offered": 1, "reserved": 1}
    for one in held:
        one.move(BlockState.FREE)
    assert busy(ledger) == {}


def test_before_any_cache_is_known_all_is_allowed_and_nothing_counted() -> None:
    ledger = Ledger()
    one = ledger.reserve({0: ids(1)})
    ledger.reserve({0: ids(1)})
    ledger.lend([ids(1)])
    one.move(BlockState.QUARANTINED)
    assert set(ledger.counts().values()) == {0}


def test_a_group_that_is_described_again_keeps_its_blocks(ledger: Ledger) -> None:
    ledger.lend([ids(0)])
    ledger.know([group(0, 8), group(2, 3)])
    assert ledger.counts() | {"free": 14, "offered": 1} == ledger.counts()


def test_holdings_of_a_cache_that_is_no_more_end_without_a_trace(ledger: Ledger) -> None:
    lease, fetch = ledger.lend([ids(0)]), ledger.reserve({0: ids(1)})
    ledger.reset()
    ledger.know([group(0, 2)])
    both = ledger.reserve({0: ids(0, 1)})
    fetch.move(BlockState.QUARANTINED)
    fetch.move(BlockState.FREE)
    lease.move(BlockState.FREE)
    assert busy(ledger) == {"reserved": 2}
    both.move(BlockState.FREE)
    assert ledger.counts()["free"] == 2


# ---------------------------------------------------------------- any order

SIZES = {0: 6, 2: 4}
LENT = (BlockState.OFFERED, BlockState.CLAIMED)
RANKING = (
    BlockState.FREE,
    BlockState.OFFERED,
    BlockState.CLAIMED,
    BlockState.RESERVED,
    BlockState.IN_FLIGHT,
    BlockState.QUARANTINED,
)
some_ids = st.lists(st.integers(-2, 7), max_size=5)


@dataclass
class Held:
    holding: Holding
    blocks: set[tuple[int, int]]
    state: BlockState


class LedgerMachine(RuleBasedStateMachine):
    """Against the plainest of models: a list of who holds what."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger = Ledger()
        self.known: set[int] = set()
        self.held: list[Held] = []
        self.of_old_caches: list[Holding] = []

    def named(self, blocks: dict[int, list[int]]) -> set[tuple[int, int]]:
        return {
            (index, block)
            for index, numbers in blocks.items()
            if index in self.known
            for block in numbers
            if 0 <= block < SIZES[index]
        }

    def states(self) -> dict[tuple[int, int], BlockState]:
        states: dict[tuple[int, int], BlockState] = {}
        for one in self.held:
            for block in one.blocks:
                before = states.get(block, BlockState.FREE)
                states[block] = max(before, one.state, key=RANKING.index)
        return states

    def names_one_of(
        self, blocks: set[tuple[int, int]], refused: pytest.ExceptionInfo[BlockInUseError]
    ) -> bool:
        states = self.states()
        return any(
            f"block {block} of group {index} is {states[index, block].value}" in str(refused.value)
            for index, block in blocks
        )

    @rule(index=st.sampled_from(sorted(SIZES)))
    def know(self, index: int) -> None:
        self.ledger.know([group(index, SIZES[index])])
        self.known.add(index)

    @rule(lists=st.lists(some_ids, max_size=4))
    def lend(self, lists: list[list[int]]) -> None:
        wanted = self.named(dict(enumerate(lists)))
        states = self.states()
        written = {b for b in wanted if b in states and states[b] not in LENT}
        arrays = [ids(*numbers) for numbers in lists]
        if written:
            with pytest.raises(BlockInUseError) as refused:
                self.ledger.lend(arrays)
            assert self.names_one_of(written, refused)
            return
        holding = self.ledger.lend(arrays)
        self.held.append(Held(holding, wanted, BlockState.OFFERED))

    @rule(lists=st.dictionaries(st.integers(0, 3), some_ids, max_size=3))
    def reserve(self, lists: dict[int, list[int]]) -> None:
        wanted = self.named(lists)
        states = self.states()
        taken = wanted & states.keys()
        arrays = {index: ids(*numbers) for index, numbers in lists.items()}
        if taken:
            with pytest.raises(BlockInUseError) as refused:
                self.ledger.reserve(arrays)
            assert self.names_one_of(taken, refused)
            return
        holding = self.ledger.reserve(arrays)
        self.held.append(Held(holding, wanted, BlockState.RESERVED))

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def move(self, data: st.DataObject) -> None:
        one = data.draw(st.sampled_from(self.held))
        kinds = LENT if one.state in LENT else RANKING[3:]
        one.state = data.draw(st.sampled_from(kinds))
        one.holding.move(one.state)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        one = data.draw(st.sampled_from(self.held))
        one.holding.move(BlockState.FREE)
        one.holding.move(BlockState.FREE)
        self.held.remove(one)

    @rule(keep=st.booleans())
    def another_cache(self, keep: bool) -> None:
        self.ledger.reset()
        self.of_old_caches += [one.holding for one in self.held]
        self.held.clear()
        if keep:
            self.ledger.know(group(index, SIZES[index]) for index in self.known)
        else:
            self.known.clear()

    @precondition(lambda self: self.of_old_caches)
    @rule()
    def an_old_holding_ends(self) -> None:
        self.of_old_caches.pop().move(BlockState.FREE)

    @invariant()
    def counts_are_the_models(self) -> None:
        expected = Counter(state.value for state in self.states().values())
        expected["free"] = sum(SIZES[index] for index in self.known) - sum(expected.values())
        assert self.ledger.counts() == {state.value: expected[state.value] for state in BlockState}


TestLedgerInAnyOrder = LedgerMachine.TestCase


# ---------------------------------------------------------------- which blocks a fetch writes

TABLE = np.arange(10, 30, dtype=np.int32)


def written(local: RankLayout | list[RankLayout], start: int, stop: int) -> list[int]:
    layouts = local if isinstance(local, list) else [local]
    return list(written_blocks(layouts, [TABLE], start, stop).get(0, ()))


def test_whole_and_partial_blocks_of_the_tokens() -> None:
    local = layout(full())
    assert written(local, 0, 64) == [10, 11, 12, 13]
    assert written(local, 0, 65) == [10, 11, 12, 13, 14]
    assert written(local, 32, 64) == [12, 13], "a prefix hit is not written"
    assert written(local, 33, 64) == [12, 13], "the block that it ends in is"
    assert written(local, 47, 48) == [12]


def test_nothing_to_read_writes_nothing() -> None:
    assert written(layout(full()), 5, 5) == []
    assert written(layout(full()), 32, 32) == []


def test_a_block_list_that_is_too_short_is_the_plans_business() -> None:
    assert written_blocks([layout(full())], [ids(3)], 0, 64)[0].tolist() == [3]
    assert written_blocks([layout(full())], [], 0, 64) == {}


def test_blocks_of_kernel_blocks_count_by_their_ids() -> None:
    assert written(layout(full(kernel_block_size=4)), 20, 40) == [11, 12]


def test_a_split_context_puts_more_tokens_into_each_id() -> None:
    shards = [TokenShard(rank=rank, size=2, interleave=4) for rank in range(2)]
    ranks = [
        layout(full(tokens=shard, heads=(0, 4)), worker(rank, 2))
        for rank, shard in enumerate(shards)
    ]
    assert written(ranks, 0, 64) == [10, 11]
    assert written(ranks, 31, 33) == [10, 11]
    assert written(ranks, 32, 33) == [11]


def test_a_window_leaves_old_blocks_alone() -> None:
    local = layout(full(sliding_window=20))
    assert written(local, 0, 96) == [14, 15], "tokens 76 to 95"
    assert written(local, 90, 96) == [15]
    assert written(local, 0, 10) == [10]


def test_the_widest_window_counts_on_whatever_rank_it_is() -> None:
    narrow, wide = full(sliding_window=16), full(sliding_window=40)
    both = layout({"a": narrow, "b": wide})
    assert written(both, 0, 96) == [13, 14, 15]
    assert written(layout({"a": narrow, "b": full()}), 0, 96) == [10, 11, 12, 13, 14, 15]
    stages = [
        layout({"a": narrow}, worker(0, 1, 0, 2)),
        layout({"b": wide}, worker(0, 1, 1, 2)),
    ]
    assert written(stages, 0, 96) == written(stages[::-1], 0, 96) == [13, 14, 15]


def test_a_group_without_layers_writes_nothing() -> None:
    local = layout(full())
    empty = msgspec.structs.replace(local.groups[0], index=1)
    local = msgspec.structs.replace(local, groups=(*local.groups, empty))
    local.validate()
    found = written_blocks([local], [TABLE, TABLE], 0, 16)
    assert found[0].tolist() == [10]
    assert not len(found.get(1, ()))


def test_a_state_is_written_whole() -> None:
    state = MambaSpec(ssm_heads=4, ssm_shape=(2, 2), group=1)
    local = layout({"a": full(), "b": state})
    found = written_blocks([local], [TABLE, ids(7)], 40, 64)
    assert {index: one.tolist() for index, one in found.items()} == {0: [12, 13], 1: [7]}


windows = st.none() | st.integers(1, 40)


@st.composite
def engines(draw: st.DrawFn) -> tuple[list[RankLayout], RankLayout]:
    """The ranks of a consumer, and a producer of one rank that has all their layers."""
    stages = draw(
        st.lists(
            st.lists(st.tuples(st.integers(0, 1), windows), min_size=1, max_size=3),
            min_size=1,
            max_size=2,
        )
    )
    sizes = [draw(st.sampled_from([(4, 4), (8, 4), (16, 16), (16, 2)])) for _ in range(2)]
    far_sizes = [draw(st.sampled_from([4, 8, 16, 32])) for _ in range(2)]
    split = draw(st.sampled_from([1, 1, 2, 3]))
    interleave = draw(st.sampled_from([1, 2, 4]))
    assume(all(kernel % interleave == 0 for _, kernel in sizes))
    near: list[RankLayout] = []
    far: dict[str, CacheSpec] = {}
    for stage, layers in enumerate(stages):
        named = {f"{stage}.{i}": layer for i, layer in enumerate(layers)}
        for rank in range(split):
            shard = TokenShard(rank=rank, size=split, interleave=interleave)
            specs = {
                name: full(
                    block_size=sizes[index][0],
                    kernel_block_size=sizes[index][1],
                    group=index,
                    sliding_window=window,
                    heads=(0, 4),
                    tokens=shard if split > 1 else TokenShard(),
                )
                for name, (index, window) in named.items()
            }
            near.append(layout(specs, worker(rank, split, stage, len(stages)), 40))
        far |= {
            name: full(block_size=far_sizes[index], group=index, sliding_window=window)
            for name, (index, window) in named.items()
        }
    return near, layout(far, num_blocks=160, base=1 << 45)


@given(pair=engines(), data=st.data())
def test_they_are_exactly_those_that_the_plan_writes(
    pair: tuple[list[RankLayout], RankLayout], data: st.DataObject
) -> None:
    near, far = pair
    start = data.draw(st.integers(0, 150))
    stop = data.draw(st.integers(start, 150))
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    # Ids of a block list differ; a table of 150 tokens fits even blocks of 4.
    tables = [rng.permutation(40).astype(np.int32) for _ in range(2)]
    far_tables = [rng.permutation(160).astype(np.int32) for _ in range(2)]
    touched: dict[int, set[int]] = {}
    for local in near:
        for assignment in assign(local, [far]):
            plan = make_plan(local, far, assignment)
            for track, found in plan.locate(tables, far_tables, start, stop).items():
                physical = {*found.local_block.tolist(), *(p.local_block for p in found.partial)}
                blocks = {block // track.local.split for block in physical}
                touched.setdefault(track.local.group, set()).update(blocks)
    told = written_blocks(near, tables, start, stop)
    assert {i: set(one.tolist()) for i, one in told.items() if len(one)} == {
        i: blocks for i, blocks in touched.items() if blocks
    }
