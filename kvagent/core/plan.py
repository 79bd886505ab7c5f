"""Two layouts and block ids to the runs of bytes to read.

A `ReadPlan` is made once per pair of ranks. For each box of the assignment it holds the runs of
one granule (see `track`), as rows of NIXL's strided prepared lists: a row is a run repeated over
all granules of the cache, so its size does not depend on the number of blocks. A fetch then only
picks entries of the rows, with numpy. Pieces of granules at the ends of the wanted tokens come as
explicit runs beside them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvagent.core.assign import Assignment, Box, assign
from kvagent.core.regions import Axis, Family, RankLayout
from kvagent.core.rows import MAX_ENTRIES, Numbering, Pace, RowList
from kvagent.core.runs import Dim, box_runs, coalesce
from kvagent.core.track import BlockTables, Granules, Place, Side, Track
from kvagent.errors import BlockRangeError, UnsupportedGeometry

__all__ = ["Assignment", "Box", "ReadPlan", "Selection", "assign", "make_plan"]

Ints = npt.NDArray[np.int64]

MAX_TEMPLATES = 1 << 20
MAX_DESCRIPTORS = 1 << 26
"""Most entries of one selection: half a gigabyte of indices, far beyond what is worth posting."""


@dataclass(frozen=True)
class Selection:
    """What to read for one transfer: entry `local_index[i]` of the local prepared list from entry
    `remote_index[i]` of the remote one, and every run of `extra`.

    extra: uint64, M x 3 (local address, remote address, bytes), already coalesced.
    nbytes: of both together. descriptors: what is left after NIXL has merged neighbours in the
    index arrays (posted in one piece), plus the runs of `extra`.
    """

    local_index: npt.NDArray[np.int32]
    remote_index: npt.NDArray[np.int32]
    extra: npt.NDArray[np.uint64]
    nbytes: int
    descriptors: int


@dataclass(frozen=True)
class _Lane:
    """Regions that share block tables and strides on both sides, so that one pair of entry
    numbers serves all their runs."""

    track: Track
    local: Pace
    remote: Pace


@dataclass(frozen=True)
class _Grid:
    """The regions of one box: where they start, and the dimensions of a granule in them."""

    lane: _Lane
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


@dataclass(frozen=True)
class _Templates:
    """The runs of one lane, and where their rows start in the two prepared lists."""

    lane: _Lane
    length: Ints
    local: Numbering
    remote: Numbering
    local_start: Ints
    remote_start: Ints

    @property
    def dense(self) -> npt.NDArray[np.bool_]:
        """Whether neighbours in a run's row are neighbours in memory, on both sides."""
        even: npt.NDArray[np.bool_] = (self.length == self.local.stride) & (
            self.length == self.remote.stride
        )
        return even


class ReadPlan:
    """How to read one assignment: see `make_plan`.

    local_rows, remote_rows: uint64, N x 5 (address, bytes, device, stride, count): NIXL's strided
    prepared lists. N may differ between the two; entries picked together have equal lengths.
    """

    def __init__(
        self,
        grids: Sequence[_Grid],
        templates: Sequence[_Templates],
        local_rows: npt.NDArray[np.uint64],
        remote_rows: npt.NDArray[np.uint64],
    ) -> None:
        self.local_rows = local_rows
        self.remote_rows = remote_rows
        self._grids = grids
        self._templates = templates

    @property
    def shortest_run(self) -> int:
        """Bytes of the shortest run of a whole granule."""
        return int(min(t.length.min() for t in self._templates))

    @property
    def longest_run(self) -> int:
        """Bytes of the longest run of a whole granule, before neighbours merge."""
        return int(max(t.length.max() for t in self._templates))

    def select(
        self,
        local_blocks: BlockTables,
        remote_blocks: BlockTables,
        start_token: int,
        num_tokens: int,
    ) -> Selection:
        """Pick the bytes of tokens `[start_token, num_tokens)`.

        Both block lists (one int32 array per cache group) hold the request's tokens from token 0;
        they may be longer than needed. Raises `BlockRangeError` naming the id, the list or the
        tokens that do not fit, and `UnsupportedGeometry` for a selection in absurdly many pieces.
        """
        if not 0 <= start_token <= num_tokens:
            raise BlockRangeError(f"tokens [{start_token}, {num_tokens}) are not a range")
        found: dict[Track, Granules] = {}
        for grid in self._grids:
            track = grid.lane.track
            if track not in found:
                found[track] = track.select(local_blocks, remote_blocks, start_token, num_tokens)
        entries = sum(len(t.length) * len(found[t.lane.track].local_block) for t in self._templates)
        if entries > MAX_DESCRIPTORS:
            raise UnsupportedGeometry(
                f"{entries} pieces of {self.shortest_run} to {self.longest_run} bytes, the limit "
                f"is {MAX_DESCRIPTORS}"
            )
        local_index = np.empty(entries, dtype=np.int32)
        remote_index = np.empty(entries, dtype=np.int32)
        nbytes = descriptors = done = 0
        for templates in self._templates:
            granules = found[templates.lane.track]
            count = len(granules.local_block)
            if not count:
                continue
            local = templates.local.entries(granules.local_block, granules.local_slot)
            remote = templates.remote.entries(granules.remote_block, granules.remote_slot)
            end = done + count * len(templates.length)
            shape = (len(templates.length), count)
            np.add(
                templates.local_start.astype(np.int32)[:, None],
                local,
                out=local_index[done:end].reshape(shape),
            )
            np.add(
                templates.remote_start.astype(np.int32)[:, None],
                remote,
                out=remote_index[done:end].reshape(shape),
            )
            done = end
            nbytes += int(templates.length.sum()) * count
            breaks = (np.diff(local) != 1) | (np.diff(remote) != 1)
            dense = int(templates.dense.sum())
            descriptors += dense * (1 + int(breaks.sum())) + (len(templates.length) - dense) * count
        extra = self._extra(found)
        return Selection(
            local_index,
            remote_index,
            extra,
            nbytes + int(extra[:, 2].sum()),
            descriptors + len(extra),
        )

    def _extra(self, found: dict[Track, Granules]) -> npt.NDArray[np.uint64]:
        pieces = [
            grid.piece(place) for grid in self._grids for place in found[grid.lane.track].partial
        ]
        if not pieces:
            return np.zeros((0, 3), dtype=np.uint64)
        local, remote, length = (np.concatenate(column) for column in zip(*pieces, strict=True))
        return np.stack(coalesce(local, remote, length), axis=1).astype(np.uint64)


