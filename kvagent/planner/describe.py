"""A short TOML description of an engine to the layouts of all its ranks.

    engine = "prefill"            # default: the file's name
    tp = 4                        # default 1
    pp = 2                        # default 1
    num_blocks = 1024             # block ids of every cache group, on each rank

    [model]                       # the fields of `ModelInfo`
    name = "llama"
    num_layers = 32

    [[cache]]                     # layers that are alike; as many tables as there are kinds
    layers = "model.layers.{}"    # {} is from, from + step, ... below `to`; or a list of names
    from = 0                      # default 0; may be a list: [0, 1, 2] with step 4 leaves out 3
    to = 32                       # default: model.num_layers
    step = 1                      # default 1
    kind = "full"                 # or "mla", "mamba"; then the fields of that spec
    block_size = 16
    num_kv_heads = 8
    head_size = 128

Rules.

* Pipeline: layers whose names differ only in their last number are one sequence, sorted by it;
  sequences follow one another as they first appear. Rank `p` of `pp` has the layers from
  `p * n // pp` to `(p + 1) * n // pp` of all `n`; or `pp_layers` says how many each rank has.
* Split contexts: `tokens = { size = 2, interleave = 16 }` gives rank `r` the token shard
  `r % size`; heads are then dealt to the `tp / size` groups of neighbouring ranks.
* `heads`, and `held` of a convolution part, may be one range for all ranks or a list with a range
  for each tensor-parallel rank.
* Tensors are contiguous, one after another. Other strides: `kvagent plan --from-status`.

Every mistake is a `ConfigError` that names the file and the key.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from kvagent.core.compare import EngineShape, engine_shape, merge_shapes
from kvagent.core.layout import allocate, build_layout
from kvagent.core.regions import MAX_LAYERS, MemoryRange, RankLayout
from kvagent.core.specs import (
    CacheSpec,
    ConvPart,
    FullAttentionSpec,
    MambaSpec,
    MLASpec,
    ModelInfo,
    ScaleSpec,
    TokenShard,
    WorkerInfo,
    rank_heads,
)
from kvagent.errors import ConfigError, GeometryError
from kvagent.planner.strict import check_choice, check_keys, convert

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

__all__ = ["Engine", "describe", "read_description", "split_name"]

MAX_RANKS = 1024
BASE_ADDRESS = 1 << 32
"""Where a described cache is said to lie; plans depend on distances only."""

KINDS: dict[str, type[CacheSpec]] = {
    "full": FullAttentionSpec,
    "mla": MLASpec,
    "mamba": MambaSpec,
}


@dataclass(frozen=True)
class Engine:
    """An engine as the planner sees it; `layouts` in the order of (pp_rank, tp_rank)."""

    name: str
    shape: EngineShape
    layouts: tuple[RankLayout, ...]


class _Description(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    model: ModelInfo
    cache: tuple[dict[str, Any], ...]
    num_blocks: int
    engine: str = ""
    tp: int = 1
    pp: int = 1
    pp_layers: tuple[int, ...] = ()


class _Layers(msgspec.Struct, frozen=True, kw_only=True):
    """Which layers a `[[cache]]` table is for: the keys of it that are not the spec's."""

    layers: str | tuple[str, ...]
    kind: str
    first: int | tuple[int, ...] = msgspec.field(name="from", default=0)
    to: int | None = None
    step: int = 1


LAYER_KEYS = _Layers.__struct_encode_fields__


def read_description(path: str) -> Engine:
    """The engine that the TOML file at `path` describes."""
    try:
        values = tomllib.loads(Path(path).read_text())
    except OSError as error:
        raise ConfigError(f"cannot read {path!r}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path!r} is not TOML: {error}") from error
    return describe(values, path)


