"""Reads by way of the staging buffer leave the very same bytes as direct ones."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import event, given
from hypothesis import strategies as st
from oracle import Case, Rank, build_side, cases, transfers
from rigs import BLOCKS_FIRST, HND, NHD, engine, full

from kvagent.core.layout import MemoryRange, RankLayout
from kvagent.core.plan import assign, make_plan
from kvagent.core.specs import MambaSpec
from kvagent.core.staged import Chunk, StagedPart, StagedTrack
from kvagent.core.staging import AREAS, Buffer, plan_staging, stage_track
from kvagent.core.track import Granules, Track

BASE = 1 << 59


def move(
    moved: list[tuple[int, int, int]],
    into: Sequence[MemoryRange],
    out_of: Sequence[MemoryRange],
) -> None:
    for destination, source, nbytes in moved:
        for address, ranges in ((destination, into), (source, out_of)):
            assert any(
                each.address <= address and address + nbytes <= each.address + each.nbytes
                for each in ranges
            )
        ctypes.memmove(destination, source, nbytes)


def fill(part: StagedPart, chunk: Chunk, number: int, area: np.ndarray, remote: Rank) -> None:
    """Read a chunk into its area, as a fabric would."""
    rows = SimpleNamespace(local_rows=part.local_rows, remote_rows=part.plan.remote_rows)
    moved = transfers(rows, part.selection(chunk, number))
    written = np.zeros(len(area), dtype=np.uint8)
    for destination, _, nbytes in moved:
        at = destination - area.ctypes.data
        written[at : at + nbytes] += 1
    assert written.max() <= 1, "two regions share bytes of the area"
    move(moved, [MemoryRange(area.ctypes.data, len(area))], remote.layout.ranges)


@given(cases(), st.booleans(), st.sampled_from([1, 2, 5, 100]), st.booleans())
def test_the_same_bytes_as_a_direct_read(
    case: Case, all_heads: bool, blocks: int, split: bool
) -> None:
    rng = np.random.default_rng(case.seed)
    local = build_side(case, case.local, rng)
    remote = build_side(case, case.remote, rng)
    layouts = [rank.layout for rank in remote.ranks]
    staged_any = 0
    for rank in local.ranks:
        for assignment in assign(rank.layout, layouts):
            source = remote.ranks[assignment.remote]
            plan = make_plan(rank.layout, source.layout, assignment)
            found = plan.locate(local.tables, remote.tables, case.start, case.stop)
            for track, granules in found.items():
                alone = plan.pick({track: granules})
                assert plan.measure(track, granules) == (alone.nbytes, alone.descriptors)
            before = [memory.copy() for memory in rank.memory]
            ranges = rank.layout.ranges, source.layout.ranges
            move(transfers(plan, plan.pick(found)), *ranges)
            expected = [memory.copy() for memory in rank.memory]
            for memory, old in zip(rank.memory, before, strict=True):
                memory[:] = old
            rest = dict(found)
            for track in found:
                if not track.tokenwise:
                    continue

                def stage(buffer: Buffer, heads: bool, track: Track = track) -> StagedTrack | None:
                    pair = (rank.layout, source.layout)  # noqa: B023
                    return stage_track(*pair, assignment, plan, track, buffer, heads)  # noqa: B023

                whole = stage(Buffer(BASE, 1 << 30), True)
                assert whole is not None
                (part,) = whole.parts
                area_bytes = max(part.block_bytes * blocks // (2 if split else 1), 1)
                staging = rng.integers(0, 256, AREAS * area_bytes, dtype=np.uint8)
                staged = stage(Buffer(staging.ctypes.data, area_bytes), all_heads)
                if staged is None:
                    event("a region is more than an area")
                    continue
                _stage(staged, rest.pop(track), staging, rank, source)
                staged_any += 1
                event(f"parts: {min(len(staged.parts), 3)}")
            move(transfers(plan, plan.pick(rest)), *ranges)
            for memory, wanted in zip(rank.memory, expected, strict=True):
                assert np.array_equal(memory, wanted)
    event(f"staged: {'none' if not staged_any else 'some'}")


def _stage(
    staged: StagedTrack, granules: Granules, staging: np.ndarray, rank: Rank, source: Rank
) -> None:
    areas = np.split(staging, AREAS)
    for part in staged.parts:
        for number, chunk in enumerate(part.chunks(granules)):
            assert 0 < len(chunk.blocks) <= part.capacity
            area = areas[number % AREAS]
            fill(part, chunk, number % AREAS, area, source)
            part.copy(chunk, rank.memory, area)


def plans(local: RankLayout, remotes: list[RankLayout], buffer: int = 1 << 20, run: int = 4096):
    (assignment, *_) = assign(local, remotes)
    remote = remotes[assignment.remote]
    plan = make_plan(local, remote, assignment)
    return plan, plan_staging(local, remote, assignment, plan, Buffer(BASE, buffer), run)


def tables(*ids: int):
    return [np.array(ids, dtype=np.int32)]


def test_short_runs_are_staged_as_whole_blocks() -> None:
    specs = {f"layer.{i}": full(axes=NHD, num_kv_heads=8, head_size=64) for i in range(4)}
    here = {name: full(axes=HND, num_kv_heads=8, head_size=64) for name in specs}
    plan, (staged,) = plans(engine(here, 2)[0], engine(specs, 4))
    (part,) = staged.parts
    assert plan.shortest_run == plan.longest_run == 128
    assert part.block_runs == 4 * 2  # one for each K and V
    assert part.block_bytes == 4 * 2 * 16 * 2 * 128
    assert staged.copy_run == 128
    found = plan.locate(tables(*range(32)), tables(*range(32)), 0, 512)
    (granules,) = found.values()
    assert staged.is_better(plan, granules, 4096)
    assert not staged.is_better(plan, granules, 128), "runs of 128 bytes are long enough"


def test_blocks_that_follow_one_another_merge() -> None:
    specs, here = full(axes=NHD, head_size=64), full(axes=HND, head_size=64)
    plan, (staged,) = plans(engine(here, 1)[0], engine(specs, 1))
    (part,) = staged.parts
    (granules,) = plan.locate(tables(3, 4, 5, 9), tables(7, 6, 5, 1), 0, 64).values()
    (chunk,) = part.chunks(granules)
    assert chunk.blocks.tolist() == [1, 5, 6, 7]
    assert part.selection(chunk, 0).descriptors == 2 * 2


def test_k_and_v_of_one_page_are_one_run() -> None:
    specs, here = full(axes=BLOCKS_FIRST, head_size=64), full(axes=HND, head_size=64)
    _, (staged,) = plans(engine(here, 1)[0], engine(specs, 1))
    assert staged.parts[0].block_runs == 1


@pytest.mark.parametrize(
    ("remote_axes", "block_bytes"),
    [(NHD, 2 * 16 * 4 * 128), (HND, None)],
    ids=["all heads of a token are one run", "heads apart: a direct read is as good"],
)
def test_heads_that_nobody_wants_are_read_when_it_pays(remote_axes, block_bytes) -> None:
    remote = engine(full(axes=remote_axes, head_size=64), 1)
    _, staged = plans(engine(full(axes=NHD, head_size=64), 2)[0], remote)
    if block_bytes is None:
        # Two of four heads, 16 tokens of each together: read those, in two runs of K and V.
        assert staged[0].parts[0].block_bytes == 2 * 16 * 2 * 128
        assert staged[0].parts[0].block_runs == 2
    else:
        assert staged[0].parts[0].block_bytes == block_bytes
        assert staged[0].parts[0].block_runs == 2


def test_a_track_that_is_more_than_an_area_is_staged_in_parts() -> None:
    specs = {f"layer.{i}": full(axes=NHD, head_size=64) for i in range(4)}
    here = {name: full(axes=HND, head_size=64) for name in specs}
    region = 16 * 4 * 128
    _, (staged,) = plans(engine(here, 1)[0], engine(specs, 1), buffer=3 * region)
    assert [part.block_bytes for part in staged.parts] == [3 * region, 3 * region, 2 * region]
    assert [part.capacity for part in staged.parts] == [1, 1, 1]
    _, none = plans(engine(here, 1)[0], engine(specs, 1), buffer=region - 1)
    assert none == ()


def test_what_is_never_staged() -> None:
    nhd, hnd = full(axes=NHD, head_size=64), full(axes=HND, head_size=64)
    assert plans(engine(nhd, 2)[0], engine(nhd, 2))[1] == (), "equal layouts: long runs"
    assert plans(engine(hnd, 1)[0], engine(nhd, 1), run=128)[1] == (), "long enough by decree"
    state = MambaSpec(
        conv=(), conv_width=1, conv_axes=("block", "width", "channel"), ssm_heads=4, ssm_shape=(2,)
    )
    assert plans(engine(state, 1)[0], engine(state, 2))[1] == (), "no token axis"


def test_small_reads_are_direct() -> None:
    plan, (staged,) = plans(
        engine(full(axes=HND, head_size=64), 1)[0], engine(full(axes=NHD, head_size=64), 1)
    )
    (one,) = plan.locate(tables(0), tables(0), 0, 1).values()
    assert not staged.is_better(plan, one, 4096), "8 descriptors cost less than a step"
