"""Prepared lists: a run repeated over all granules of a cache, as NIXL's strided rows.

A list's entries are numbered through its rows: a row (address, bytes, device, stride, count) has
`count` entries. Knows nothing of tokens or of the other side.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

__all__ = ["MAX_ENTRIES", "Numbering", "Pace", "RowList", "row_addresses"]

Ints = npt.NDArray[np.int64]

MAX_ENTRIES = (1 << 31) - 1
"""Entries of one prepared list: its indices are int32."""


@dataclass(frozen=True)
class Pace:
    """How a region repeats on one side: `blocks` blocks of `slots` granules, strides in bytes."""

    blocks: int
    block_stride: int
    slots: int
    slot_stride: int


@dataclass(frozen=True)
class Numbering:
    """Which entry of a run's rows a granule is: `block * per_block + slot * per_slot`."""

    per_block: int
    per_slot: int
    rows: int
    count: int
    stride: int

    @classmethod
    def of(cls, pace: Pace, wide: bool) -> Numbering:
        """One row when slots go on evenly from block to block, or, if `wide`, when blocks are a
        whole number of slots apart (the row then runs over memory that is never picked);
        otherwise a row for each slot."""
        if pace.slots == 1:
            return cls(1, 0, 1, pace.blocks, pace.block_stride)
        even = pace.slots * pace.slot_stride
        if pace.blocks == 1 or pace.block_stride == even:
            return cls(pace.slots, 1, 1, pace.blocks * pace.slots, pace.slot_stride)
        step, rest = divmod(pace.block_stride, pace.slot_stride)
        if wide and not rest:
            count = (pace.blocks - 1) * step + pace.slots
            return cls(step, 1, 1, count, pace.slot_stride)
        return cls(1, pace.blocks, pace.slots, pace.blocks, pace.block_stride)

    def entries(self, blocks: Ints, slots: Ints) -> npt.NDArray[np.int32]:
        """The entries of granules, counted from the run's first row."""
        if self.per_slot == 0:
            return blocks.astype(np.int32)
        return (blocks * self.per_block + slots * self.per_slot).astype(np.int32)

    def rows_of(self, pace: Pace, address: Ints, length: Ints, device: int) -> Ints:
        """N x 5 rows for runs that start at `address` in slot 0 of block 0."""
        slots = np.arange(self.rows, dtype=np.int64) * pace.slot_stride
        rows = np.empty((len(address) * self.rows, 5), dtype=np.int64)
        rows[:, 0] = (address[:, None] + slots).ravel()
        rows[:, 1] = np.repeat(length, self.rows)
        rows[:, 2] = device
        rows[:, 3] = self.stride if self.count > 1 else rows[:, 1]
        rows[:, 4] = self.count
        return rows


class RowList:
    """A prepared list in the making."""

    def __init__(self, device: int, wide: bool) -> None:
        self.entries = 0
        self._device = device
        self._wide = wide
        self._rows: list[Ints] = []

    def add(self, pace: Pace, address: Ints, length: Ints) -> tuple[Ints, Numbering]:
        """Append the rows of runs at `address`: each run's first entry, and how to count on."""
        numbering = Numbering.of(pace, self._wide)
        each = numbering.rows * numbering.count
        start = self.entries + each * np.arange(len(address), dtype=np.int64)
        self.entries += each * len(address)
        self._rows.append(numbering.rows_of(pace, address, length, self._device))
        return start, numbering

    def array(self) -> npt.NDArray[np.uint64]:
        return np.concatenate(self._rows).astype(np.uint64)


def row_addresses(rows: npt.NDArray[np.uint64], index: npt.NDArray[np.int32]) -> tuple[Ints, Ints]:
    """Address and bytes of entries of a prepared list, N x 5 as `RowList.array` makes it."""
    table = rows.astype(np.int64)
    ends = np.cumsum(table[:, 4])
    row = np.searchsorted(ends, index, side="right")
    number = index - (ends - table[:, 4])[row]
    return table[row, 0] + number * table[row, 3], table[row, 1]