def describe(values: Mapping[str, Any], path: str) -> Engine:
    """The engine of a parsed description; `path` is for messages, and its default name."""
    check_keys(values, _Description.__struct_fields__, path)
    if isinstance(values.get("model"), dict):
        check_keys(values["model"], ModelInfo.__struct_fields__, f"{path}: model")
    described = convert(dict(values), _Description, path)
    name = described.engine or Path(path).stem
    for size in ("tp", "pp"):
        if not 1 <= getattr(described, size) <= MAX_RANKS:
            raise ConfigError(
                f"{path}: {size} is {getattr(described, size)}; it must be from 1 to {MAX_RANKS}"
            )
    if described.tp * described.pp > MAX_RANKS:
        raise ConfigError(f"{path}: tp x pp is more than {MAX_RANKS} ranks")
    placed = _place_layers(described, path)
    layouts, shapes = [], []
    for pp_rank, layers in enumerate(_stages(described, list(placed), path)):
        for tp_rank in range(described.tp):
            info = WorkerInfo(
                engine_id=name,
                model=described.model,
                tp_rank=tp_rank,
                tp_size=described.tp,
                pp_rank=pp_rank,
                pp_size=described.pp,
            )
            by_table = {
                number: _spec(described.cache[number], info, f"{path}: cache[{number}]")
                for number in sorted({placed[layer] for layer in layers})
            }
            specs = {layer: by_table[placed[layer]] for layer in layers}
            try:
                nbytes, views = allocate(specs, info, described.num_blocks)
                memory = MemoryRange(BASE_ADDRESS, nbytes)
                layouts.append(build_layout(specs, info, views, (memory,), described.num_blocks))
            except GeometryError as error:
                raise ConfigError(f"{path}: {error}") from error
            shapes.append(engine_shape(described.model, specs))
    return Engine(name, merge_shapes(shapes), tuple(layouts))


def _place_layers(described: _Description, path: str) -> dict[str, int]:
    """Every layer of the model in order, and the number of its `[[cache]]` table."""
    sequences: dict[tuple[str, str], list[tuple[int, str, int]]] = {}
    for number, table in enumerate(described.cache):
        for layer in _layers(table, described.model.num_layers, f"{path}: cache[{number}]"):
            before, place, after = split_name(layer)
            sequences.setdefault((before, after), []).append((place or 0, layer, number))
    placed: dict[str, int] = {}
    for sequence in sequences.values():
        for _, layer, number in sorted(sequence):
            if layer in placed:
                raise ConfigError(
                    f"{path}: cache[{number}].layers: {layer!r} is described twice"
                    + (f", in cache[{placed[layer]}] too" if placed[layer] != number else "")
                )
            placed[layer] = number
    if not 1 <= len(placed) <= MAX_LAYERS:
        raise ConfigError(f"{path}: cache: {len(placed)} layers; 1 to {MAX_LAYERS} are possible")
    return placed


def split_name(layer: str) -> tuple[str, int | None, str]:
    """What stands before the last number of a layer's name, the number, and what stands after."""
    found = re.fullmatch(r"((?:.*[^0-9])?)(0|[1-9][0-9]{0,8})([^0-9]*)", layer, re.DOTALL)
    return (found[1], int(found[2]), found[3]) if found else (layer, None, "")


def _layers(table: Mapping[str, Any], num_layers: int, where: str) -> list[str]:
    """The names of the layers of one `[[cache]]` table."""
    own = {key: value for key, value in table.items() if key in LAYER_KEYS}
    named = convert(own, _Layers, where)
    if not isinstance(named.layers, str) or "{}" not in named.layers:
        for key in ("from", "to", "step"):
            if key in table:
                raise ConfigError(f"{where}.{key}: `layers` has no {{}} to put a number in")
        return [named.layers] if isinstance(named.layers, str) else list(named.layers)
    to = num_layers if named.to is None else named.to
    starts = (named.first,) if isinstance(named.first, int) else named.first
    if not all(0 <= start < to <= MAX_LAYERS for start in starts) or named.step < 1:
        raise ConfigError(
            f"{where}: layers from {named.first} to {to} by {named.step} are no numbers from 0 "
            f"to {MAX_LAYERS} (`to` is model.num_layers unless given)"
        )
    numbers = [number for start in starts for number in range(start, to, named.step)]
    return [named.layers.replace("{}", str(number)) for number in numbers]


