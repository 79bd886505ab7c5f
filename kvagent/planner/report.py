"""Who reads what from whom, in numbers: the plan of two engines before anything moves.

The consumer is the local side of every plan. Numbers are those of the plan that a transfer would
use, for one request of so many tokens: with block tables that count up (contiguous), and with
tables in which no two blocks are neighbours (fragmented). How they are shown: `table`, `drawing`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np
import numpy.typing as npt

from kvagent.core.compare import differences, one_sided_layers
from kvagent.core.plan import Assignment, ReadPlan, Selection, assign, make_plan
from kvagent.core.regions import CacheGroup, RankLayout
from kvagent.core.specs import TokenShard
from kvagent.errors import ConfigError, UnsupportedGeometry
from kvagent.planner.describe import Engine

__all__ = ["Piece", "PlanReport", "Rank", "Read", "Refusal", "Runs", "Side", "plan_report"]

DEFAULT_TOKENS = 4096
CHUNK = 1 << 20
"""Entries of a selection that are looked at together; it bounds the memory needed."""

Ints = npt.NDArray[np.int64]


class Place(msgspec.Struct, frozen=True):
    tp_rank: int
    pp_rank: int

    def __str__(self) -> str:
        return f"tp {self.tp_rank}, pp {self.pp_rank}"


class Piece(msgspec.Struct, frozen=True):
    """Heads `[heads[0], heads[1])` of `num_heads` of some parts of some layers; `(0, 1)` of 1 for
    what has no heads."""

    parts: tuple[str, ...]
    layers: tuple[str, ...]
    heads: tuple[int, int]
    num_heads: int


class Rank(msgspec.Struct, frozen=True):
    """What a rank holds. tokens: the shards of split contexts among its cache groups."""

    place: Place
    pieces: tuple[Piece, ...]
    tokens: tuple[TokenShard, ...]

    @property
    def layers(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(layer for piece in self.pieces for layer in piece.layers))


class Side(msgspec.Struct, frozen=True):
    engine: str
    tp_size: int
    pp_size: int
    ranks: tuple[Rank, ...]


class Runs(msgspec.Struct, frozen=True):
    """Descriptors that NIXL gets, after neighbours have merged; bytes of the extreme ones."""

    descriptors: int
    shortest: int
    longest: int


class Read(msgspec.Struct, frozen=True):
    """What one consumer rank reads from one producer rank."""

    consumer: Place
    producer: Place
    pieces: tuple[Piece, ...]
    nbytes: int
    contiguous: Runs
    fragmented: Runs


class Refusal(msgspec.Struct, frozen=True):
    """A field that keeps the two engines apart, and its values."""

    field: str
    consumer: str
    producer: str

    def __str__(self) -> str:
        return f"{self.field}: consumer {self.consumer!r}, producer {self.producer!r}"


class PlanReport(msgspec.Struct, frozen=True, kw_only=True):
    """refused: the fields that differ in meaning; unsupported: why no plan exists although all
    fields agree. Both empty: the pair works."""

    producer: Side
    consumer: Side
    start_token: int
    num_tokens: int
    only_producer: tuple[str, ...] = ()
    only_consumer: tuple[str, ...] = ()
    refused: tuple[Refusal, ...] = ()
    unsupported: str = ""
    reads: tuple[Read, ...] = ()

    @property
    def works(self) -> bool:
        return not self.refused and not self.unsupported

    @property
    def nbytes(self) -> int:
        return sum(read.nbytes for read in self.reads)


def plan_report(
    producer: Engine, consumer: Engine, num_tokens: int | None = None, start_token: int = 0
) -> PlanReport:
    """Plan reading tokens `[start_token, num_tokens)` of one request.

    num_tokens: by default as many as both caches hold, at most `DEFAULT_TOKENS`. Raises
    `ConfigError` for tokens that are no range or do not fit into a cache.
    """
    num_tokens = _fit_tokens((producer, consumer), num_tokens)
    if not 0 <= start_token <= num_tokens:
        raise ConfigError(f"start token {start_token} is not from 0 to {num_tokens}, the tokens")
    only_consumer, only_producer = one_sided_layers(consumer.shape, producer.shape)
    report = PlanReport(
        producer=_side(producer),
        consumer=_side(consumer),
        start_token=start_token,
        num_tokens=num_tokens,
        only_producer=only_producer,
        only_consumer=only_consumer,
    )
    found = differences(consumer.shape, producer.shape)
    if found:
        refused = tuple(Refusal(each.field, each.local, each.remote) for each in found)
        return msgspec.structs.replace(report, refused=refused)
    reads: list[Read] = []
    for layout in consumer.layouts:
        try:
            for assignment in assign(layout, producer.layouts):
                remote = producer.layouts[assignment.remote]
                reads.append(_read(layout, remote, assignment, start_token, num_tokens))
        except UnsupportedGeometry as error:
            text = f"{_place(layout)} of the consumer (local): {error}"
            return msgspec.structs.replace(report, unsupported=text)
    return msgspec.structs.replace(report, reads=tuple(reads))


# ---------------------------------------------------------------- what ranks hold


def _place(layout: RankLayout) -> Place:
    return Place(layout.tp_rank, layout.pp_rank)


def _side(engine: Engine) -> Side:
    first = engine.layouts[0]
    return Side(
        engine.name, first.tp_size, first.pp_size, tuple(_rank(layout) for layout in engine.layouts)
    )


def _rank(layout: RankLayout) -> Rank:
    held = [
        ((family.part,), tuple(layout.layers[i] for i in family.layers), family.heads)
        for family in layout.families
    ]
    shards = dict.fromkeys(group.tokens for group in layout.groups if group.tokens.size > 1)
    return Rank(_place(layout), _pieces(held), tuple(shards))


def _pieces(
    found: Sequence[tuple[tuple[str, ...], tuple[str, ...], tuple[int, int, int]]],
) -> tuple[Piece, ...]:
    """Parts that have layers and heads in common are one piece."""
    alike: dict[tuple[tuple[str, ...], tuple[int, int, int]], list[str]] = {}
    for parts, layers, heads in found:
        alike.setdefault((layers, heads), []).extend(parts)
    return tuple(
        Piece(tuple(dict.fromkeys(parts)), layers, heads[:2], heads[2])
        for (layers, heads), parts in alike.items()
    )


# ---------------------------------------------------------------- block tables


def _fit_tokens(engines: Sequence[Engine], num_tokens: int | None) -> int:
    room = DEFAULT_TOKENS if num_tokens is None else num_tokens
    for engine in engines:
        for group in (group for layout in engine.layouts for group in layout.groups):
            if not group.block_size:
                continue
            holds = group.num_blocks * group.block_size * group.tokens.size
            if num_tokens is not None and holds < num_tokens:
                raise ConfigError(
                    f"{num_tokens} tokens do not fit into engine {engine.name!r}: its cache group "
                    f"{group.index} holds {holds}"
                )
            room = min(room, holds)
    return room


def _tables(
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


# ---------------------------------------------------------------- reads and their runs


def _read(
    local: RankLayout, remote: RankLayout, assignment: Assignment, start: int, stop: int
) -> Read:
    plan = make_plan(local, remote, assignment)
    nbytes, runs = 0, []
    for spread in (False, True):
        selection = plan.select(
            _tables(local, stop, spread=spread),
            _tables(remote, stop, spread=spread, falling=True),
            start,
            stop,
        )
        nbytes = selection.nbytes
        runs.append(_runs(plan, selection))
    held = [
        (
            (local.families[box.local_family].part,),
            tuple(
                local.layers[local.families[box.local_family].layers[place]]
                for place in box.local_regions
            ),
            (*box.heads, local.families[box.local_family].heads[2]),
        )
        for box in assignment.boxes
    ]
    return Read(_place(local), _place(remote), _pieces(held), nbytes, *runs)


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


def _runs(plan: ReadPlan, selection: Selection) -> Runs:
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
