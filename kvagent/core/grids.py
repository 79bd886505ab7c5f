"""The boxes of an assignment as grids of elements with strides on both sides.

A `Lane` is where granules (see `track`) lie, a `Grid` what one granule of a box consists of. What
becomes of them: prepared lists in `plan`, copies in `permute`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvagent.core.assign import Box
from kvagent.core.regions import Axis, Family, RankLayout
from kvagent.core.rows import Pace
from kvagent.core.runs import Dim, box_runs
from kvagent.core.track import Place, Side, Track
from kvagent.errors import UnsupportedGeometry

__all__ = ["MAX_TEMPLATES", "Grid", "Lane", "make_grid", "pace", "pair", "track_of"]

Ints = npt.NDArray[np.int64]

MAX_TEMPLATES = 1 << 20
"""Most runs of one granule of all regions."""


@dataclass(frozen=True)
class Lane:
    """Regions that share block tables and strides on both sides, so that one pair of entry
    numbers serves all their runs."""

    track: Track
    local: Pace
    remote: Pace


@dataclass(frozen=True)
class Grid:
    """The regions of one box: where they start, and the dimensions of a granule in them."""

    lane: Lane
    local: Ints
    remote: Ints
    dims: tuple[Dim, ...]
    token: Dim
    itemsize: int

    def runs(self, tokens: int) -> tuple[Ints, Ints, Ints]:
        """The runs of `tokens` tokens of every region, as if in slot 0 of block 0."""
        token = self.token._replace(extent=tokens if self.lane.track.tokenwise else 1)
        local, remote, length = box_runs((*self.dims, token), self.itemsize)
        if len(local) * len(self.local) > MAX_TEMPLATES:
            raise UnsupportedGeometry(
                f"the two layouts have only runs of {length} bytes in common, "
                f"{len(local) * len(self.local)} for each granule of tokens"
            )
        flat_local = (self.local[:, None] + local).ravel()
        flat_remote = (self.remote[:, None] + remote).ravel()
        return flat_local, flat_remote, np.full(len(flat_local), length, dtype=np.int64)

    def piece(self, place: Place) -> tuple[Ints, Ints, Ints]:
        """The runs of a part of one granule."""
        local, remote, length = self.runs(place.end - place.begin)
        local += (
            place.local_block * self.lane.local.block_stride
            + place.local_slot * self.lane.local.slot_stride
            + place.begin * self.token.local
        )
        remote += (
            place.remote_block * self.lane.remote.block_stride
            + place.remote_slot * self.lane.remote.slot_stride
            + place.begin * self.token.remote
        )
        return local, remote, length


def track_of(local: RankLayout, remote: RankLayout, box: Box) -> Track:
    ours, theirs = local.families[box.local_family], remote.families[box.remote_family]
    return Track(
        Side.of("local", local.group(ours.group), ours),
        Side.of("remote", remote.group(theirs.group), theirs),
        ours.window,
        ours.axis("token") is not None,
    )


def make_grid(local: RankLayout, remote: RankLayout, box: Box) -> Grid:
    ours, theirs = local.families[box.local_family], remote.families[box.remote_family]
    track = track_of(local, remote, box)
    h0, h1 = box.heads
    token, head = pair(ours, theirs, "token"), pair(ours, theirs, "head")
    dims = [
        pair(ours, theirs, axis.name)
        for axis in ours.axes
        if axis.name not in ("block", "token", "head")
    ]
    dims.append(head._replace(extent=h1 - h0))
    local_at = np.array(local.addresses(ours), dtype=np.int64)[list(box.local_regions)]
    remote_at = np.array(remote.addresses(theirs), dtype=np.int64)[list(box.remote_regions)]
    return Grid(
        Lane(track, pace(ours, track), pace(theirs, track)),
        local_at + (h0 - ours.heads[0]) * head.local,
        remote_at + (h0 - theirs.heads[0]) * head.remote,
        tuple(dims),
        token,
        ours.itemsize,
    )


def pair(ours: Family, theirs: Family, name: str) -> Dim:
    """The axis of that name on both sides; an axis that is missing has extent 1."""
    one = ours.axis(name) or Axis(name, 1, 0)
    other = theirs.axis(name) or Axis(name, 1, 0)
    return Dim(one.extent, one.stride, other.stride)


def pace(family: Family, track: Track) -> Pace:
    """How the granules of `track` repeat in a region of one side."""
    slots = family.block_tokens // track.granule if track.tokenwise else 1
    token = family.axis("token")
    stride = token.stride * track.granule if token and slots > 1 else 0
    return Pace(family.block.extent, family.block.stride, slots, stride)
