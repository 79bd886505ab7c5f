"""Tokens to granules: which granule of which block, on both sides, holds the same tokens.

A **granule** is the largest stretch of tokens that is never split by a block boundary or a token
shard's boundary on either side: the gcd of both block sizes, and of the interleaves of split
contexts. Both sides are aligned by token position; the lengths of block lists mean nothing beyond
having to be long enough. Knows nothing of bytes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvagent.core.regions import CacheGroup, Family
from kvagent.core.shards import held, held_before, own_number
from kvagent.core.specs import TokenShard
from kvagent.errors import BlockRangeError, UnsupportedGeometry

__all__ = ["Granules", "Place", "Side", "Track"]

Ints = npt.NDArray[np.int64]

BlockTables = Sequence[npt.NDArray[np.int32]]
"""One list of block ids per cache group, in the order of the groups' indices."""


@dataclass(frozen=True)
class Side:
    """What one side's block tables mean: `block_tokens` tokens in each physical block, `split`
    physical blocks in each of the `num_blocks` block ids of cache group `group`."""

    name: str
    group: int
    block_tokens: int
    split: int
    num_blocks: int
    shard: TokenShard

    @classmethod
    def of(cls, name: str, group: CacheGroup, family: Family) -> Side:
        split = family.block.extent // group.num_blocks
        return cls(name, group.index, family.block_tokens, split, group.num_blocks, group.tokens)

    def physical(self, tables: BlockTables, wanted: Ints) -> Ints:
        """Physical block numbers for (rising) places in the list of physical blocks.

        Raises `BlockRangeError` when the list is too short, when an id is outside the cache, and
        when one id stands at two of the places.
        """
        entries = wanted // self.split if self.split > 1 else wanted
        table = self._table(tables, int(entries[-1]) + 1 if len(entries) else 0)
        ids: Ints = table[entries].astype(np.int64)
        self._check_range(ids)
        rises = entries[1:] != entries[:-1]
        self._check_twice(
            np.sort(ids if rises.all() else ids[np.flatnonzero(np.append(True, rises))])
        )
        return ids * self.split + wanted % self.split if self.split > 1 else ids

    def between(self, tables: BlockTables, first: int, last: int) -> Ints:
        """`physical` of the places from `first` to before `last`, without the check for ids that
        stand there twice; `split` is 1."""
        ids: Ints = self._table(tables, last)[first:last].astype(np.int64)
        self._check_range(ids)
        return ids

    def _table(self, tables: BlockTables, needed: int) -> npt.NDArray[np.int32]:
        """The list of at least so many block ids."""
        if self.group >= len(tables):
            raise BlockRangeError(f"there is no {self.name} block list for group {self.group}")
        table = np.asarray(tables[self.group])
        if needed > len(table):
            raise BlockRangeError(
                f"group {self.group}: {needed} {self.name} blocks of "
                f"{self.block_tokens * self.split} tokens are needed, {len(table)} are given"
            )
        return table

    def _check_range(self, ids: Ints) -> None:
        if len(ids) and int(ids.view(np.uint64).max()) >= self.num_blocks:  # or below 0
            bad = (ids < 0) | (ids >= self.num_blocks)
            raise BlockRangeError(
                f"group {self.group}: {self.name} block id {int(ids[bad][0])} is outside the "
                f"cache of {self.num_blocks} blocks"
            )

    def _check_twice(self, rising: Ints) -> None:
        same = rising[1:] == rising[:-1]
        if np.count_nonzero(same):
            raise BlockRangeError(
                f"group {self.group}: {self.name} block id {int(rising[1:][same][0])} is in the "
                "list twice"
            )


class Place(NamedTuple):
    """A part of a granule: tokens `[begin, end)` of the granule in `slot` of a block."""

    local_block: int
    local_slot: int
    remote_block: int
    remote_slot: int
    begin: int
    end: int


class Granules(NamedTuple):
    """Physical blocks and the slots in them, entry by entry the same tokens on both sides, and
    the granules at the ends of which only a part is wanted.

    Sorted by local block and slot: whatever lies back to back on both sides is adjacent.
    """

    local_block: Ints
    local_slot: Ints
    remote_block: Ints
    remote_slot: Ints
    partial: tuple[Place, ...]