def _stages(described: _Description, layers: list[str], path: str) -> list[list[str]]:
    """The layers of each pipeline rank."""
    n, pp = len(layers), described.pp
    if described.pp_layers:
        counts = described.pp_layers
        if len(counts) != pp or sum(counts) != n or min(counts) < 1:
            raise ConfigError(
                f"{path}: pp_layers {list(counts)} must be {pp} counts of at least 1 with the sum "
                f"{n}, the number of layers"
            )
        ends = [sum(counts[: rank + 1]) for rank in range(pp)]
    else:
        if pp > n:
            raise ConfigError(f"{path}: pp is {pp}, but there are {n} layers")
        ends = [(rank + 1) * n // pp for rank in range(pp)]
    return [layers[start:end] for start, end in zip([0, *ends], ends, strict=False)]


def _spec(table: Mapping[str, Any], info: WorkerInfo, where: str) -> CacheSpec:
    """The spec of one rank from a `[[cache]]` table."""
    kind = check_choice(table["kind"], KINDS, f"{where}.kind")
    spec_type = KINDS[kind]
    check_keys(table, [*LAYER_KEYS, *spec_type.__struct_fields__], where)
    fields = {key: value for key, value in table.items() if key not in LAYER_KEYS}
    if "tokens" in fields:
        fields["tokens"] = _token_shard(fields["tokens"], info, f"{where}.tokens")
        split = fields["tokens"]["size"]
        heads = fields.get("num_kv_heads")
        if "heads" not in fields and isinstance(heads, int) and heads > 0:
            fields["heads"] = rank_heads(info.tp_rank // split, info.tp_size // split, heads)
    if "heads" in fields:
        fields["heads"] = _of_rank(fields["heads"], info, f"{where}.heads")
    if "conv" in fields:
        fields["conv"] = [
            _conv_part(part, info, f"{where}.conv[{place}]")
            for place, part in enumerate(_list_of_tables(fields["conv"], f"{where}.conv"))
        ]
    if isinstance(fields.get("scales"), dict):
        check_keys(fields["scales"], ScaleSpec.__struct_fields__, f"{where}.scales")
    spec: CacheSpec = convert({"type": kind, **fields}, spec_type, where)
    return spec


def _token_shard(value: Any, info: WorkerInfo, where: str) -> dict[str, int]:
    keys = [key for key in TokenShard.__struct_fields__ if key != "rank"]
    if not isinstance(value, dict):
        raise ConfigError(f"{where}: must be a table of {', '.join(keys)}")
    check_keys(value, keys, where)
    size = convert(value, TokenShard, where).size
    if info.tp_size % size:
        raise ConfigError(f"{where}.size: tp {info.tp_size} is not a multiple of {size}")
    return {"size": size, **value, "rank": info.tp_rank % size}


def _conv_part(table: dict[str, Any], info: WorkerInfo, where: str) -> dict[str, Any]:
    check_keys(table, ConvPart.__struct_fields__, where)
    if "held" in table:
        table = table | {"held": _of_rank(table["held"], info, f"{where}.held")}
    return table


def _list_of_tables(value: Any, where: str) -> list[dict[str, Any]]:
    if not isinstance(value, list) or not all(isinstance(table, dict) for table in value):
        raise ConfigError(f"{where}: must be a list of tables")
    return value


def _of_rank(value: Any, info: WorkerInfo, where: str) -> Any:
    """`value` itself, or a rank's entry when it is a list of ranges."""
    if isinstance(value, list) and value and isinstance(value[0], list):
        if len(value) != info.tp_size:
            raise ConfigError(f"{where}: {len(value)} ranges for {info.tp_size} ranks")
        return value[info.tp_rank]
    return value
