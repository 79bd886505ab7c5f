"""Short runs by way of a staging buffer: which remote blocks to read whole, and where to put them.

Where two layouts have only short runs in common (heads outside tokens here and inside there, with
few heads each), descriptors cost more than bytes. Then a remote block's bytes are read in their
own order into a buffer, where they make long runs, and copied from there. The buffer lies where our
cache does, in host memory or on the GPU; where the remote rank's lies does not matter.

The unit is a track of the direct plan. Which granules are wanted, and which blocks they lie in,
is asked of that plan: both ways have the same granules, and a staged read adds only an order of
remote blocks, a bounded number at a time (a **chunk**). In the buffer the heads are either those
that are wanted or all of the remote rank's, whichever the estimate prefers; regions that do not
fit together are staged in several **parts**.

The buffer is divided into `AREAS`, one chunk each, so that one is read while another is copied.
Not for values without a token axis (states, values of whole blocks).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

import msgspec
import numpy as np

from kvagent.core.assign import Assignment, Box
from kvagent.core.estimate import Work, prefer_staging
from kvagent.core.grids import make_grid, pace
from kvagent.core.permute import Permutation
from kvagent.core.plan import ReadPlan, make_plan
from kvagent.core.regions import Axis, CacheGroup, Family, MemoryRange, RankLayout
from kvagent.core.staged import StagedPart, StagedTrack
from kvagent.core.track import Track
from kvagent.errors import UnsupportedGeometry

__all__ = ["AREAS", "Buffer", "plan_staging", "short_tracks", "stage_track"]

AREAS = 2


class Buffer(NamedTuple):
    """`AREAS` areas of `area_bytes`, back to back from `address`."""

    address: int
    area_bytes: int
    kind: Literal["dram", "vram"] = "dram"
    device: int = 0


def short_tracks(plan: ReadPlan, run_bytes: int) -> list[Track]:
    """The tracks of a plan that may be staged, and whose mean run is shorter than `run_bytes`."""
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

    A track is left out when staging is no better even for whole blocks, or cannot be done. What a
    fetch does is decided by its granules: `StagedTrack.is_better`.
    """
    staged = []
    for track in short_tracks(plan, run_bytes):
        nbytes, runs = plan.per_granule(track)
        granules = track.remote.block_tokens // track.granule
        direct = Work(nbytes * granules, runs * granules)
        best: tuple[float, StagedTrack] | None = None
        for all_heads in (False, True):
            option = stage_track(local, remote, assignment, plan, track, buffer, all_heads)
            if option is None:
                continue
            work = option.work(1, direct.nbytes)._replace(steps=0)
            if prefer_staging(direct, work, run_bytes) and (not best or work.seconds < best[0]):
                best = work.seconds, option
        if best is not None:
            staged.append(best[1])
    return tuple(staged)


class _Region(NamedTuple):
    """One region of one box: its place in the box's list, and its bytes in one block."""

    address: int
    box: int
    place: int
    nbytes: int


def stage_track(
    local: RankLayout,
    remote: RankLayout,
    assignment: Assignment,
    plan: ReadPlan,
    track: Track,
    buffer: Buffer,
    all_heads: bool,
) -> StagedTrack | None:
    """Staging for one track with token axes, of the wanted heads or of all that the remote rank
    has. None when one block of a single region is more than an area, or pieces are absurdly many.
    """
    boxes = [
        box
        for box, grid in zip(assignment.boxes, plan.grids, strict=True)
        if grid.lane.track == track
    ]
    regions = []
    for number, box in enumerate(boxes):
        family = remote.families[box.remote_family]
        addresses = remote.addresses(family)
        nbytes = _block_bytes(family, family.heads[:2] if all_heads else box.heads)
        regions += [
            _Region(addresses[region], number, place, nbytes)
            for place, region in enumerate(box.remote_regions)
        ]
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

    def follows(region: _Region) -> bool:
        # Blocks that follow one another in the remote memory do so in the buffer; otherwise the
        # regions of one block do.
        stride = remote.families[boxes[region.box].remote_family].block.stride
        return stride in (region.nbytes, 0)

    page = sum(region.nbytes for region in regions if not follows(region))
    offset = 0
    offsets: dict[int, list[tuple[int, int]]] = {}
    """For each box: the places of its regions and their offsets in the area."""
    strides = {}
    for region in sorted(regions, key=lambda region: not follows(region)):
        offsets.setdefault(region.box, []).append((region.place, offset))
        strides[region.box] = region.nbytes if follows(region) else page
        offset += region.nbytes * (capacity if follows(region) else 1)

    staging: list[Family] = []
    far, reads, copies = [], [], []
    for number, found in offsets.items():
        box, index = boxes[number], len(staging)
        family = remote.families[box.remote_family]
        heads = family.heads[:2] if all_heads else box.heads
        theirs = tuple(box.remote_regions[place] for place, _ in found)
        staging.append(
            msgspec.structs.replace(
                family,
                group=0,
                window=0,
                axes=_dense_axes(family, heads, capacity, strides[number]),
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
        ranges=(MemoryRange(buffer.address, buffer.area_bytes, buffer.kind, buffer.device),),
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