@dataclass(frozen=True)
class Track:
    """The correspondence of two sides' block tables for regions of one kind.

    `window` as in `Family`; `tokenwise`: whether there is a token axis. Without one (states, and
    values that belong to whole blocks) a granule is a block.
    """

    local: Side
    remote: Side
    window: int
    tokenwise: bool

    @cached_property
    def granule(self) -> int:
        """Tokens per granule; 1 for states."""
        if not self.tokenwise:
            return max(self.local.block_tokens, 1)
        sizes = [self.local.block_tokens, self.remote.block_tokens]
        if self.local.shard != self.remote.shard:
            sizes += [
                side.shard.interleave for side in (self.local, self.remote) if side.shard.size > 1
            ]
        return math.gcd(*sizes)

    def select(
        self, local_tables: BlockTables, remote_tables: BlockTables, start: int, stop: int
    ) -> Granules:
        """The granules of tokens `[start, stop)`, or of as many as the window leaves.

        Raises `BlockRangeError` for block lists that are too short, name an id outside the cache
        or name one twice; `UnsupportedGeometry` for a `start` inside a block whose values cannot
        be divided.
        """
        if self.local.block_tokens == 0:
            numbers = self._state(local_tables, remote_tables, start < stop)
            return self._locate(local_tables, remote_tables, numbers, numbers, [])
        size = self.granule
        same = self.local.shard == self.remote.shard
        oldest = max(stop - self.window, 0) if self.window else start
        if same:
            # Both sides number the tokens of the shard alike: count those instead.
            start, stop, oldest = (
                held_before(self.local.shard, token) for token in (start, stop, oldest)
            )
        low = max(start, oldest // size * size)
        if not self.tokenwise and low < stop:
            if low % size:
                raise UnsupportedGeometry(
                    f"group {self.local.group} has values for whole blocks of {size} tokens, so "
                    f"it can be read from the start of a block only, not from token {low}"
                )
            stop = -(-stop // size) * size
        first, last = low // size, -(-stop // size) if low < stop else low // size
        if self._plain and first < last and low == first * size and stop == last * size:
            return self._blocks(local_tables, remote_tables, first, last)
        numbers = np.arange(first, last)
        if not same:
            tokens = numbers * size
            both = held(self.local.shard, tokens) & held(self.remote.shard, tokens)
            tokens = tokens[both]
            numbers = numbers[both]
            local = own_number(self.local.shard, tokens) // size
            remote = own_number(self.remote.shard, tokens) // size
        else:
            local = remote = numbers
        ragged = []
        for i in sorted({0, len(numbers) - 1}) if len(numbers) else ():
            first = int(numbers[i]) * size
            begin, end = max(low - first, 0), min(stop - first, size)
            if end - begin < size:
                ragged.append((i, begin, end))
        return self._locate(local_tables, remote_tables, local, remote, ragged)

    @cached_property
    def _plain(self) -> bool:
        """Whether a granule is a block of both sides."""
        sizes = {self.local.block_tokens, self.remote.block_tokens, self.granule}
        splits = {self.local.split, self.remote.split}
        return len(sizes) == 1 and splits == {1} and self.local.shard == self.remote.shard

    def _blocks(self, local: BlockTables, remote: BlockTables, first: int, last: int) -> Granules:
        """What most fetches want, whole blocks of two equal sides: as `_locate`, in fewer steps,
        since with a few blocks each step counts."""
        here = self.local.between(local, first, last)
        there = self.remote.between(remote, first, last)
        if not _rise(there):
            self.remote._check_twice(np.sort(there))
        if not _rise(here):
            order = np.argsort(here, kind="stable")
            here, there = here[order], there[order]
            self.local._check_twice(here)
        slots = np.zeros(last - first, np.int64)
        return Granules(here, slots, there, slots, ())

    def _state(self, local: BlockTables, remote: BlockTables, wanted: bool) -> Ints:
        for side, tables in ((self.local, local), (self.remote, remote)):
            if wanted and side.group < len(tables) and len(tables[side.group]) != 1:
                raise BlockRangeError(
                    f"group {side.group} holds states: it takes exactly one {side.name} block "
                    f"id, not {len(tables[side.group])}"
                )
        return np.zeros(int(wanted), dtype=np.int64)

    def _locate(
        self,
        local_tables: BlockTables,
        remote_tables: BlockTables,
        local: Ints,
        remote: Ints,
        ragged: list[tuple[int, int, int]],
    ) -> Granules:
        """`ragged`: (entry, begin, end) of the entries of which only a part is wanted."""
        places: list[Ints] = []
        for side, tables, numbers in (
            (self.local, local_tables, local),
            (self.remote, remote_tables, remote),
        ):
            slots = max(side.block_tokens, 1) // self.granule
            places.append(side.physical(tables, numbers // slots if slots > 1 else numbers))
            places.append(numbers % slots if slots > 1 else np.zeros_like(numbers))
        local_block, local_slot, remote_block, remote_slot = places
        partial = tuple(
            Place(
                int(local_block[i]),
                int(local_slot[i]),
                int(remote_block[i]),
                int(remote_slot[i]),
                begin,
                end,
            )
            for i, begin, end in ragged
        )
        order = np.argsort(local_block, kind="stable")  # the slots of one block stay in order
        if ragged:
            order = order[~np.isin(order, [i for i, _, _ in ragged])]
        return Granules(
            local_block[order],
            local_slot[order],
            remote_block[order],
            remote_slot[order],
            partial,
        )


def _rise(ids: Ints) -> bool:
    """Whether each is larger than the one before it."""
    return not np.count_nonzero(ids[1:] <= ids[:-1])
