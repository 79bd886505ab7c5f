"""Plans: how few descriptors, which block ids are refused, and what the extremes do."""

from __future__ import annotations

import itertools
import time
from typing import Any

import msgspec
import numpy as np
import pytest
from oracle import merged_count, transfers
from rigs import BLOCKS_FIRST, HND, NHD, engine, full, layout, worker

from kvagent.core import plan as plan_module
from kvagent.core import rows as rows_module
from kvagent.core.layout import MemoryRange, RankLayout, TensorView, build_layout
from kvagent.core.plan import ReadPlan, Selection, assign, make_plan
from kvagent.core.runs import Dim, box_runs
from kvagent.core.specs import CacheSpec, MambaSpec, MLASpec, ScaleSpec, TokenShard
from kvagent.errors import BlockRangeError, UnsupportedGeometry

BASE = 2 << 40


def table(*ids: int) -> list[np.ndarray]:
    return [np.array(ids, dtype=np.int32)]


def plan_for(ours: CacheSpec, theirs: CacheSpec, num_blocks: int = 64) -> ReadPlan:
    local, remote = layout(ours, None, num_blocks), layout(theirs, None, num_blocks, BASE)
    (assignment,) = assign(local, [remote])
    return make_plan(local, remote, assignment)


def select(plan: ReadPlan, local: Any, remote: Any, start: int, stop: int) -> Selection:
    selection = plan.select(
        [np.asarray(local, dtype=np.int32)], [np.asarray(remote, dtype=np.int32)], start, stop
    )
    assert selection.descriptors == merged_count(plan, selection)
    moved = transfers(plan, selection)
    assert selection.nbytes == sum(length for _, _, length in moved)
    assert selection.local_index.dtype == selection.remote_index.dtype == np.int32
    return selection


def coalesced(plan: ReadPlan, selection: Selection) -> int:
    """The fewest runs that these bytes could be moved in."""
    moved = sorted(transfers(plan, selection))
    return 1 + sum((a[0] + a[2], a[1] + a[2]) != (b[0], b[1]) for a, b in itertools.pairwise(moved))


# ---------------------------------------------------------------- counts

