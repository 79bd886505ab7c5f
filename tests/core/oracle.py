"""Two random engines with the same model, and an oracle of what a transfer must leave behind.

Everything here is plain indexing of strided numpy arrays by global coordinates: which rank holds
which head and token is decided by the definitions, never by asking the code under test. The
bytes move through the loopback fabric, as they do between agents.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from hypothesis import strategies as st

from kvagent.core.layout import MemoryRange, RankLayout, TensorView, build_layout, tensor_shapes
from kvagent.core.plan import ReadPlan, Selection
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
    itemsize,
)
from kvagent.fabric.base import CancelFlag
from kvagent.fabric.loopback import LoopbackFabric, LoopbackNetwork

MODEL = ModelInfo(name="random")
GUARD = 64


def even_share(rank: int, size: int, total: int) -> range:
    """The heads of a rank, by the documented rule, written a second time."""
    first = (rank * total) // size
    last = ((rank + 1) * total) // size
    return range(first, max(last, first + 1))


# ---------------------------------------------------------------- the model both engines run


@dataclass(frozen=True)
class Layer:
    name: str
    kind: str  # full, mla, mamba
    group: int  # of the model; each side numbers them in its own way
    heads: int = 1
    size: int = 1
    size_v: int = 1
    dtype: str = "bfloat16"
    window: int | None = None
    scale: str = ""  # "", token, token+head, block
    conv: tuple[tuple[str, int, int], ...] = ()
    width: int = 0
    ssm: tuple[int, int, int] | None = None


@dataclass(frozen=True)
class Case:
    layers: tuple[Layer, ...]
    local: Engine
    remote: Engine
    start: int
    stop: int
    seed: int


@dataclass(frozen=True)
class Style:
    """How one side stores one layer."""

    axes: tuple[str, ...]
    split_kv: bool
    order: int  # which permutation of the axes is the storage order
    pad: int
    kernel: int | None


@dataclass(frozen=True)
class Engine:
    tp: int
    cp: int
    interleave: int
    stages: tuple[tuple[str, ...], ...]
    block_size: dict[int, int]
    styles: dict[str, Style]
    group_numbers: dict[int, int]
    cross_layer: bool
    spare_blocks: int


@dataclass
class Rank:
    layout: RankLayout
    specs: dict[str, CacheSpec]
    memory: list[np.ndarray]
    tensors: dict[str, np.ndarray]  # with a last axis of bytes
    cp_rank: int
    tp_rank: int


@dataclass
class Side:
    engine: Engine
    ranks: list[Rank]
    tables: list[np.ndarray]
    names: dict[str, Layer] = field(default_factory=dict)


# ---------------------------------------------------------------- drawing a case


@st.composite
def cases(draw: st.DrawFn) -> Case:
    granule_friendly = draw(st.booleans())
    layers: list[Layer] = []
    kinds = draw(
        st.lists(st.sampled_from(["full", "full", "mla", "mamba"]), min_size=1, max_size=4)
    )
    heads = draw(st.integers(1, 6))
    per_block_scales = False
    for i, kind in enumerate(kinds):
        name = f"model.layers.{i}"
        if kind == "mamba":
            layers.append(
                Layer(
                    name,
                    kind,
                    2,
                    conv=tuple(
                        (part, draw(st.integers(1, 4)), draw(st.integers(1, 3)))
                        for part in draw(st.sampled_from([(), ("x",), ("x", "B", "C")]))
                    ),
                    width=draw(st.integers(1, 3)),
                    ssm=(draw(st.integers(1, 5)), 2, draw(st.integers(1, 3))),
                )
            )
            continue
        scale = draw(st.sampled_from(["", "", "", "token", "token+head", "block"]))
        if kind == "mla" and scale == "token+head":
            scale = "token"
        per_block_scales = per_block_scales or scale == "block"
        windowed = draw(st.sampled_from([False, False, True]))
        size = draw(st.integers(1, 4))
        layers.append(
            Layer(
                name,
                kind,
                int(windowed),
                heads=heads if kind == "full" else 1,
                size=size,
                size_v=draw(st.sampled_from([size, size, size + 1])),
                dtype=draw(st.sampled_from(["bfloat16", "uint8", "float32"])),
                window=draw(st.integers(1, 30)) if windowed else None,
                scale=scale,
            )
        )
    names = [layer.name for layer in layers]
    sizes = [2, 4, 8, 16] if granule_friendly else [1, 2, 3, 4, 6, 8, 12]
    plain = per_block_scales
    fixed = {group: draw(st.sampled_from(sizes)) for group in (0, 1)}
    engines = []
    for side in ("local", "remote"):
        cp = 1 if plain else draw(st.sampled_from([1, 1, 1, 2, 3]))
        mine = list(names)
        if len(mine) > 1 and draw(st.integers(0, 4)) == 0:
            mine.pop(draw(st.integers(0, len(mine) - 1)))
        mine.append(f"draft.{side}") if draw(st.integers(0, 4)) == 0 else None
        cut = draw(st.integers(0, len(mine)))
        stages = tuple(tuple(part) for part in (mine[:cut], mine[cut:]) if part)
        block_size = (
            dict(fixed)
            if plain or draw(st.integers(0, 2)) == 0
            else {group: draw(st.sampled_from(sizes)) for group in (0, 1)}
        )
        styles = {layer: draw(_styles(block_size, layers, layer, plain)) for layer in mine}
        numbers = draw(st.permutations([0, 1, 2]))
        engines.append(
            Engine(
                tp=cp * draw(st.sampled_from([1, 2, 3, 4])),
                cp=cp,
                interleave=draw(
                    st.sampled_from(
                        [n for n in (1, 2, 4) if all(b % n == 0 for b in block_size.values())]
                    )
                ),
                stages=stages,
                block_size=block_size,
                styles=styles,
                group_numbers=dict(enumerate(numbers)),
                cross_layer=draw(st.integers(0, 3)) == 0,
                spare_blocks=draw(st.integers(0, 4)),
            )
        )
    if not set(engines[0].styles) & set(engines[1].styles) & set(names):
        engines[1] = engines[0]
    stop = draw(st.integers(1, 70))
    start = draw(st.one_of(st.just(0), st.integers(0, stop)))
    if plain:
        unit = max(*fixed.values(), 1)
        for group in (0, 1):
            unit = np.lcm(unit, fixed[group])
        start = int(start // unit * unit)
    return Case(tuple(layers), engines[0], engines[1], start, stop, draw(st.integers(0, 1 << 30)))


@st.composite
def _styles(
    draw: st.DrawFn, block_size: dict[int, int], layers: list[Layer], name: str, plain: bool
) -> Style:
    layer = next((layer for layer in layers if layer.name == name), layers[0])
    split = layer.size_v != layer.size or draw(st.booleans())
    axes = ("block", "token", "head", "channel")
    if layer.kind == "mla":
        axes = ("block", "token", "channel")
    elif layer.kind == "mamba":
        axes = ("block", "width", "channel")
    elif not split:
        axes = ("kv", *axes)
    size = block_size.get(layer.group, 1)
    divisors = [n for n in range(1, size + 1) if size % n == 0]
    kernel = None if plain else draw(st.sampled_from([None, None, *divisors]))
    usual = draw(st.booleans())
    return Style(
        axes=axes if usual else tuple(draw(st.permutations(axes))),
        split_kv=split,
        order=0 if usual else draw(st.integers(0, 1 << 16)),
        pad=draw(st.sampled_from([0, 0, 0, 1, 5])),
        kernel=kernel,
    )


# ---------------------------------------------------------------- building a side


def build_side(case: Case, engine: Engine, rng: np.random.Generator) -> Side:
    by_name = {layer.name: layer for layer in case.layers}
    template = case.layers[0]
    names = {
        name: by_name.get(name) or Layer(**{**template.__dict__, "name": name})
        for stage in engine.stages
        for name in stage
    }
    need = max(-(-case.stop // size) for size in engine.block_size.values())
    num_blocks = need + engine.spare_blocks + 1
    tables = [np.zeros(0, dtype=np.int32)] * 3
    for group in (0, 1, 2):
        number = engine.group_numbers[group]
        if group == 2:
            tables[number] = rng.permutation(num_blocks)[:1].astype(np.int32)
            continue
        span = engine.block_size[group] * engine.cp
        count = -(-case.stop // span)
        longer = min(count + int(rng.integers(0, 3)), num_blocks)
        order = rng.permutation(num_blocks) if rng.integers(2) else np.arange(num_blocks)
        tables[number] = order[:longer].astype(np.int32)
        window = max((la.window or 0 for la in case.layers if la.group == group), default=0)
        if group == 1 and window:
            # Blocks that slid out of the window are gone: their entries say nothing.
            tables[number][: max(case.stop - window, 0) // span] = -7
    ranks = []
    for pp_rank, stage in enumerate(engine.stages):
        for tp_rank in range(engine.tp):
            info = WorkerInfo(
                engine_id="e",
                model=MODEL,
                tp_rank=tp_rank,
                tp_size=engine.tp,
                pp_rank=pp_rank,
                pp_size=len(engine.stages),
            )
            specs = {name: _spec(names[name], engine, name, tp_rank) for name in stage}
            ranks.append(_place(engine, specs, info, num_blocks, rng))
    return Side(engine, ranks, tables, names)


def _spec(layer: Layer, engine: Engine, name: str, tp_rank: int) -> CacheSpec:
    style = engine.styles[name]
    group = engine.group_numbers[layer.group]
    if layer.kind == "mamba":
        assert layer.ssm is not None
        return MambaSpec(
            conv=tuple(ConvPart(name=n, units=u, size=s) for n, u, s in layer.conv),
            conv_width=layer.width,
            conv_axes=style.axes if layer.conv else ("block", "width", "channel"),
            ssm_heads=layer.ssm[0],
            ssm_shape=layer.ssm[1:],
            group=group,
        )
    scales = None
    if layer.scale:
        axes = ["block"]
        axes += ["token"] if "token" in layer.scale else []
        axes += ["head"] if "head" in layer.scale else []
        axes += ["kv"] if layer.kind == "full" and not style.split_kv else []
        scales = ScaleSpec(axes=tuple(axes))
    common = {
        "block_size": engine.block_size[layer.group],
        "head_size": layer.size,
        "dtype": layer.dtype,
        "axes": style.axes,
        "sliding_window": layer.window,
        "kernel_block_size": style.kernel,
        "scales": scales,
        "group": group,
        "tokens": TokenShard(
            rank=tp_rank % engine.cp, size=engine.cp, interleave=engine.interleave
        ),
    }
    if layer.kind == "mla":
        return MLASpec(**common)
    held = even_share(tp_rank // engine.cp, engine.tp // engine.cp, layer.heads)
    return FullAttentionSpec(
        num_kv_heads=layer.heads,
        head_size_v=layer.size_v if style.split_kv else None,
        heads=(held.start, held.stop) if engine.cp > 1 else None,
        **common,
    )


def _place(
    engine: Engine,
    specs: dict[str, CacheSpec],
    info: WorkerInfo,
    num_blocks: int,
    rng: np.random.Generator,
) -> Rank:
    """Put a rank's tensors into memory: page by page together, or each for itself."""
    shapes = {}
    owners = {}
    for layer, spec in specs.items():
        for name, shape in tensor_shapes(layer, spec, info, num_blocks).items():
            shapes[name] = shape
            owners[name] = (layer, spec)
    views: dict[str, TensorView] = {}
    sizes: list[int] = []
    pages: dict[int, list[str]] = {}
    offset = GUARD
    for name, (shape, dtype) in shapes.items():
        style = engine.styles[owners[name][0]]
        axes = _axes_of(name, owners[name][1])
        if engine.cross_layer:
            pages.setdefault(shape[axes.index("block")], []).append(name)
            continue
        order = list(range(len(shape)))
        np.random.default_rng(style.order).shuffle(order) if style.order else None
        strides, span = _strides(shape, order, itemsize(dtype), style.pad)
        if len(views) % 2:
            views[name] = TensorView(len(sizes), GUARD, shape, strides)
            sizes.append(span + 2 * GUARD)
        else:
            views[name] = TensorView(-1, offset, shape, strides)
            offset += span + style.pad
    for blocks, members in pages.items():
        inner: list[tuple[str, tuple[int, ...], int]] = []
        page = 0
        for name in members:
            shape, dtype = shapes[name]
            at = _axes_of(name, owners[name][1]).index("block")
            style = engine.styles[owners[name][0]]
            rest = [i for i in range(len(shape)) if i != at]
            strides, span = _strides(
                tuple(1 if i == at else n for i, n in enumerate(shape)),
                [at, *rest],
                itemsize(dtype),
                0,
            )
            inner.append((name, strides, page))
            page += span + style.pad
        for name, strides, begin in inner:
            shape = shapes[name].shape
            at = _axes_of(name, owners[name][1]).index("block")
            full = tuple(page if i == at else s for i, s in enumerate(strides))
            views[name] = TensorView(-1, offset + begin, shape, full)
        offset += page * blocks
    shared = len(sizes)
    sizes.append(offset + GUARD)
    views = {
        name: TensorView(shared, view.offset, view.shape, view.strides) if view.memory < 0 else view
        for name, view in views.items()
    }
    memory = [rng.integers(0, 256, size, dtype=np.uint8) for size in sizes]
    ranges = tuple(MemoryRange(part.ctypes.data, part.nbytes) for part in memory)
    tensors = {}
    for name, view in views.items():
        bytes_each = itemsize(shapes[name].dtype)
        tensors[name] = np.lib.stride_tricks.as_strided(
            memory[view.memory][view.offset :],
            (*view.shape, bytes_each),
            (*view.strides, 1),
        )
    layout = build_layout(specs, info, views, ranges, num_blocks)
    return Rank(layout, specs, memory, tensors, info.tp_rank % engine.cp, info.tp_rank)


