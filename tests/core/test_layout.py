"""Layouts: shapes, allocation, strides, and everything that must be refused on arrival."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rigs import BLOCKS_FIRST, HND, NHD, full, layout, worker

from kvagent.core.layout import (
    MemoryRange,
    RankLayout,
    TensorView,
    allocate,
    build_layout,
    tensor_shape,
    tensor_shapes,
)
from kvagent.core.overlap import Box, find_overlap
from kvagent.core.regions import Axis
from kvagent.core.shards import held, held_before, own_number, shards_meet
from kvagent.core.specs import ConvPart, MambaSpec, MLASpec, ScaleSpec, TokenShard
from kvagent.errors import GeometryError


def test_shapes_follow_the_axes_and_the_rank() -> None:
    info = worker(tp_rank=1, tp_size=3)
    assert tensor_shape(full(num_kv_heads=8), info, 10) == (2, 10, 16, 3, 8)
    assert tensor_shape(full(num_kv_heads=8, axes=HND), info, 10) == (2, 10, 3, 16, 8)
    assert tensor_shape(full(kernel_block_size=4), info, 10) == (2, 40, 4, 1, 8)
    assert tensor_shape(full(heads=(0, 4)), info, 10) == (2, 10, 16, 4, 8)
    assert tensor_shape(MLASpec(block_size=64, head_size=576), info, 10) == (10, 64, 576)


def test_layers_with_several_tensors() -> None:
    separate = full(axes=("block", "token", "head", "channel"), head_size_v=4, scales=ScaleSpec())
    assert {k: v.shape for k, v in tensor_shapes("a", separate, worker(), 10).items()} == {
        "a:k": (10, 16, 4, 8),
        "a:v": (10, 16, 4, 4),
        "a:scale": (2, 10, 16, 4),
    }
    mamba = MambaSpec(
        conv=(ConvPart(name="x", units=6, size=4), ConvPart(name="B", units=1, size=5)),
        conv_width=3,
        ssm_heads=6,
        ssm_shape=(4, 2),
    )
    shapes = tensor_shapes("a", mamba, worker(tp_rank=1, tp_size=3), 10)
    assert shapes["a:conv"].shape == (10, 3, 2 * 4 + 5)
    assert shapes["a:ssm"] == ((10, 2, 4, 2), "float32")
    with pytest.raises(GeometryError, match="no main tensor"):
        tensor_shape(mamba, worker(), 10)
    with pytest.raises(GeometryError, match="num_blocks is 0"):
        tensor_shape(separate, worker(), 0)


def test_allocation_is_contiguous_aligned_and_disjoint() -> None:
    specs = {f"layer.{i}": full(num_kv_heads=3, head_size=5) for i in range(4)}
    nbytes, views = allocate(specs, worker(), 7)
    end = 0
    for view in views.values():
        assert view.offset % 4096 == 0
        assert view.offset >= end
        assert view.strides == np.empty(view.shape, dtype=np.float16).strides
        end = view.offset + 2 * int(np.prod(view.shape))
    assert end <= nbytes < end + 4096


def test_k_and_v_are_strides() -> None:
    for axes in (NHD, BLOCKS_FIRST, ("block", "token", "head", "kv", "channel")):
        made = layout(full(axes=axes))
        k, v = made.families
        _, views = allocate({"layer.0": full(axes=axes)}, worker(), 32)
        assert (k.part, v.part) == ("k", "v")
        assert k.axes == v.axes
        assert v.offsets[0] - k.offsets[0] == views["layer.0"].strides[axes.index("kv")]


def test_eighty_layers_take_a_few_kilobytes() -> None:
    made = layout({f"model.layers.{i}.self_attn.attn": full() for i in range(80)}, None, 8192)
    data = msgspec.msgpack.encode(made)
    assert len(data) < 6000
    assert msgspec.msgpack.decode(data, type=RankLayout) == made


def test_kernel_blocks_that_follow_one_another_become_one() -> None:
    folded = layout(full(kernel_block_size=4))
    assert folded.families[0].axes == layout(full()).families[0].axes
    kept = layout(full(kernel_block_size=4, axes=HND))
    assert kept.families[0].block == Axis("block", 128, 4 * 4 * 8 * 2)
    assert kept.families[0].block_tokens == 4


def test_views_are_compared_with_the_spec() -> None:
    spec = full()
    nbytes, views = allocate({"a": spec}, worker(), 32)
    ranges = (MemoryRange(4096, nbytes),)
    view = views["a"]

    def build(views: dict[str, TensorView], ranges: tuple[MemoryRange, ...] = ranges) -> None:
        build_layout({"a": spec}, worker(), views, ranges, 32)

    build(views)
    with pytest.raises(GeometryError, match="'a' is missing"):
        build({})
    with pytest.raises(GeometryError, match=r"without a spec: \['b'\]"):
        build({"a": view, "b": view})
    transposed = TensorView(0, 0, (32, 2, 16, 4, 8), view.strides)
    with pytest.raises(GeometryError, match="has shape"):
        build({"a": transposed})
    with pytest.raises(GeometryError, match="negative stride"):
        build({"a": TensorView(0, 0, view.shape, (*view.strides[:4], -2))})
    with pytest.raises(GeometryError, match="outside its range"):
        build({"a": TensorView(0, 2, view.shape, view.strides)})
    with pytest.raises(GeometryError, match="no memory range 1"):
        build({"a": TensorView(1, 0, view.shape, view.strides)})
    with pytest.raises(GeometryError, match="overlaps itself"):
        build({"a": TensorView(0, 0, view.shape, (*view.strides[:3], 2, 2))})
    with pytest.raises(GeometryError, match="a:k and a:v share bytes"):
        build({"a": TensorView(0, 0, view.shape, (0, *view.strides[1:]))})
    with pytest.raises(GeometryError, match="one device"):
        build(views, (*ranges, MemoryRange(1 << 30, 10, "vram")))
    with pytest.raises(GeometryError, match="no cache specs"):
        build_layout({}, worker(), {}, ranges, 32)


def test_groups_must_agree_within_and_may_share_memory() -> None:
    with pytest.raises(GeometryError, match="does not fit cache group 0"):
        layout({"a": full(), "b": full(block_size=32)})
    specs = {"a": full(), "b": full(group=1, sliding_window=64)}
    nbytes, views = allocate({"a": full()}, worker(), 32)
    shared = {"a": views["a"], "b": views["a"]}
    made = build_layout(specs, worker(), shared, (MemoryRange(4096, nbytes),), 32)
    assert [group.index for group in made.groups] == [0, 1]
    with pytest.raises(GeometryError, match="share bytes"):
        build_layout({"a": full(), "b": full()}, worker(), shared, (MemoryRange(4096, nbytes),), 32)


# ---------------------------------------------------------------- hostile layouts

GOOD = layout({f"layer.{i}": full() for i in range(3)})
HUGE = (1 << 63) - 1
NUMBERS = st.sampled_from([-(1 << 63), -1, 0, 1, 2, 7, 1 << 20, 1 << 31, 1 << 40, HUGE, HUGE + 1])


def _numbers(node: object, path: tuple[object, ...] = ()) -> list[tuple[object, ...]]:
    if isinstance(node, dict):
        return [p for key, value in node.items() for p in _numbers(value, (*path, key))]
    if isinstance(node, list):
        return [p for i, value in enumerate(node) for p in _numbers(value, (*path, i))]
    return [path] if isinstance(node, int) else []


@given(st.data())
def test_a_damaged_layout_is_refused_or_in_bounds(data: st.DataObject) -> None:
    """Whatever numbers a peer sends, what passes `validate` stays inside its ranges."""
    tree = msgspec.to_builtins(GOOD)
    for path in data.draw(
        st.lists(st.sampled_from(_numbers(tree)), min_size=1, max_size=3, unique=True)
    ):
        node = tree
        for key in path[:-1]:
            node = node[key]
        node[path[-1]] = data.draw(NUMBERS)
    try:
        made = msgspec.msgpack.decode(msgspec.msgpack.encode(tree), type=RankLayout)
        made.validate()
    except (GeometryError, msgspec.ValidationError):
        return
    for family in made.families:
        for memory, offset in zip(family.memories, family.offsets, strict=True):
            assert offset >= 0
            assert offset + family.extent <= made.ranges[memory].nbytes <= HUGE


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layers": ("layer.0", "layer.0", "layer.2")}, "named twice"),
        ({"ranges": ()}, "needs a memory range"),
        ({"ranges": (MemoryRange(HUGE, 10),)}, "impossible memory range"),
        ({"ranges": (MemoryRange(1, 0),)}, "impossible memory range"),
        ({"groups": GOOD.groups * 2}, "described twice"),
        ({"families": GOOD.families * 2}, "has two parts 'k'"),
        ({"tp_rank": 1}, "tp rank 1 of 1"),
    ],
)
def test_layout_refuses(change: dict[str, object], message: str) -> None:
    with pytest.raises(GeometryError, match=message):
        msgspec.structs.replace(GOOD, **change).validate()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dtype": "float4"}, "unknown dtype"),
        ({"group": 3}, "no cache group 3"),
        ({"axes": GOOD.families[0].axes[1:]}, "no block axis"),
        ({"axes": (Axis("block", 33, 1024),)}, "no multiple of 32"),
        ({"block_tokens": 8}, "do not make a block of 16"),
        ({"heads": (0, 3, 4)}, "do not fit an axis of 4"),
        ({"heads": (1, 5, 4)}, "do not fit"),
        ({"window": -1}, "impossible window"),
        ({"layers": (0, 1, 9)}, "there is no layer 9"),
        ({"offsets": (0, 4096)}, "differ in number"),
        ({"offsets": (0, 4096, -1)}, "outside its range"),
        ({"offsets": (0, 0, 4096)}, "share bytes"),
        ({"memories": (0, 0, 1)}, "no memory range 1"),
    ],
)
def test_family_refuses(change: dict[str, object], message: str) -> None:
    family = msgspec.structs.replace(GOOD.families[0], **change)
    with pytest.raises(GeometryError, match=message):
        msgspec.structs.replace(GOOD, families=(family, *GOOD.families[1:])).validate()


# ---------------------------------------------------------------- arithmetic


@st.composite
def boxes(draw: st.DrawFn) -> Box:
    axes = []
    span = unit = draw(st.integers(1, 4))
    for _ in range(draw(st.integers(0, 3))):
        stride, extent = span + draw(st.integers(0, 6)), draw(st.integers(2, 4))
        axes.append((stride, extent))
        span += (extent - 1) * stride
    return Box(draw(st.integers(0, 60)), tuple(axes), unit, 0)


def _bytes(box: Box) -> set[int]:
    starts = {box.start}
    for stride, extent in box.axes:
        starts = {start + i * stride for start in starts for i in range(extent)}
    return {start + i for start in starts for i in range(box.unit)}


@given(st.lists(boxes(), min_size=2, max_size=3))
def test_no_overlap_is_missed(found: list[Box]) -> None:
    found = [box._replace(owner=i) for i, box in enumerate(found)]
    each = [_bytes(box) for box in found]
    if find_overlap(found) is None:
        assert sum(map(len, each)) == len(set().union(*each))


@given(boxes(), st.integers(1, 5))
def test_interleaved_boxes_are_disjoint(box: Box, count: int) -> None:
    """Layers of one cross-layer tensor: the same box again and again inside one page."""
    span = box.end - box.start
    pages = [
        Box(box.start + i * span, (*box.axes, (count * span, 3)), box.unit, i) for i in range(count)
    ]
    assert find_overlap(pages) is None


shards = st.integers(1, 5).flatmap(
    lambda size: st.builds(
        TokenShard, rank=st.integers(0, size - 1), size=st.just(size), interleave=st.integers(1, 6)
    )
)


@given(shards, shards)
def test_token_shards(one: TokenShard, other: TokenShard) -> None:
    tokens = np.arange(one.size * one.interleave * other.size * other.interleave * 2)
    mine = [t for t in tokens.tolist() if t // one.interleave % one.size == one.rank]
    theirs = {t for t in tokens.tolist() if t // other.interleave % other.size == other.rank}
    assert tokens[held(one, tokens)].tolist() == mine
    assert own_number(one, np.array(mine)).tolist() == list(range(len(mine)))
    assert all(held_before(one, t) == sum(m < t for m in mine) for t in range(len(tokens)))
    assert shards_meet(one, other) == bool(theirs.intersection(mine))
