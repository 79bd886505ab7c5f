"""Who reads what from whom, in numbers: the plan of two engines before anything moves.

The consumer is the local side of every plan. Numbers are those of the plan that a transfer would
use, for one request of so many tokens: with block tables that count up (contiguous), and with
tables in which no two blocks are neighbours (fragmented). How they are shown: `table`, `drawing`.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from kvagent.config import Config
from kvagent.core.compare import differences, one_sided_layers
from kvagent.core.plan import Assignment, ReadPlan, assign, make_plan
from kvagent.core.regions import RankLayout
from kvagent.core.specs import TokenShard
from kvagent.core.staging import AREAS, Buffer, plan_staging
from kvagent.errors import ConfigError, UnsupportedGeometry
from kvagent.planner.describe import Engine
from kvagent.planner.runs import Runs, block_tables, count_runs

__all__ = ["Piece", "PlanReport", "Rank", "Read", "Refusal", "Runs", "Side", "plan_report"]

DEFAULT_TOKENS = 4096


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


class Read(msgspec.Struct, frozen=True):
    """What one consumer rank reads from one producer rank."""

    consumer: Place
    producer: Place
    pieces: tuple[Piece, ...]
    nbytes: int
    contiguous: Runs
    fragmented: Runs
    staged: int
    """Bytes of them that are read by way of the staging buffer, with fragmented tables and the
    consumer's default settings."""


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


# ---------------------------------------------------------------- tokens


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


# ---------------------------------------------------------------- reads and their runs


def _read(
    local: RankLayout, remote: RankLayout, assignment: Assignment, start: int, stop: int
) -> Read:
    plan = make_plan(local, remote, assignment)
    nbytes, runs = 0, []
    for spread in (False, True):
        selection = plan.select(
            block_tables(local, stop, spread=spread),
            block_tables(remote, stop, spread=spread, falling=True),
            start,
            stop,
        )
        nbytes = selection.nbytes
        runs.append(count_runs(plan, selection))
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
    staged = _staged_bytes(local, remote, assignment, plan, start, stop)
    contiguous, fragmented = runs
    return Read(
        _place(local), _place(remote), _pieces(held), nbytes, contiguous, fragmented, staged
    )


def _staged_bytes(
    local: RankLayout,
    remote: RankLayout,
    assignment: Assignment,
    plan: ReadPlan,
    start: int,
    stop: int,
) -> int:
    """As the sidecar decides it: the same estimate, for the same blocks."""
    settings = Config(socket="")
    buffer = Buffer(0, settings.staging_bytes // AREAS)
    run_bytes = settings.staging_run_bytes
    located = plan.locate(
        block_tables(local, stop, spread=True),
        block_tables(remote, stop, spread=True, falling=True),
        start,
        stop,
    )
    return sum(
        plan.measure(option.track, located[option.track])[0]
        for option in plan_staging(local, remote, assignment, plan, buffer, run_bytes)
        if option.is_better(plan, located[option.track], run_bytes)
    )
