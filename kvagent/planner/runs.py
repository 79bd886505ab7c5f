"""The runs of bytes that one request comes to, for good and for bad block tables."""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec
import numpy as np
import numpy.typing as npt

from kvagent.core.plan import ReadPlan, Selection
from kvagent.core.regions import CacheGroup, RankLayout

__all__ = ["Runs", "block_tables", "count_runs"]

CHUNK = 1 << 20
"""Entries of a selection that are looked at together; it bounds the memory needed."""

Ints = npt.NDArray[np.int64]


class Runs(msgspec.Struct, frozen=True):
    """Descriptors that NIXL gets, after neighbours have merged; bytes of the extreme ones."""

    descriptors: int
    shortest: int
    longest: int


def block_tables(
    layout: RankLayout, num_tokens: int, *, spread: bool, falling: bool = False
) -> list[npt.NDArray[np.int32]]:
    """A request's block lists. `spread`: no two of its blocks are neighbours, as far as half of
    the cache suffices; beyond, the rest goes between them, upwards or `falling`, so that hardly
    any two blocks are neighbours on both sides."""
    tables = [np.zeros(0, dtype=np.int32)] * (1 + max(group.index for group in layout.groups))
    for group in layout.groups:
        ids = np.arange(group.num_blocks, dtype=np.int32)
        if spread:
            between = ids[1::2]
            ids = np.concatenate([ids[::2], between[::-1] if falling else between])
        tables[group.index] = ids[: _blocks(group, num_tokens)]
    return tables


def _blocks(group: CacheGroup, num_tokens: int) -> int:
    return -(-num_tokens // (group.block_size * group.tokens.size)) if group.block_size else 1


@dataclass
class _Lengths:
    """Bytes of runs, counted as they come."""

    number: int = 0
    shortest: int = 0
    longest: int = 0
    local_end: int = field(default=-1, repr=False)
    remote_end: int = field(default=-1, repr=False)
    open: int = field(default=0, repr=False)

    def add(self, local: Ints, remote: Ints, length: Ints) -> None:
        """The next entries, in order; those that continue the last run lengthen it."""
        joined = np.empty(len(length), dtype=np.bool_)
        joined[0] = self.open > 0 and self.local_end == local[0] and self.remote_end == remote[0]
        joined[1:] = (local[:-1] + length[:-1] == local[1:]) & (
            remote[:-1] + length[:-1] == remote[1:]
        )
        starts = np.flatnonzero(np.concatenate(([True], ~joined[1:])))
        runs = np.add.reduceat(length, starts)
        if joined[0]:
            runs[0] += self.open
        else:
            self.end()
        self.count(runs[:-1])
        self.open = int(runs[-1])
        self.local_end = int(local[-1] + length[-1])
        self.remote_end = int(remote[-1] + length[-1])

    def end(self) -> None:
        """Nothing continues the last run."""
        if self.open:
            self.count(np.array([self.open], dtype=np.int64))
        self.open = 0

    def count(self, runs: Ints) -> None:
        """Whole runs of so many bytes."""
        if len(runs):
            least = int(runs.min())
            self.shortest = min(self.shortest, least) if self.number else least
            self.longest = max(self.longest, int(runs.max()))
            self.number += len(runs)


def count_runs(plan: ReadPlan, selection: Selection) -> Runs:
    """The runs that a selection comes to once NIXL has merged neighbours in its index arrays."""
    lengths = _Lengths()
    for begin in range(0, len(selection.local_index), CHUNK):
        local, length = _entries(plan.local_rows, selection.local_index[begin : begin + CHUNK])
        remote, _ = _entries(plan.remote_rows, selection.remote_index[begin : begin + CHUNK])
        lengths.add(local, remote, length)
    lengths.end()
    lengths.count(selection.extra[:, 2].astype(np.int64))
    return Runs(selection.descriptors, lengths.shortest, lengths.longest)


def _entries(rows: npt.NDArray[np.uint64], index: npt.NDArray[np.int32]) -> tuple[Ints, Ints]:
    """Addresses and lengths of entries of a prepared list."""
    table = rows.astype(np.int64)
    ends = np.cumsum(table[:, 4])
    row = np.searchsorted(ends, index, side="right")
    within = index - (ends - table[:, 4])[row]
    return table[row, 0] + within * table[row, 3], table[row, 1]
