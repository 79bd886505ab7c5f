"""The ledger of an engine's blocks: at any moment each is in exactly one state.

    free      not ours: the engine may do with it what it likes
    offered   lent, and nobody has claimed it yet
    claimed   lent, and another engine reads it
    reserved  promised to a fetch that has posted nothing yet
    in_flight a fetch writes it, or waits for the producer's word that what it wrote is good
    quarantined   its fetch failed, and a read may still write into it

Lending can be shared (requests with a common prefix lend the same blocks; the strongest state
counts), writing cannot: a block that is written has one fetch, and is not lent. What contradicts
this is refused with `BlockInUseError`, since one of both requests would get wrong bytes: the
scheduler gave a block out before it was reported free.

The tables of leases and fetches keep the ledger; block ids outside the cache are not its
business (the plan refuses them).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from enum import Enum

import numpy as np
import numpy.typing as npt

from kvagent.core.regions import CacheGroup, RankLayout
from kvagent.errors import BlockInUseError

__all__ = ["BlockState", "Holding", "Ledger", "written_blocks"]

Ids = npt.NDArray[np.int32]


class BlockState(str, Enum):
    FREE = "free"
    OFFERED = "offered"
    CLAIMED = "claimed"
    RESERVED = "reserved"
    IN_FLIGHT = "in_flight"
    QUARANTINED = "quarantined"


_WRITTEN = (BlockState.RESERVED, BlockState.IN_FLIGHT, BlockState.QUARANTINED)
_LENT = (BlockState.OFFERED, BlockState.CLAIMED)
_STATES = tuple(BlockState)
_NUMBER = {state: number for number, state in enumerate(_STATES)}
_ALL = slice(None)


class _Group:
    """The blocks of one cache group."""

    def __init__(self, num_blocks: int) -> None:
        self.lent_in = np.zeros((len(_LENT), num_blocks), np.int32)
        self.lent = dict(zip(_LENT, self.lent_in, strict=True))
        """How many leases of each block are in that state: a row of `lent_in`."""
        self.written = np.zeros(num_blocks, np.int8)
        """Index into `_STATES`; 0: not written."""

    def states(self, ids: Ids | slice) -> npt.NDArray[np.int8]:
        """Indices into `_STATES`; costs as much as `ids` are."""
        states: npt.NDArray[np.int8] = self.written[ids].copy()
        for state in _LENT:
            states[self.lent[state][ids] > 0] = _STATES.index(state)
        return states

    def in_use(self, ids: Ids) -> bool:
        """Whether any of these is not free."""
        # Counting is quicker than `any`, and ids are few.
        return bool(np.count_nonzero(self.written[ids]) or np.count_nonzero(self.lent_in[:, ids]))


class Holding:
    """The blocks of one lease or one fetch; made by the ledger, ended by its owner."""

    __slots__ = ("_blocks", "_state")

    def __init__(self, blocks: list[tuple[_Group, Ids]], state: BlockState) -> None:
        self._blocks = blocks
        self._state = BlockState.FREE
        self.move(state)

    def move(self, state: BlockState) -> None:
        """All blocks into `state`; `FREE` ends the holding, and moving an ended one is nothing."""
        old, self._state = self._state, state
        if old is state:
            return
        for group, ids in self._blocks:
            if old in _LENT:
                group.lent[old][ids] -= 1
            if state in _LENT:
                group.lent[state][ids] += 1
            elif old not in _LENT:
                group.written.put(ids, _NUMBER[state])
        if state is BlockState.FREE:
            self._blocks = []


class Ledger:
    """Of one engine; lives at its leader. Knows no blocks until `know` is called."""

    def __init__(self) -> None:
        self._groups: dict[int, _Group] = {}

    def reset(self) -> None:
        """The cache is another one. Holdings of the old one may end whenever they like."""
        self._groups = {}

    def know(self, groups: Iterable[CacheGroup]) -> None:
        """Cache groups of any rank; those known already are left as they are."""
        for group in groups:
            if group.index not in self._groups:
                self._groups[group.index] = _Group(group.num_blocks)

    def lend(self, blocks: Sequence[Ids]) -> Holding:
        """One list of ids per group, `OFFERED` now. Raises `BlockInUseError`."""
        known = self._known(dict(enumerate(blocks)))
        for index, group, ids in known:
            self._refuse(index, group, ids, group.written[ids] > 0)
        return Holding([(group, ids) for _, group, ids in known], BlockState.OFFERED)

    def reserve(self, blocks: Mapping[int, Ids]) -> Holding:
        """Ids by group, `RESERVED` now. Raises `BlockInUseError`."""
        known = self._known(blocks)
        for index, group, ids in known:
            if group.in_use(ids):
                self._refuse(index, group, ids, group.states(ids) > 0)
        return Holding([(group, ids) for _, group, ids in known], BlockState.RESERVED)

    def counts(self) -> dict[str, int]:
        """Blocks by state; the sum is the size of the cache, over all groups."""
        total = np.zeros(len(_STATES), np.int64)
        for group in self._groups.values():
            total += np.bincount(group.states(_ALL), minlength=len(_STATES))
        return {state.value: int(count) for state, count in zip(_STATES, total, strict=True)}

    def _known(self, blocks: Mapping[int, Ids]) -> list[tuple[int, _Group, Ids]]:
        found = []
        for index, ids in blocks.items():
            group = self._groups.get(index)
            if group is not None:
                if len(ids) and ids.view(np.uint32).max() >= len(group.written):  # or below 0
                    ids = ids[(ids >= 0) & (ids < len(group.written))]
                found.append((index, group, ids))
        return found

    @staticmethod
    def _refuse(index: int, group: _Group, ids: Ids, taken: npt.NDArray[np.bool_]) -> None:
        if taken.any():
            first = ids[taken][:1]
            block, state = int(first[0]), _STATES[group.states(first)[0]].value
            raise BlockInUseError(
                f"block {block} of group {index} is {state}: it was given out again before "
                "step() reported it free"
            )


def written_blocks(
    layouts: Sequence[RankLayout], blocks: Sequence[Ids], start_token: int, num_tokens: int
) -> dict[int, Ids]:
    """The blocks, by group, that tokens `[start_token, num_tokens)` are written into.

    `layouts` are those of an engine's ranks. Blocks before `start_token` (a prefix hit) and those
    that no window reaches are not touched, and may be shared.
    """
    if start_token >= num_tokens:
        return {}
    windows: dict[int, list[int]] = {}
    for layout in layouts:
        for family in layout.families:
            windows.setdefault(family.group, []).append(family.window)
    groups = {group.index: group for layout in layouts for group in layout.groups}
    found: dict[int, Ids] = {}
    for index, group in groups.items():
        if index >= len(blocks) or index not in windows:
            continue
        ids = blocks[index]
        if group.block_size:
            reach = 0 if 0 in windows[index] else max(windows[index])
            first = max(start_token, num_tokens - reach) if reach else start_token
            per_block = group.block_size * group.tokens.size
            ids = ids[first // per_block : -(-num_tokens // per_block)]
        found[index] = ids
    return found
