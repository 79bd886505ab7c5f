"""Which bytes a mirror copies: exactly those that a transfer concerns."""

from __future__ import annotations

import numpy as np
import pytest

from kvagent import FullAttentionSpec, ModelInfo, WorkerInfo
from kvagent.core.layout import MemoryRange, RankLayout, TensorView, allocate, build_layout
from kvagent.core.mirror import Span, block_spans, selected_spans
from kvagent.core.plan import assign, make_plan

NHD = ("kv", "block", "token", "head", "channel")
HND = ("block", "kv", "head", "token", "channel")


def layout_of(
    axes: tuple[str, ...], tp_rank: int = 0, tp_size: int = 1, address: int = 4096
) -> RankLayout:
    spec = FullAttentionSpec(block_size=4, num_kv_heads=4, head_size=8, dtype="float16", axes=axes)
    specs = {f"layer.{i}": spec for i in range(3)}
    info = WorkerInfo(engine_id="e", tp_rank=tp_rank, tp_size=tp_size, model=ModelInfo(name="m"))
    nbytes, views = allocate(specs, info, 16)
    return build_layout(specs, info, views, (MemoryRange(address, nbytes),), 16)


def bytes_of(spans: list[Span], nbytes: int) -> np.ndarray:
    seen = np.zeros(nbytes, np.int64)
    for memory, begin, end in spans:
        assert memory == 0
        seen[begin:end] += 1
    assert seen.max(initial=0) <= 1, "a byte is copied twice"
    return seen.astype(bool)


def block_bytes(layout: RankLayout, blocks: list[int]) -> np.ndarray:
    """The same, walked element by element."""
    seen = np.zeros(layout.ranges[0].nbytes, bool)
    for family in layout.families:
        for offset in family.offsets:
            for block in blocks:
                places = np.array([offset + block * family.block.stride])
                for axis in family.axes:
                    if axis.name != "block":
                        places = (places[:, None] + np.arange(axis.extent) * axis.stride).ravel()
                for item in range(family.itemsize):
                    seen[places + item] = True
    return seen


@pytest.mark.parametrize("axes", [NHD, HND], ids=["NHD", "HND"])
def test_whole_blocks(axes: tuple[str, ...]) -> None:
    layout = layout_of(axes)
    blocks = np.array([5, 2, 3, 9, 200], np.int32)
    spans = block_spans(layout, [blocks], 13)  # of the four blocks that hold 13 tokens
    want = block_bytes(layout, [5, 2, 3, 9])
    assert (bytes_of(spans, layout.ranges[0].nbytes) == want).all()
    assert len(spans) <= 3 * 2 * 3, "neighbours are joined"
    outside = block_spans(layout, [np.array([200, -1], np.int32)], 8)
    assert outside == []


@pytest.mark.parametrize(("start", "tokens"), [(0, 16), (5, 13), (6, 7)])
def test_what_was_read_from_two_ranks(start: int, tokens: int) -> None:
    local = layout_of(HND)
    remotes = [layout_of(NHD, rank, 2, address=1 << 20) for rank in range(2)]
    here, there = [np.array([[7, 3, 4, 1]], np.int32)[0]], [np.array([0, 9, 2, 5], np.int32)]
    picked = []
    for assignment in assign(local, remotes):
        plan = make_plan(local, remotes[assignment.remote], assignment)
        picked.append((plan, plan.select(here, there, start, tokens)))
    seen = bytes_of(selected_spans(local.ranges, picked), local.ranges[0].nbytes)
    # Each token of each layer, K and V, in all heads.
    assert seen.sum() == (tokens - start) * 3 * 2 * 4 * 8 * 2
    for token in range(16):
        block = int(here[0][token // 4])
        inside = block_bytes(local, [block]) & seen
        assert inside.any() == any(
            start <= t < tokens for t in range(token // 4 * 4, token // 4 * 4 + 4)
        )


def test_several_ranges() -> None:
    spec = FullAttentionSpec(block_size=4, num_kv_heads=1, head_size=8, dtype="float16", axes=HND)
    info = WorkerInfo(engine_id="e", model=ModelInfo(name="m"))
    size = 8 * 2 * 4 * 8 * 2
    ranges = (MemoryRange(1 << 20, size), MemoryRange(4096, size))  # not in order
    shape, strides = (8, 2, 1, 4, 8), (128, 64, 64, 16, 2)
    views = {f"layer.{i}": TensorView(i, 0, shape, strides) for i in range(2)}
    layout = build_layout(dict.fromkeys(views, spec), info, views, ranges, 8)
    found = block_spans(layout, [np.array([1, 2, 6], np.int32)], 12)
    assert sorted(found) == [
        Span(memory, begin, end) for memory in (0, 1) for begin, end in ((128, 384), (768, 896))
    ]