FRAGMENTS = {
    "contiguous": (list(range(32)), 1),
    "half": ([i + i // 2 for i in range(32)], 16),  # pairs of neighbours with holes between
    "full": ([i * 2 for i in range(31)] + [63], 32),
}


@pytest.mark.parametrize("kind", FRAGMENTS)
@pytest.mark.parametrize(("axes", "regions"), [(NHD, 2), (HND, 2), (BLOCKS_FIRST, 1)])
def test_runs_after_merging(kind: str, axes: tuple[str, ...], regions: int) -> None:
    blocks, runs = FRAGMENTS[kind]
    plan = plan_for(full(axes=axes), full(axes=axes))
    selection = select(plan, range(10, 42), blocks, 0, 32 * 16)
    assert selection.descriptors == regions * runs == coalesced(plan, selection)
    assert len(plan.local_rows) == len(plan.remote_rows) == regions
    # The order of the lists does not matter, only what lies back to back on both sides.
    shuffled = np.random.default_rng(0).permutation(32)
    again = select(plan, np.arange(10, 42)[shuffled], np.array(blocks)[shuffled], 0, 32 * 16)
    assert again.descriptors == selection.descriptors


def test_adjacent_layers_and_parts_are_one_run() -> None:
    """One cross-layer tensor on both sides: a block of all layers is one run."""
    specs: dict[str, CacheSpec] = {f"layer.{i}": full(axes=BLOCKS_FIRST) for i in range(5)}
    page = 2 * 16 * 4 * 8 * 2
    views = {
        name: TensorView(0, i * page, (64, 2, 16, 4, 8), (5 * page, page // 2, 64, 16, 2))
        for i, name in enumerate(specs)
    }
    sides = [
        build_layout(specs, worker(), views, (MemoryRange(base, 64 * 5 * page),), 64)
        for base in (1 << 40, BASE)
    ]
    (assignment,) = assign(sides[0], sides[1:])
    plan = make_plan(*sides, assignment)
    assert len(plan.local_rows) == 1
    assert plan.shortest_run == plan.longest_run == 5 * page
    assert select(plan, [1, 2, 3, 9], [5, 6, 7, 8], 0, 64).descriptors == 2
    # The end of the last block: 3 tokens of K and V of five layers.
    assert len(select(plan, [1, 2, 3, 9], [5, 6, 7, 8], 0, 51).extra) == 10


@pytest.mark.parametrize("axes", [NHD, BLOCKS_FIRST])
def test_block_sizes_that_do_not_divide(axes: tuple[str, ...]) -> None:
    plan = plan_for(full(axes=axes, block_size=48), full(axes=axes, block_size=32))
    assert len(plan.local_rows) == len(plan.remote_rows) == 2
    selection = select(plan, [0, 1], [0, 1, 2], 0, 96)
    # K/V first: all contiguous. Blocks first: cut where either side's block ends.
    assert selection.descriptors == (2 if axes == NHD else 2 * 4) == coalesced(plan, selection)


def test_unequal_tensor_parallel_sizes_cut_each_token() -> None:
    remotes = engine(full(), 2, 64)
    local = layout(full(), None, 64)
    for assignment in assign(local, remotes):
        plan = make_plan(local, remotes[assignment.remote], assignment)
        assert plan.longest_run == 2 * 8 * 2
        assert select(plan, [3], [4], 0, 16).descriptors == 2 * 16
    remotes = engine(full(axes=HND), 2, 64)
    for assignment in assign(layout(full(axes=HND), None, 64), remotes):
        plan = make_plan(layout(full(axes=HND), None, 64), remotes[assignment.remote], assignment)
        assert select(plan, [3], [4], 0, 16).descriptors == 2


def test_ends_of_the_tokens_are_exact() -> None:
    plan = plan_for(full(), full())
    token = 4 * 8 * 2
    for start, stop in [(0, 1), (3, 9), (15, 17), (5, 37), (16, 48), (31, 32), (7, 7)]:
        selection = select(plan, [7, 3, 5], [0, 1, 2], start, stop)
        assert selection.nbytes == 2 * token * (stop - start)
        ragged = len({t // 16 for t in (start, stop) if t % 16} & set(range(4)))
        assert len(selection.extra) == (2 * ragged if start < stop else 0)


def test_long_contexts_are_fast() -> None:
    """80 layers, 128k tokens: milliseconds. The bound here only catches loops in Python."""
    specs: dict[str, CacheSpec] = {f"layer.{i}": full() for i in range(80)}
    local, remote = layout(specs, None, 8192), layout(specs, None, 8192, BASE)
    (assignment,) = assign(local, [remote])
    plan = make_plan(local, remote, assignment)
    tables = [[np.random.default_rng(i).permutation(8192).astype(np.int32)] for i in (0, 1)]
    began = time.perf_counter()
    selection = plan.select(tables[0], tables[1], 0, 8192 * 16)
    assert time.perf_counter() - began < 2
    assert len(selection.local_index) == 80 * 2 * 8192


# ---------------------------------------------------------------- block ids


@pytest.mark.parametrize(
    ("local", "remote", "tokens", "message"),
    [
        ([1, 2], [3, 4, 5], 33, "3 local blocks of 16 tokens are needed, 2 are given"),
        ([1, 2, 3], [3, 4], 33, "3 remote blocks of 16 tokens are needed, 2 are given"),
        ([1, 64], [3, 4], 32, "local block id 64 is outside the cache of 64 blocks"),
        ([1, 2], [-1, 4], 32, "remote block id -1 is outside the cache of 64 blocks"),
        ([1, 1], [3, 4], 32, "local block id 1 is in the list twice"),
        ([1, 2], [4, 4], 32, "remote block id 4 is in the list twice"),
    ],
)
def test_block_lists_that_do_not_fit(
    local: list[int], remote: list[int], tokens: int, message: str
) -> None:
    with pytest.raises(BlockRangeError, match=message):
        plan_for(full(), full()).select(table(*local), table(*remote), 0, tokens)


def test_longer_lists_are_fine() -> None:
    plan = plan_for(full(), full())
    exact = select(plan, [1, 2], [3, 4], 0, 32)
    for local, remote in ([1, 2, 9], [3, 4]), ([1, 2], [3, 4, 63, 62]):
        longer = select(plan, local, remote, 0, 32)
        assert (longer.local_index == exact.local_index).all()
        assert (longer.remote_index == exact.remote_index).all()


def test_token_ranges_and_missing_groups() -> None:
    plan = plan_for(full(), full())
    for start, stop in [(-1, 4), (5, 4)]:
        with pytest.raises(BlockRangeError, match="are not a range"):
            plan.select(table(1), table(2), start, stop)
    with pytest.raises(BlockRangeError, match="no remote block list for group 0"):
        plan.select(table(1), [], 0, 4)


def test_kernel_blocks_are_addressed_by_logical_ids() -> None:
    plan = plan_for(full(axes=HND, kernel_block_size=4), full(axes=HND, block_size=4))
    selection = select(plan, [5], [1, 2, 3, 0], 0, 16)
    page = 4 * 4 * 8 * 2
    k = sorted(transfers(plan, selection))[:4]
    assert [(a - (1 << 40)) // page for a, _, _ in k] == [20, 21, 22, 23]
    assert [(b - BASE) // page for _, b, _ in k] == [1, 2, 3, 0]
    with pytest.raises(BlockRangeError, match="local block id 64 is outside the cache of 64"):
        plan.select(table(64), table(1, 2, 3, 0), 0, 16)


# ---------------------------------------------------------------- kinds


def test_sliding_windows_read_their_blocks_only() -> None:
    plan = plan_for(full(sliding_window=20), full(sliding_window=20))
    gone = [-1, 1 << 30, 0, 0]
    # Tokens 80 to 99 are inside the window; token 80 begins a block.
    selection = select(plan, [*gone, 0, 4, 5], [*gone, 0, 6, 7], 0, 100)
    assert selection.nbytes == 2 * 20 * 64
    # A block that the window cuts is read whole, but nothing before `start_token`.
    assert select(plan, [1, 2, 3], [1, 2, 3], 0, 47).nbytes == 2 * (47 - 16) * 64
    assert select(plan, [1, 2, 3], [1, 2, 3], 30, 47).nbytes == 2 * (47 - 30) * 64


def test_states_take_one_block_whatever_the_tokens() -> None:
    spec = MambaSpec(ssm_heads=4, ssm_shape=(2, 3))
    plan = plan_for(spec, spec)
    for start, stop in [(0, 1), (5, 1000)]:
        assert select(plan, [3], [9], start, stop).nbytes == 4 * 6 * 4
    assert select(plan, [3], [9], 7, 7).nbytes == 0
    for local, remote in (table(), table(1)), (table(1), table(1, 2)):
        with pytest.raises(BlockRangeError, match="exactly one"):
            plan.select(local, remote, 0, 1)


def test_per_block_scales_begin_at_a_block() -> None:
    spec = full(scales=ScaleSpec(axes=("kv", "block", "head")))
    plan = plan_for(spec, spec)
    assert select(plan, [1, 2], [3, 4], 16, 20).nbytes == 2 * (4 * 64 + 4 * 4)
    with pytest.raises(UnsupportedGeometry, match="not from token 5"):
        plan.select(table(1, 2), table(3, 4), 5, 20)


def test_split_contexts_share_their_tokens_out() -> None:
    remotes = [
        layout(
            MLASpec(block_size=16, head_size=4, tokens=TokenShard(rank=rank, size=3, interleave=2)),
            worker(rank, 3),
            base=(rank + 2) << 40,
        )
        for rank in range(3)
    ]
    local = layout(MLASpec(block_size=16, head_size=4))
    sizes = []
    for assignment in assign(local, remotes):
        plan = make_plan(local, remotes[assignment.remote], assignment)
        sizes.append(select(plan, [1, 2, 3], [1], 3, 41).nbytes // 8)
    mine = [[t for t in range(3, 41) if t // 2 % 3 == rank] for rank in range(3)]
    assert sizes == [len(tokens) for tokens in mine]


# ---------------------------------------------------------------- limits


def test_a_list_too_wide_for_its_indices_gets_a_row_per_slot(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    specs = full(axes=BLOCKS_FIRST, block_size=8), full(axes=BLOCKS_FIRST)
    wide = plan_for(*specs)
    assert len(wide.remote_rows) == 2
    monkeypatch.setattr(plan_module, "MAX_ENTRIES", 4 * 64)
    narrow = plan_for(*specs)
    assert (len(narrow.local_rows), len(narrow.remote_rows)) == (2, 4)
    picks = [select(plan, [5, 4, 1], [9, 7], 3, 21) for plan in (wide, narrow)]
    assert sorted(transfers(wide, picks[0])) == sorted(transfers(narrow, picks[1]))
    monkeypatch.setattr(plan_module, "MAX_ENTRIES", 4 * 64 - 1)
    with pytest.raises(UnsupportedGeometry, match="256 pieces, the limit"):
        plan_for(*specs)
    assert rows_module.MAX_ENTRIES == 2**31 - 1


def test_absurd_numbers_of_pieces_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UnsupportedGeometry, match="runs of 1 bytes in common"):
        box_runs([Dim(1 << 10, 1, 1 << 10), Dim(1 << 10, 1 << 10, 1)], 1)
    plan = plan_for(full(), full(axes=HND))
    monkeypatch.setattr(plan_module, "MAX_DESCRIPTORS", 2 * 16 * 4 - 1)
    with pytest.raises(UnsupportedGeometry, match="128 pieces of 16 to 16 bytes"):
        plan.select(table(1), table(2), 0, 16)
    monkeypatch.setattr(plan_module, "MAX_TEMPLATES", 100)
    with pytest.raises(UnsupportedGeometry, match="runs of 16 bytes"):
        plan_for(full(), full(axes=HND))


def test_a_plan_needs_nothing_but_what_travels() -> None:
    remote = layout(full(axes=HND), None, 64, BASE)
    arrived = msgspec.msgpack.decode(msgspec.msgpack.encode(remote), type=RankLayout)
    local = layout(full(), None, 64)
    plans = [make_plan(local, side, assign(local, [side])[0]) for side in (remote, arrived)]
    assert (plans[0].remote_rows == plans[1].remote_rows).all()
