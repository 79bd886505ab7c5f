"""Which bytes of a cache a transfer concerns: what a mirror in other memory has to copy.

A mirror is a second memory laid out like the first, so that one span of bytes stands for both
sides. Spans are (range, begin, end): the number of the memory range, and bytes from its begin.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvagent.core.ledger import written_blocks
from kvagent.core.plan import ReadPlan, Selection
from kvagent.core.regions import MemoryRange, RankLayout
from kvagent.core.rows import row_addresses
from kvagent.core.runs import Dim, box_runs

__all__ = ["Span", "block_spans", "selected_spans"]

Ints = npt.NDArray[np.int64]


class Span(NamedTuple):
    memory: int
    begin: int
    end: int


def block_spans(
    layout: RankLayout, blocks: Sequence[npt.NDArray[np.int32]], num_tokens: int
) -> list[Span]:
    """Every byte of the blocks that hold the first `num_tokens` tokens, of all regions.

    `blocks` is one list per cache group; ids outside the cache are left out: whoever asks for them
    is refused by the plan.
    """
    held = written_blocks([layout], blocks, 0, num_tokens)
    begins, lengths = [], []
    for family in layout.families:
        group = layout.group(family.group)
        ids = np.unique(np.asarray(held.get(family.group, ()), dtype=np.int64))
        ids = ids[(ids >= 0) & (ids < group.num_blocks)]
        split = family.block.extent // group.num_blocks
        physical = (ids[:, None] * split + np.arange(split)).ravel()
        inner = [Dim(a.extent, a.stride, a.stride) for a in family.axes if a.name != "block"]
        runs, _, length = box_runs(inner, family.itemsize)
        regions = np.array(layout.addresses(family), dtype=np.int64)
        starts = regions[:, None, None] + (physical * family.block.stride)[:, None] + runs
        begins.append(starts.ravel())
        lengths.append(np.full(starts.size, length, dtype=np.int64))
    return _spans(layout.ranges, np.concatenate(begins), np.concatenate(lengths))


def selected_spans(
    ranges: Sequence[MemoryRange], picked: Iterable[tuple[ReadPlan, Selection]]
) -> list[Span]:
    """Every local byte, in `ranges`, that some selections of plans read."""
    begins = [np.zeros(0, np.int64)]
    lengths = [np.zeros(0, np.int64)]
    for plan, selection in picked:
        at, length = row_addresses(plan.local_rows, selection.local_index)
        extra = selection.extra.astype(np.int64)
        begins += [at, extra[:, 0]]
        lengths += [length, extra[:, 2]]
    return _spans(ranges, np.concatenate(begins), np.concatenate(lengths))


def _spans(ranges: Sequence[MemoryRange], begin: Ints, length: Ints) -> list[Span]:
    """Runs by address as spans, in order, neighbours joined."""
    if not len(begin):
        return []
    order = np.argsort(begin, kind="stable")
    begin, end = begin[order], (begin + length)[order]
    by_address = sorted(range(len(ranges)), key=lambda i: ranges[i].address)
    starts = np.array([ranges[i].address for i in by_address], dtype=np.int64)
    owner = np.searchsorted(starts, begin, side="right") - 1
    # The heads of a token may come from several ranks: together they are one run.
    reach = np.maximum.accumulate(end)
    fresh = np.ones(len(begin), dtype=bool)
    fresh[1:] = (begin[1:] > reach[:-1]) | (owner[1:] != owner[:-1])
    first = np.flatnonzero(fresh)
    last = np.append(first[1:], len(begin)) - 1
    spans = []
    for at, stop, place in zip(
        begin[first].tolist(), reach[last].tolist(), owner[first].tolist(), strict=True
    ):
        index = by_address[place]
        memory = ranges[index]
        assert memory.address <= at < stop <= memory.address + memory.nbytes
        spans.append(Span(index, at - memory.address, stop - memory.address))
    return spans