def _axes_of(name: str, spec: CacheSpec) -> tuple[str, ...]:
    part = name.partition(":")[2]
    if isinstance(spec, MambaSpec):
        return spec.conv_axes if part == "conv" else ("block", "head", "s0", "s1")
    if "scale" in part:
        assert spec.scales is not None
        return spec.scales.axes
    return spec.axes


def _strides(
    shape: tuple[int, ...], order: list[int], unit: int, pad: int
) -> tuple[tuple[int, ...], int]:
    strides = [0] * len(shape)
    span = unit
    for axis in reversed(order):
        strides[axis] = span
        span *= shape[axis]
        if axis == order[-1]:
            span += pad * unit
    return tuple(strides), span


# ---------------------------------------------------------------- values by global coordinates


class Truth:
    """The bytes of the whole model: `[layer, part]` -> array (tokens, heads, ..., bytes)."""

    def __init__(self, case: Case, names: dict[str, Layer], rng: np.random.Generator) -> None:
        self.values: dict[tuple[str, str], np.ndarray] = {}
        stop = case.stop
        for name, layer in names.items():

            def put(part: str, shape: tuple[int, ...], name: str = name) -> None:
                self.values[name, part] = rng.integers(0, 256, shape, dtype=np.uint8)

            if layer.kind == "mamba":
                for part, units, size in layer.conv:
                    put(f"conv.{part}", (units, size, layer.width, 2))
                assert layer.ssm is not None
                put("ssm", (*layer.ssm, 4))
                continue
            each = itemsize(layer.dtype)
            for part, size in (("k", layer.size), ("v", layer.size_v)):
                put(part, (stop, layer.heads, size, each))
                put(f"{part}_scale", (stop, layer.heads if "head" in layer.scale else 1, 1, 4))


