"""Two layouts and block ids to the runs of bytes to read.

A `ReadPlan` is made once per pair of ranks. For each box of the assignment it holds the runs of
one granule (see `track`), as rows of NIXL's strided prepared lists: a row is a run repeated over
all granules of the cache, so its size does not depend on the number of blocks. A fetch then only
picks entries of the rows, with numpy. Pieces of granules at the ends of the wanted tokens come as
explicit runs beside them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from kvagent.core.assign import Assignment, Box, assign
from kvagent.core.grids import MAX_TEMPLATES, Grid, Lane, make_grid
from kvagent.core.regions import RankLayout
from kvagent.core.rows import MAX_ENTRIES, Numbering, RowList
from kvagent.core.runs import coalesce
from kvagent.core.track import BlockTables, Granules, Track
from kvagent.errors import BlockRangeError, UnsupportedGeometry

__all__ = ["Assignment", "Box", "ReadPlan", "Selection", "assign", "make_plan"]

Ints = npt.NDArray[np.int64]
Entries = npt.NDArray[np.int32]

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
class _Templates:
    """The runs of one lane, and where their rows start in the two prepared lists."""

    lane: Lane
    length: Ints
    local: Numbering
    remote: Numbering
    local_start: Ints
    remote_start: Ints

    @cached_property
    def dense(self) -> int:
        """Runs whose neighbours in their row are neighbours in memory, on both sides."""
        even = (self.length == self.local.stride) & (self.length == self.remote.stride)
        return int(np.count_nonzero(even))

    @cached_property
    def nbytes(self) -> int:
        """Of all runs of one granule."""
        return int(self.length.sum())

    @cached_property
    def first(self) -> tuple[Entries, Entries]:
        """The local and remote entries of granule 0, one run below the other."""
        local, remote = (start.astype(np.int32) for start in (self.local_start, self.remote_start))
        return local[:, None], remote[:, None]

    def entries(self, granules: Granules) -> tuple[Entries, Entries]:
        """The local and remote entries of each (whole) granule, from a run's first one."""
        return (
            self.local.entries(granules.local_block, granules.local_slot),
            self.remote.entries(granules.remote_block, granules.remote_slot),
        )

    def merged(self, local: Entries, remote: Entries) -> int:
        """Descriptors left of such entries, of all runs, after NIXL has merged neighbours."""
        broken = (local[1:] - local[:-1] != 1) | (remote[1:] - remote[:-1] != 1)
        breaks = int(np.count_nonzero(broken))
        return self.dense * (1 + breaks) + (len(self.length) - self.dense) * len(local)


class ReadPlan:
    """How to read one assignment: see `make_plan`.

    local_rows, remote_rows: uint64, N x 5 (address, bytes, device, stride, count): NIXL's strided
    prepared lists. N may differ between the two; entries picked together have equal lengths.
    grids: what the boxes of the assignment are, in their order.
    """

    def __init__(
        self,
        grids: Sequence[Grid],
        templates: Sequence[_Templates],
        local_rows: npt.NDArray[np.uint64],
        remote_rows: npt.NDArray[np.uint64],
    ) -> None:
        self.local_rows = local_rows
        self.remote_rows = remote_rows
        self.grids = grids
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
        return self.pick(self.locate(local_blocks, remote_blocks, start_token, num_tokens))

    def locate(
        self,
        local_blocks: BlockTables,
        remote_blocks: BlockTables,
        start_token: int,
        num_tokens: int,
    ) -> dict[Track, Granules]:
        """The first half of `select`: where the tokens lie, checked."""
        if not 0 <= start_token <= num_tokens:
            raise BlockRangeError(f"tokens [{start_token}, {num_tokens}) are not a range")
        tracks = dict.fromkeys(grid.lane.track for grid in self.grids)
        return {
            track: track.select(local_blocks, remote_blocks, start_token, num_tokens)
            for track in tracks
        }

    def pick(self, found: Mapping[Track, Granules]) -> Selection:
        """The second half of `select`; tracks that are not in `found` are left out."""
        chosen = [(t, found[t.lane.track]) for t in self._templates if t.lane.track in found]
        entries = sum(len(t.length) * len(granules.local_block) for t, granules in chosen)
        if entries > MAX_DESCRIPTORS:
            raise UnsupportedGeometry(
                f"{entries} pieces of {self.shortest_run} to {self.longest_run} bytes, the limit "
                f"is {MAX_DESCRIPTORS}"
            )
        local_index = np.empty(entries, dtype=np.int32)
        remote_index = np.empty(entries, dtype=np.int32)
        nbytes = descriptors = done = 0
        for templates, granules in chosen:
            count = len(granules.local_block)
            if not count:
                continue
            local, remote = templates.entries(granules)
            end = done + count * len(templates.length)
            shape = (len(templates.length), count)
            first_local, first_remote = templates.first
            np.add(first_local, local, out=local_index[done:end].reshape(shape))
            np.add(first_remote, remote, out=remote_index[done:end].reshape(shape))
            done = end
            nbytes += templates.nbytes * count
            descriptors += templates.merged(local, remote)
        extra = self._extra(found)
        if len(extra):
            nbytes += int(extra[:, 2].sum())
            descriptors += len(extra)
        return Selection(local_index, remote_index, extra, nbytes, descriptors)

    def measure(self, track: Track, granules: Granules) -> tuple[int, int]:
        """Bytes and descriptors of `pick({track: granules})`, without its index arrays."""
        extra = self._extra({track: granules})
        nbytes, descriptors = int(extra[:, 2].sum()), len(extra)
        count = len(granules.local_block)
        for templates in self._templates:
            if templates.lane.track == track and count:
                nbytes += templates.nbytes * count
                descriptors += templates.merged(*templates.entries(granules))
        return nbytes, descriptors

    def per_granule(self, track: Track) -> tuple[int, int]:
        """Bytes and runs of one granule of a track, before neighbours merge."""
        lengths = [t.length for t in self._templates if t.lane.track == track]
        return sum(int(length.sum()) for length in lengths), sum(map(len, lengths))

    def _extra(self, found: Mapping[Track, Granules]) -> npt.NDArray[np.uint64]:
        pieces = [
            grid.piece(place)
            for grid in self.grids
            if grid.lane.track in found
            for place in found[grid.lane.track].partial
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
    grids = [make_grid(local, remote, box) for box in assignment.boxes]
    lanes: dict[Lane, list[tuple[Ints, Ints, Ints]]] = {}
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
