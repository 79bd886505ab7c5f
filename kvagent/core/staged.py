"""What a staged read does: chunks of remote blocks, what to read of them, what to copy out.

Made by `staging`, which has the theory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvagent.core.estimate import Work, prefer_staging
from kvagent.core.permute import Bytes, Permutation
from kvagent.core.plan import ReadPlan, Selection
from kvagent.core.track import Granules, Track

__all__ = ["Chunk", "StagedPart", "StagedTrack"]

Ints = npt.NDArray[np.int64]


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

    def in_area(self, chunk: Chunk) -> Granules:
        """A chunk's granules, their remote blocks numbered as they lie in its area."""
        granules = chunk.granules
        return granules._replace(
            remote_block=np.searchsorted(chunk.blocks, granules.remote_block),
            partial=tuple(
                place._replace(remote_block=int(np.searchsorted(chunk.blocks, place.remote_block)))
                for place in granules.partial
            ),
        )

    def copy(self, chunk: Chunk, memory: Sequence[Bytes], area: Bytes) -> None:
        """Copy a chunk from its area to where it belongs. `memory`: all of the local ranges."""
        granules = self.in_area(chunk)
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
            yield Chunk(mine, Granules(local_block, local_slot, remote_block, remote_slot, partial))


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