def write(side: Side, rank: Rank, truth: Truth, tokens: range, into: dict[str, np.ndarray]) -> None:
    """Write the truth of `tokens` to the tensors `into` of a rank, element by element."""
    for name in rank.specs:
        if not any(key[0] == name for key in truth.values):
            continue
        layer = side.names[name]
        table = side.tables[side.engine.group_numbers[layer.group]]
        if layer.kind == "mamba":
            if len(tokens):
                _write_state(side.engine, rank, layer, int(table[0]), truth, into)
            continue
        _write_tokens(side, rank, layer, table, truth, tokens, into)


def _write_state(
    engine: Engine,
    rank: Rank,
    layer: Layer,
    block: int,
    truth: Truth,
    into: dict[str, np.ndarray],
) -> None:
    spec = rank.specs[layer.name]
    assert isinstance(spec, MambaSpec)
    channel = 0
    for part, units, size in layer.conv:
        for unit in even_share(rank.tp_rank, engine.tp, units):
            for i in range(size):
                for w in range(layer.width):
                    at = {"block": block, "width": w, "channel": channel}
                    tensor = into[f"{layer.name}:conv"]
                    tensor[tuple(at[axis] for axis in spec.conv_axes)] = truth.values[
                        layer.name, f"conv.{part}"
                    ][unit, i, w]
                channel += 1
    assert layer.ssm is not None
    for j, head in enumerate(even_share(rank.tp_rank, engine.tp, layer.ssm[0])):
        into[f"{layer.name}:ssm"][block, j] = truth.values[layer.name, "ssm"][head]