def make_plan(local: RankLayout, remote: RankLayout, assignment: Assignment) -> ReadPlan:
    """Prepare reading an assignment of `assign(local, remotes)` from its remote rank.

    Raises `UnsupportedGeometry` when the layouts have so little in common that the prepared lists
    would be absurd.
    """
    grids = [_grid(local, remote, box) for box in assignment.boxes]
    lanes: dict[_Lane, list[tuple[Ints, Ints, Ints]]] = {}
    total = 0
    for grid in grids:
        runs = grid.runs(grid.lane.track.granule)
        total += len(runs[0])
        if total > MAX_TEMPLATES:
            raise UnsupportedGeometry(
                f"more than {MAX_TEMPLATES} runs of {int(runs[2][0])} bytes for each granule"
            )
        lanes.setdefault(grid.lane, []).append(runs)
    merged = [
        (lane, *coalesce(*(np.concatenate(column) for column in zip(*runs, strict=True))))
        for lane, runs in lanes.items()
    ]
    for wide in (True, False):
        local_list, remote_list = RowList(local.device, wide), RowList(remote.device, wide)
        templates = []
        for lane, local_at, remote_at, length in merged:
            local_start, local_numbers = local_list.add(lane.local, local_at, length)
            remote_start, remote_numbers = remote_list.add(lane.remote, remote_at, length)
            templates.append(
                _Templates(lane, length, local_numbers, remote_numbers, local_start, remote_start)
            )
        entries = max(local_list.entries, remote_list.entries)
        if entries <= MAX_ENTRIES:
            return ReadPlan(grids, templates, local_list.array(), remote_list.array())
    raise UnsupportedGeometry(
        f"the cache has {entries} pieces, the limit of a prepared list is {MAX_ENTRIES}"
    )


def _grid(local: RankLayout, remote: RankLayout, box: Box) -> _Grid:
    ours, theirs = local.families[box.local_family], remote.families[box.remote_family]
    track = Track(
        Side.of("local", local.group(ours.group), ours),
        Side.of("remote", remote.group(theirs.group), theirs),
        ours.window,
        ours.axis("token") is not None,
    )
    h0, h1 = box.heads
    token, head = _pair(ours, theirs, "token"), _pair(ours, theirs, "head")
    dims = [
        _pair(ours, theirs, axis.name)
        for axis in ours.axes
        if axis.name not in ("block", "token", "head")
    ]
    dims.append(head._replace(extent=h1 - h0))
    local_at = np.array(local.addresses(ours), dtype=np.int64)[list(box.local_regions)]
    remote_at = np.array(remote.addresses(theirs), dtype=np.int64)[list(box.remote_regions)]
    return _Grid(
        _Lane(track, _pace(ours, track), _pace(theirs, track)),
        local_at + (h0 - ours.heads[0]) * head.local,
        remote_at + (h0 - theirs.heads[0]) * head.remote,
        tuple(dims),
        token,
        ours.itemsize,
    )


def _pair(ours: Family, theirs: Family, name: str) -> Dim:
    one = ours.axis(name) or Axis(name, 1, 0)
    other = theirs.axis(name) or Axis(name, 1, 0)
    return Dim(one.extent, one.stride, other.stride)


def _pace(family: Family, track: Track) -> Pace:
    slots = family.block_tokens // track.granule if track.tokenwise else 1
    token = family.axis("token")
    stride = token.stride * track.granule if token and slots > 1 else 0
    return Pace(family.block.extent, family.block.stride, slots, stride)
