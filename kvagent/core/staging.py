"""Short runs by way of a staging buffer: which remote blocks to read whole, and where to put them.

Where two layouts have only short runs in common (heads outside tokens here and inside there, with
few heads each), descriptors cost more than bytes. Then a remote block's bytes are read in their
own order into a buffer of host memory, where they make long runs, and copied from there.

The unit is a track of the direct plan. Which granules are wanted, and which blocks they lie in,
is asked of that plan: both ways have the same granules, and a staged read adds only an order of
remote blocks, a bounded number at a time (a **chunk**). In the buffer the heads are either those
that are wanted or all of the remote rank's, whichever the estimate prefers; regions that do not
fit together are staged in several **parts**.

The buffer is divided into `AREAS`, one chunk each, so that one is read while another is copied.
Not for values without a token axis (states, values of whole blocks) and not for GPU memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from kvagent.core.assign import Assignment, Box
from kvagent.core.estimate import Work, prefer_staging
from kvagent.core.grids import make_grid, pace
from kvagent.core.permute import Bytes, Permutation
from kvagent.core.plan import ReadPlan, Selection, make_plan
from kvagent.core.regions import Axis, CacheGroup, Family, MemoryRange, RankLayout
from kvagent.core.track import Granules, Track
from kvagent.errors import UnsupportedGeometry

__all__ = ["AREAS", "Buffer", "Chunk", "StagedPart", "StagedTrack", "plan_staging", "short_tracks"]

Ints = npt.NDArray[np.int64]

AREAS = 2


class Buffer(NamedTuple):
    """`AREAS` areas of `area_bytes`, back to back from `address`."""

    address: int
    area_bytes: int


class Chunk(NamedTuple):
    """Remote blocks (physical, rising) that are staged together, as blocks 0, 1, ... of an area,
    and the granules to copy out of them, in the numbers of the caches."""

    blocks: Ints
    granules: Granules


@dataclass(frozen=True)
class StagedPart:
    """Regions that are staged together, `capacity` blocks at a time.

    plan: reads remote blocks into the first area; block_bytes, block_runs: of one of them.
    local_rows: of the plan, for all areas one after another.
    """

    plan: ReadPlan
    permutations: tuple[Permutation, ...]
    capacity: int
    block_tokens: int
    block_bytes: int
    block_runs: int
    local_rows: npt.NDArray[np.uint64]

    def selection(self, chunk: Chunk, area: int) -> Selection:
        """What to read in order to fill an area with a chunk's blocks."""
        count = len(chunk.blocks)
        into = np.arange(count, dtype=np.int32)
        picked = self.plan.select(
            [into], [chunk.blocks.astype(np.int32)], 0, count * self.block_tokens
        )
        entries = int(self.plan.local_rows[:, 4].sum())
        return Selection(
            picked.local_index + np.int32(area * entries),
            picked.remote_index,
            picked.extra,
            picked.nbytes,
            picked.descriptors,
        )

    def copy(self, chunk: Chunk, memory: Sequence[Bytes], area: Bytes) -> None:
        """Copy a chunk from its area to where it belongs. `memory`: all of the local ranges."""
        granules = chunk.granules
        granules = granules._replace(
            remote_block=np.searchsorted(chunk.blocks, granules.remote_block),
            partial=tuple(
                place._replace(remote_block=int(np.searchsorted(chunk.blocks, place.remote_block)))
                for place in granules.partial
            ),
        )
        for permutation in self.permutations:
            permutation.copy(granules, memory, area)

    def chunks(self, granules: Granules) -> Iterator[Chunk]:
        """Granules in the order of their remote blocks, an area's fill at a time."""
        order = np.lexsort((granules.remote_slot, granules.remote_block))
        columns = [column[order] for column in granules[:4]]
        blocks = remote_blocks(granules)
        for first in range(0, len(blocks), self.capacity):
            mine = blocks[first : first + self.capacity]
            low, high = int(mine[0]), int(mine[-1])
            begin, end = np.searchsorted(columns[2], [low, high + 1])
            local_block, local_slot, remote_block, remote_slot = (c[begin:end] for c in columns)
            partial = tuple(p for p in granules.partial if low <= p.remote_block <= high)
            yield Chunk(
                mine, Granules(local_block, local_slot, remote_block, remote_slot, partial)
            )