def _write_tokens(
    side: Side,
    rank: Rank,
    layer: Layer,
    table: np.ndarray,
    truth: Truth,
    tokens: range,
    into: dict[str, np.ndarray],
) -> None:
    engine, style, name = side.engine, side.engine.styles[layer.name], layer.name
    spec = rank.specs[name]
    assert not isinstance(spec, MambaSpec)
    held = range(1)
    if layer.kind == "full":
        held = even_share(rank.tp_rank // engine.cp, engine.tp // engine.cp, layer.heads)
    size = engine.block_size[layer.group]
    kernel = style.kernel or size
    mine = [t for t in range(tokens.stop) if t // engine.interleave % engine.cp == rank.cp_rank]
    for own, token in enumerate(mine):
        if token < tokens.start:
            continue
        entry, rest = divmod(own, size)
        if table[entry] < 0:
            continue
        block = int(table[entry]) * (size // kernel) + rest // kernel
        for kv, part in enumerate("k" if layer.kind == "mla" else "kv"):
            tensor = name if not style.split_kv or layer.kind == "mla" else f"{name}:{part}"
            for j, head in enumerate(held):
                at = {"kv": kv, "block": block, "token": rest % kernel, "head": j}
                for c in range(layer.size if part == "k" else layer.size_v):
                    at["channel"] = c
                    into[tensor][tuple(at[axis] for axis in spec.axes)] = truth.values[name, part][
                        token, head, c
                    ]
                if not layer.scale:
                    continue
                assert spec.scales is not None
                scale = "scale"
                if layer.kind == "full" and style.split_kv:
                    scale = f"{part}_scale"
                # One scale per block: that of the block's first token stands for all.
                first = token // size * size if layer.scale == "block" else token
                into[f"{name}:{scale}"][tuple(at[axis] for axis in spec.scales.axes)] = (
                    truth.values[name, f"{part}_scale"][
                        first, head if "head" in layer.scale else 0, 0
                    ]
                )


# ---------------------------------------------------------------- executing a plan


def entry_of(rows: np.ndarray, index: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(row, entry inside the row) of flat indices."""
    ends = np.cumsum(rows[:, 4].astype(np.int64))
    row = np.searchsorted(ends, index, side="right")
    return row, index - (ends[row] - rows[row, 4].astype(np.int64))


def transfers(plan: ReadPlan, selection: Selection) -> list[tuple[int, int, int]]:
    """(local address, remote address, bytes) of everything a selection moves, unmerged."""
    moved = []
    sides = []
    for rows, index in (
        (plan.local_rows, selection.local_index),
        (plan.remote_rows, selection.remote_index),
    ):
        row, entry = entry_of(rows, index.astype(np.int64))
        signed = rows.astype(np.int64)
        sides.append((signed[row, 0] + entry * signed[row, 3], signed[row, 1]))
    (local, length), (remote, other) = sides
    assert (length == other).all()
    moved += zip(local.tolist(), remote.tolist(), length.tolist(), strict=True)
    moved += [tuple(int(x) for x in run) for run in selection.extra]
    return moved


def merged_count(plan: ReadPlan, selection: Selection) -> int:
    """How many descriptors NIXL makes of a selection: its rule, followed entry by entry."""
    lrow, lentry = entry_of(plan.local_rows, selection.local_index.astype(np.int64))
    rrow, rentry = entry_of(plan.remote_rows, selection.remote_index.astype(np.int64))
    count = len(selection.extra)
    for i in range(len(lrow)):
        if i and lrow[i] == lrow[i - 1] and rrow[i] == rrow[i - 1]:
            local, remote = plan.local_rows[lrow[i]], plan.remote_rows[rrow[i]]
            dense = local[3] == local[1] and remote[3] == remote[1]
            if dense and lentry[i] == lentry[i - 1] + 1 and rentry[i] == rentry[i - 1] + 1:
                continue
        count += 1
    return count


def count_writes(
    moved: list[tuple[int, int, int]], local: Rank, remote: Rank, written: list[np.ndarray]
) -> None:
    """How often each local byte is written; all of it must lie inside both ranks' memory."""
    for destination, source, length in moved:
        i, at = _find(local.layout, destination, length)
        _find(remote.layout, source, length)
        written[i][at : at + length] += 1


async def read_all(local: Rank, reads: list[tuple[Rank, ReadPlan, Selection]]) -> None:
    """Moves the bytes, the way an agent does."""
    network = LoopbackNetwork()
    consumer = LoopbackFabric(network, "consumer")
    await consumer.start()
    await consumer.register(local.layout.ranges)
    for remote, plan, selection in reads:
        producer = LoopbackFabric(network, "producer")
        await producer.start()
        await producer.register(remote.layout.ranges)
        peer = await consumer.connect(producer.metadata)
        prepared = await consumer.prepare(peer, plan.local_rows, plan.remote_rows)
        stats = await consumer.read(prepared, selection, CancelFlag())
        assert stats.nbytes == selection.nbytes
        await producer.close()
    await consumer.close()


def _find(layout: RankLayout, address: int, length: int) -> tuple[int, int]:
    for i, memory in enumerate(layout.ranges):
        if memory.address <= address and address + length <= memory.address + memory.nbytes:
            return i, address - memory.address
    raise AssertionError(f"address {address} is in no range")
