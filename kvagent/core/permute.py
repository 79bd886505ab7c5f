"""Copies between two layouts in host memory: the granules of a box, from one order to another.

Memory is given as flat arrays of bytes, and numpy checks that every access lies inside. Runs are
elements of an opaque dtype, so that numpy's own loops copy them: the only loop here is over
regions. What is copied, and when, is decided in `staging`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvagent.core.rows import Pace
from kvagent.core.runs import Dim, common_run
from kvagent.core.track import Granules, Place

__all__ = ["Bytes", "Permutation"]

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class Permutation:
    """The regions of one box here ("local") and in one other array of bytes ("remote").

    memories, local: array and byte offset of each region; remote: offset of each in the other.
    local_pace, remote_pace: how granules repeat; dims, token: what one consists of, `token` with
    as many tokens as a granule has.
    """

    memories: tuple[int, ...]
    local: tuple[int, ...]
    remote: tuple[int, ...]
    local_pace: Pace
    remote_pace: Pace
    dims: tuple[Dim, ...]
    token: Dim
    itemsize: int

    @property
    def run(self) -> int:
        """Bytes of the runs that both sides have in common."""
        return common_run((*self.dims, self.token), self.itemsize)[0]

    def copy(self, granules: Granules, local: Sequence[Bytes], remote: Bytes) -> None:
        """Copy granules and parts of them from `remote` into `local`, and nothing else.

        `granules` must be sorted by remote block and slot.
        """
        if len(granules.local_block):
            self._copy_whole(granules, local, remote)
        for place in granules.partial:
            self._copy_part(place, local, remote)

    def _copy_whole(self, granules: Granules, local: Sequence[Bytes], remote: Bytes) -> None:
        run, dims = common_run((*self.dims, self.token), self.itemsize)
        element = np.dtype((np.void, run))
        extents = tuple(dim.extent for dim in dims)
        ours, theirs = self.local_pace, self.remote_pace
        into: tuple[npt.NDArray[np.int64], ...] = (granules.local_block, granules.local_slot)
        begin, end = int(granules.remote_block[0]), int(granules.remote_block[-1]) + 1
        # Every granule of a stretch of blocks: a slice of the source, and no copy of it.
        complete = (end - begin) * theirs.slots == len(into[0])
        if complete:
            into = tuple(index.reshape(end - begin, theirs.slots) for index in into)
        for memory, at, source_at in zip(self.memories, self.local, self.remote, strict=True):
            target: npt.NDArray[np.void] = np.ndarray(
                (ours.blocks, ours.slots, *extents),
                element,
                local[memory],
                at,
                (ours.block_stride, ours.slot_stride, *(dim.local for dim in dims)),
            )
            source: npt.NDArray[np.void] = np.ndarray(
                (theirs.blocks, theirs.slots, *extents),
                element,
                remote,
                source_at,
                (theirs.block_stride, theirs.slot_stride, *(dim.remote for dim in dims)),
            )
            if complete:
                target[into] = source[begin:end]
            else:
                target[into] = source[granules.remote_block, granules.remote_slot]

    def _copy_part(self, place: Place, local: Sequence[Bytes], remote: Bytes) -> None:
        tokens = self.token._replace(extent=place.end - place.begin)
        run, dims = common_run((*self.dims, tokens), self.itemsize)
        element = np.dtype((np.void, run))
        extents = tuple(dim.extent for dim in dims)
        ours, theirs = self.local_pace, self.remote_pace
        into = (
            place.local_block * ours.block_stride
            + place.local_slot * ours.slot_stride
            + place.begin * tokens.local
        )
        out_of = (
            place.remote_block * theirs.block_stride
            + place.remote_slot * theirs.slot_stride
            + place.begin * tokens.remote
        )
        for memory, at, source_at in zip(self.memories, self.local, self.remote, strict=True):
            target: npt.NDArray[np.void] = np.ndarray(
                extents, element, local[memory], at + into, tuple(dim.local for dim in dims)
            )
            target[...] = np.ndarray(
                extents, element, remote, source_at + out_of, tuple(dim.remote for dim in dims)
            )
