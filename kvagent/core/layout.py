"""From specs and tensors to a `RankLayout`.

`tensor_shapes` says which tensors a layer has on this rank and of what shape; `allocate` lays them
out in one block of memory; `build_layout` takes tensors wherever they lie (shape and byte strides)
and describes them as regions. Shapes are compared with the spec, never interpreted.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

from kvagent.core.regions import Axis, CacheGroup, Family, MemoryRange, RankLayout, TensorView
from kvagent.core.specs import (
    CacheSpec,
    FullAttentionSpec,
    MambaSpec,
    MLASpec,
    ScaleSpec,
    TokenShard,
    WorkerInfo,
    itemsize,
    rank_heads,
    tensor_name,
)
from kvagent.errors import GeometryError

__all__ = [
    "MemoryRange",
    "RankLayout",
    "TensorShape",
    "TensorView",
    "allocate",
    "build_layout",
    "tensor_shape",
    "tensor_shapes",
]

ALIGNMENT = 4096
"""Bytes; every tensor that `allocate` places begins on a page of its own."""


class TensorShape(NamedTuple):
    """Shape and dtype of one tensor on this rank, contiguous unless the engine says otherwise."""

    shape: tuple[int, ...]
    dtype: str


class _Part(NamedTuple):
    """One region inside a tensor: fixed index on some axes, a stretch of others."""

    name: str
    tensor: str
    dtype: str
    axes: tuple[str, ...]
    shape: tuple[int, ...]
    """Axes and shape of the whole tensor."""
    heads: tuple[int, int, int]
    kv: int | None
    """Index on the `kv` axis, None when there is no such axis."""
    conv: tuple[int, int, int] | None
    """First channel, units held and channels per unit, for a convolution part."""


class _FamilyKey(NamedTuple):
    """What regions of one family share; the fields of `Family`."""

    part: str
    dtype: str
    group: int
    axes: tuple[Axis, ...]
    block_tokens: int
    heads: tuple[int, int, int]
    window: int


def tensor_shapes(
    layer: str, spec: CacheSpec, info: WorkerInfo, num_blocks: int
) -> dict[str, TensorShape]:
    """The tensors of one layer on this rank, by `tensor_name`."""
    return {
        part.tensor: TensorShape(part.shape, part.dtype)
        for part in _parts(layer, spec, info, num_blocks)
    }


def tensor_shape(spec: CacheSpec, info: WorkerInfo, num_blocks: int) -> tuple[int, ...]:
    """The shape of the main tensor; `GeometryError` when the layer has only named ones."""
    shapes = tensor_shapes("", spec, info, num_blocks)
    if "" not in shapes:
        raise GeometryError(f"the layer has no main tensor but {sorted(shapes)}")
    return shapes[""].shape


def allocate(
    specs: dict[str, CacheSpec], info: WorkerInfo, num_blocks: int
) -> tuple[int, dict[str, TensorView]]:
    """Place every tensor in one range: `(nbytes, views by tensor name)`, each page-aligned."""
    offset = 0
    views: dict[str, TensorView] = {}
    for layer, spec in specs.items():
        for name, (shape, dtype) in tensor_shapes(layer, spec, info, num_blocks).items():
            size = itemsize(dtype)
            strides = tuple(size * math.prod(shape[i + 1 :]) for i in range(len(shape)))
            views[name] = TensorView(0, offset, shape, strides)
            nbytes = size * math.prod(shape)
            offset += (nbytes + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT
    return offset, views


def build_layout(
    specs: dict[str, CacheSpec],
    info: WorkerInfo,
    views: dict[str, TensorView],
    ranges: tuple[MemoryRange, ...],
    num_blocks: int,
) -> RankLayout:
    """Describe a worker's tensors. `views` are keyed by `tensor_name`.

    Raises `GeometryError` naming the tensor when one is missing, unknown, of another shape than
    its spec, outside its range or overlapping another, and when the specs of one cache group
    disagree about its block size or token shard.
    """
    if not specs:
        raise GeometryError("there are no cache specs")
    groups: dict[int, CacheGroup] = {}
    places: dict[_FamilyKey, list[tuple[int, int, int]]] = {}
    unused = set(views)
    for index, (layer, spec) in enumerate(specs.items()):
        _join_group(groups, layer, spec, num_blocks)
        for part in _parts(layer, spec, info, num_blocks):
            view = views.get(part.tensor)
            if view is None:
                raise GeometryError(f"tensor {part.tensor!r} is missing")
            unused.discard(part.tensor)
            key, offset = _region(part, view, spec)
            places.setdefault(key, []).append((index, view.memory, offset))
    if unused:
        raise GeometryError(f"tensors without a spec: {sorted(unused)[:8]}")
    families = []
    for key, found in places.items():
        layers, memories, offsets = zip(*found, strict=True)
        families.append(Family(layers=layers, memories=memories, offsets=offsets, **key._asdict()))
    layout = RankLayout(
        tp_rank=info.tp_rank,
        tp_size=info.tp_size,
        pp_rank=info.pp_rank,
        pp_size=info.pp_size,
        ranges=ranges,
        groups=tuple(groups[index] for index in sorted(groups)),
        layers=tuple(specs),
        families=tuple(families),
    )
    layout.validate()
    return layout


def _join_group(
    groups: dict[int, CacheGroup], layer: str, spec: CacheSpec, num_blocks: int
) -> None:
    if isinstance(spec, MambaSpec):
        block_size, tokens = 0, TokenShard()
    else:
        block_size = spec.block_size
        # An interleave means nothing to a context that is not split.
        tokens = spec.tokens if spec.tokens.size > 1 else TokenShard()
    group = CacheGroup(
        index=spec.group, block_size=block_size, num_blocks=num_blocks, tokens=tokens
    )
    known = groups.setdefault(spec.group, group)
    if known != group:
        raise GeometryError(
            f"layer {layer!r} does not fit cache group {spec.group}: block size {block_size}, "
            f"{tokens}; the group has block size {known.block_size}, {known.tokens}"
        )


def _parts(layer: str, spec: CacheSpec, info: WorkerInfo, num_blocks: int) -> Iterator[_Part]:
    """Every region that a layer has on this rank."""
    if not 1 <= num_blocks < 1 << 31:
        raise GeometryError(f"num_blocks is {num_blocks}; it must be from 1 to 2**31 - 1")
    if isinstance(spec, MambaSpec):
        yield from _state_parts(layer, spec, info, num_blocks)
        return
    kernel = spec.kernel_block_size or spec.block_size
    extents = {
        "kv": 2,
        "block": num_blocks * (spec.block_size // kernel),
        "token": kernel,
        "channel": spec.head_size,
    }
    heads = (0, 1, 1)
    if isinstance(spec, FullAttentionSpec):
        h0, h1 = spec.heads or rank_heads(info.tp_rank, info.tp_size, spec.num_kv_heads)
        heads = (h0, h1, spec.num_kv_heads)
        extents["head"] = h1 - h0
    if isinstance(spec, MLASpec):
        yield _part(layer, "latent", "", spec.dtype, spec.axes, extents, heads)
    elif "kv" in spec.axes:
        for kv, name in enumerate("kv"):
            yield _part(layer, name, "", spec.dtype, spec.axes, extents, heads, kv)
    else:
        yield _part(layer, "k", "k", spec.dtype, spec.axes, extents, heads)
        value = extents | {"channel": spec.head_size_v or spec.head_size}
        yield _part(layer, "v", "v", spec.dtype, spec.axes, value, heads)
    if spec.scales is not None:
        yield from _scale_parts(layer, spec, spec.scales, extents, heads)


def _scale_parts(
    layer: str,
    spec: FullAttentionSpec | MLASpec,
    scales: ScaleSpec,
    extents: dict[str, int],
    heads: tuple[int, int, int],
) -> Iterator[_Part]:
    extents = extents | {"channel": scales.channels}
    if "head" not in scales.axes:
        heads = (0, 1, 1)
    if isinstance(spec, MLASpec):
        yield _part(layer, "scale", "scale", scales.dtype, scales.axes, extents, heads)
    elif "kv" in scales.axes:
        for kv, name in enumerate(("k_scale", "v_scale")):
            yield _part(layer, name, "scale", scales.dtype, scales.axes, extents, heads, kv)
    else:
        for name in ("k_scale", "v_scale"):
            yield _part(layer, name, name, scales.dtype, scales.axes, extents, heads)


def _state_parts(layer: str, spec: MambaSpec, info: WorkerInfo, num_blocks: int) -> Iterator[_Part]:
    held = [part.held or rank_heads(info.tp_rank, info.tp_size, part.units) for part in spec.conv]
    channels = sum((u1 - u0) * part.size for part, (u0, u1) in zip(spec.conv, held, strict=True))
    extents = {"block": num_blocks, "width": spec.conv_width, "channel": channels}
    first = 0
    for part, (u0, u1) in zip(spec.conv, held, strict=True):
        yield _part(
            layer,
            f"conv.{part.name}",
            "conv",
            spec.conv_dtype,
            spec.conv_axes,
            extents,
            (u0, u1, part.units),
        )._replace(conv=(first, u1 - u0, part.size))
        first += (u1 - u0) * part.size
    if spec.ssm_heads:
        h0, h1 = spec.heads or rank_heads(info.tp_rank, info.tp_size, spec.ssm_heads)
        inner = tuple(f"state{i}" for i in range(len(spec.ssm_shape)))
        extents = dict(zip(inner, spec.ssm_shape, strict=True))
        extents |= {"block": num_blocks, "head": h1 - h0}
        heads = (h0, h1, spec.ssm_heads)
        axes = ("block", "head", *inner)
        yield _part(layer, "ssm", "ssm", spec.ssm_dtype, axes, extents, heads)


def _part(
    layer: str,
    name: str,
    tensor: str,
    dtype: str,
    axes: tuple[str, ...],
    extents: dict[str, int],
    heads: tuple[int, int, int],
    kv: int | None = None,
) -> _Part:
    shape = tuple(extents[axis] for axis in axes)
    return _Part(name, tensor_name(layer, tensor), dtype, axes, shape, heads, kv, None)


def _region(part: _Part, view: TensorView, spec: CacheSpec) -> tuple[_FamilyKey, int]:
    """A part inside its tensor: all that its family shares, and its offset."""
    if view.shape != part.shape or len(view.strides) != len(view.shape):
        raise GeometryError(
            f"tensor {part.tensor!r} has shape {view.shape} and {len(view.strides)} strides; "
            f"its spec says {part.shape} for axes {part.axes}"
        )
    if any(stride < 0 for stride in view.strides) or view.offset < 0:
        raise GeometryError(f"tensor {part.tensor!r} has a negative stride or offset")
    offset = view.offset
    axes: list[Axis] = []
    for name, extent, stride in zip(part.axes, view.shape, view.strides, strict=True):
        if name == "kv":
            offset += (part.kv or 0) * stride
        elif name == "channel" and part.conv is not None:
            first, units, size = part.conv
            offset += first * stride
            axes += [_axis("head", units, size * stride), _axis("channel", size, stride)]
        else:
            axes.append(_axis(name, extent, stride))
    window = block_tokens = 0
    if not isinstance(spec, MambaSpec):
        window = spec.sliding_window or 0
        block_tokens = spec.kernel_block_size or spec.block_size
        axes, block_tokens = _fold(axes, block_tokens, spec.block_size)
    key = _FamilyKey(
        part.name, part.dtype, spec.group, tuple(axes), block_tokens, part.heads, window
    )
    return key, offset


def _axis(name: str, extent: int, stride: int) -> Axis:
    # The stride of a dimension of one is arbitrary, and must not split families.
    return Axis(name, extent, stride if extent > 1 else 0)


def _fold(axes: list[Axis], kernel: int, block_size: int) -> tuple[list[Axis], int]:
    """Kernel blocks that follow one another like tokens are one larger block."""
    by_name = {axis.name: axis for axis in axes}
    block, token = by_name["block"], by_name.get("token")
    parts = block_size // kernel
    if parts == 1 or token is None:
        return axes, kernel
    # A token axis of one has no stride of its own: its tokens are as far apart as the blocks.
    step = token.stride if token.extent > 1 else block.stride
    if block.stride != kernel * step:
        return axes, kernel
    whole = {
        "block": _axis("block", block.extent // parts, block.stride * parts),
        "token": _axis("token", block_size, step),
    }
    return [whole.get(axis.name, axis) for axis in axes], block_size