@dataclass(frozen=True)
class StagedTrack:
    """The other way to read one track of a plan. `copy_run`: bytes of the runs of its copies."""

    track: Track
    parts: tuple[StagedPart, ...]
    copy_run: int

    def work(self, blocks: int, wanted: int) -> Work:
        """What it takes to stage so many remote blocks in order to copy `wanted` bytes."""
        return Work(
            nbytes=blocks * sum(part.block_bytes for part in self.parts),
            descriptors=blocks * sum(part.block_runs for part in self.parts),
            copied=wanted,
            runs=wanted // self.copy_run,
            steps=sum(-(-blocks // part.capacity) for part in self.parts),
        )

    def is_better(self, plan: ReadPlan, granules: Granules, run_bytes: int) -> bool:
        """Whether to read these granules this way, and not by `plan`."""
        direct = Work(*plan.measure(self.track, granules))
        staged = self.work(len(remote_blocks(granules)), direct.nbytes)
        return prefer_staging(direct, staged, run_bytes)


def remote_blocks(granules: Granules) -> Ints:
    """The physical blocks that granules lie in, rising."""
    partial = [place.remote_block for place in granules.partial]
    return np.unique(np.concatenate((granules.remote_block, np.array(partial, dtype=np.int64))))


def short_tracks(
    local: RankLayout, remote: RankLayout, plan: ReadPlan, run_bytes: int
) -> list[Track]:
    """The tracks of a plan that may be staged, and whose mean run is shorter than `run_bytes`."""
    if "vram" in (local.kind, remote.kind):
        return []
    found = []
    for track in dict.fromkeys(grid.lane.track for grid in plan.grids):
        nbytes, runs = plan.per_granule(track)
        if track.tokenwise and nbytes < run_bytes * runs:
            found.append(track)
    return found


def plan_staging(
    local: RankLayout,
    remote: RankLayout,
    assignment: Assignment,
    plan: ReadPlan,
    buffer: Buffer,
    run_bytes: int,
) -> tuple[StagedTrack, ...]:
    """Prepare staging for those tracks of `plan` (of the same assignment) for which it may pay.

    A track is left out when staging is no better even for whole blocks, or when one of its
    regions has more bytes in a block than an area. What a fetch does is decided by its granules:
    `StagedTrack.is_better`.
    """
    staged = []
    for track in short_tracks(local, remote, plan, run_bytes):
        boxes = [
            box
            for box, grid in zip(assignment.boxes, plan.grids, strict=True)
            if grid.lane.track == track
        ]
        nbytes, runs = plan.per_granule(track)
        granules = track.remote.block_tokens // track.granule
        direct = Work(nbytes * granules, runs * granules)
        best: tuple[float, StagedTrack] | None = None
        for all_heads in (False, True):
            option = _stage(local, remote, track, boxes, buffer, all_heads)
            if option is None:
                continue
            work = option.work(1, direct.nbytes)._replace(steps=0)
            if prefer_staging(direct, work, run_bytes) and (not best or work.seconds < best[0]):
                best = work.seconds, option
        if best is not None:
            staged.append(best[1])
    return tuple(staged)


class _Region(NamedTuple):
    """One region of one box. `dense`: whether its blocks follow one another in the remote memory;
    so do they in the buffer then, otherwise regions of one block do."""

    address: int
    box: int
    place: int
    nbytes: int
    dense: bool


def _stage(
    local: RankLayout,
    remote: RankLayout,
    track: Track,
    boxes: Sequence[Box],
    buffer: Buffer,
    all_heads: bool,
) -> StagedTrack | None:
    """Staging for one track with the wanted or all heads; None when it cannot be done."""
    regions = []
    for number, box in enumerate(boxes):
        family = remote.families[box.remote_family]
        heads = family.heads[:2] if all_heads else box.heads
        nbytes = _block_bytes(family, heads)
        addresses = remote.addresses(family)
        for place, region in enumerate(box.remote_regions):
            dense = family.block.stride in (nbytes, 0)
            regions.append(_Region(addresses[region], number, place, nbytes, dense))
    if max(region.nbytes for region in regions) > buffer.area_bytes:
        return None
    parts: list[list[_Region]] = [[]]
    room = buffer.area_bytes
    for each in sorted(regions):  # neighbours in the remote memory become neighbours here
        if each.nbytes > room:
            parts.append([])
            room = buffer.area_bytes
        parts[-1].append(each)
        room -= each.nbytes
    try:
        made = tuple(_part(local, remote, track, boxes, p, buffer, all_heads) for p in parts)
    except UnsupportedGeometry:
        return None
    return StagedTrack(track, made, min(p.run for part in made for p in part.permutations))


def _block_bytes(family: Family, heads: tuple[int, int]) -> int:
    nbytes = family.itemsize
    for axis in family.axes:
        if axis.name not in ("block", "head"):
            nbytes *= axis.extent
    return nbytes * (heads[1] - heads[0])


def _part(
    local: RankLayout,
    remote: RankLayout,
    track: Track,
    boxes: Sequence[Box],
    regions: Sequence[_Region],
    buffer: Buffer,
    all_heads: bool,
) -> StagedPart:
    capacity = buffer.area_bytes // sum(region.nbytes for region in regions)
    page = sum(region.nbytes for region in regions if not region.dense)
    offset, in_page = 0, 0
    offsets: dict[int, list[tuple[int, int]]] = {}
    """For each box: the places of its regions and their offsets in the area."""
    for region in sorted(regions, key=lambda region: not region.dense):
        at = offset if region.dense else offset + in_page
        offsets.setdefault(region.box, []).append((region.place, at))
        if region.dense:
            offset += capacity * region.nbytes
        else:
            in_page += region.nbytes

    staging, far = [], []
    reads, copies = [], []
    for number, found in sorted(offsets.items()):
        box, index = boxes[number], len(staging)
        family = remote.families[box.remote_family]
        heads = family.heads[:2] if all_heads else box.heads
        stride = _block_bytes(family, heads) if family.block.stride in (0, _block_bytes(family, heads)) else page
        theirs = tuple(box.remote_regions[place] for place, _ in found)
        staging.append(
            msgspec.structs.replace(
                family,
                group=0,
                window=0,
                axes=_dense_axes(family, heads, capacity, stride),
                heads=(*heads, family.heads[2]),
                layers=tuple(family.layers[region] for region in theirs),
                memories=(0,) * len(found),
                offsets=tuple(at for _, at in found),
            )
        )
        far.append(msgspec.structs.replace(family, group=0, window=0))
        everything = tuple(range(len(found)))
        reads.append(Box(index, index, heads, everything, theirs))
        ours = tuple(box.local_regions[place] for place, _ in found)
        copies.append(Box(box.local_family, index, box.heads, ours, everything))
    tokens = track.remote.block_tokens
    area = RankLayout(
        ranges=(MemoryRange(buffer.address, buffer.area_bytes),),
        groups=(CacheGroup(index=0, block_size=tokens, num_blocks=capacity),),
        layers=remote.layers,
        families=tuple(staging),
    )
    blocks = track.remote.num_blocks * track.remote.split
    source = msgspec.structs.replace(
        remote,
        groups=(CacheGroup(index=0, block_size=tokens, num_blocks=blocks),),
        families=tuple(far),
    )
    plan = make_plan(area, source, Assignment(0, tuple(reads)))
    (one,) = dict.fromkeys(grid.lane.track for grid in plan.grids)
    block_bytes, block_runs = plan.per_granule(one)
    rows = np.concatenate([plan.local_rows] * AREAS)
    rows[:, 0] += np.repeat(
        np.arange(AREAS, dtype=np.uint64) * np.uint64(buffer.area_bytes), len(plan.local_rows)
    )
    return StagedPart(
        plan=plan,
        permutations=tuple(_permutation(local, area, track, box) for box in copies),
        capacity=capacity,
        block_tokens=tokens,
        block_bytes=block_bytes,
        block_runs=block_runs,
        local_rows=rows,
    )


def _dense_axes(
    family: Family, heads: tuple[int, int], blocks: int, block_stride: int
) -> tuple[Axis, ...]:
    """The axes of a family in their order of strides, without gaps inside a block."""
    strides = {}
    span = family.itemsize
    for axis in sorted(family.axes, key=lambda axis: axis.stride):
        if axis.name != "block":
            extent = heads[1] - heads[0] if axis.name == "head" else axis.extent
            strides[axis.name] = Axis(axis.name, extent, span if extent > 1 else 0)
            span *= extent
    strides["block"] = Axis("block", blocks, block_stride if blocks > 1 else 0)
    return tuple(strides[axis.name] for axis in family.axes)


def _permutation(local: RankLayout, area: RankLayout, track: Track, box: Box) -> Permutation:
    """The copies out of an area that one box needs, by the granules of the direct plan."""
    ours, theirs = local.families[box.local_family], area.families[box.remote_family]
    grid = make_grid(local, area, box)
    memories = tuple(ours.memories[region] for region in box.local_regions)
    begins = [local.ranges[memory].address for memory in memories]
    return Permutation(
        memories=memories,
        local=tuple(int(at) - begin for at, begin in zip(grid.local, begins, strict=True)),
        remote=tuple(int(at) - area.ranges[0].address for at in grid.remote),
        local_pace=pace(ours, track),
        remote_pace=pace(theirs, track),
        dims=grid.dims,
        token=grid.token._replace(extent=track.granule),
        itemsize=grid.itemsize,
    )
