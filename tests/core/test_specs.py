"""Specs check themselves and survive the wire."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

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
    rank_heads,
    tensor_name,
)
from kvagent.errors import GeometryError


@pytest.mark.parametrize("tp_size", range(1, 17))
@pytest.mark.parametrize("heads", [1, 2, 3, 4, 8, 11])
def test_heads_cover_everything_evenly(tp_size: int, heads: int) -> None:
    shares = [rank_heads(rank, tp_size, heads) for rank in range(tp_size)]
    assert {h for h0, h1 in shares for h in range(h0, h1)} == set(range(heads))
    sizes = {h1 - h0 for h0, h1 in shares}
    assert max(sizes) - min(sizes) <= 1
    if tp_size <= heads:
        assert sum(h1 - h0 for h0, h1 in shares) == heads
    else:
        assert sizes == {1}


@pytest.mark.parametrize("bad", [(0, 0, 4), (-1, 2, 4), (2, 2, 4), (0, 1, 0)])
def test_ranks_that_do_not_exist(bad: tuple[int, int, int]) -> None:
    with pytest.raises(GeometryError):
        rank_heads(*bad)


@pytest.mark.parametrize(
    "spec",
    [
        FullAttentionSpec(block_size=16, num_kv_heads=8, head_size=128),
        FullAttentionSpec(
            block_size=32,
            kernel_block_size=16,
            num_kv_heads=8,
            head_size=192,
            head_size_v=128,
            axes=("block", "head", "token", "channel"),
            sliding_window=4096,
            heads=(0, 3),
            tokens=TokenShard(rank=1, size=2, interleave=16),
            scales=ScaleSpec(axes=("block", "token", "head")),
        ),
        MLASpec(block_size=64, head_size=576),
        MambaSpec(
            conv=(ConvPart(name="x", units=8, size=4),),
            conv_width=3,
            ssm_heads=8,
            ssm_shape=(64, 16),
        ),
    ],
)
def test_wire_round_trip(spec: CacheSpec) -> None:
    data = msgspec.msgpack.encode(spec)
    assert msgspec.msgpack.decode(data, type=CacheSpec) == spec


FULL: dict[str, Any] = {"block_size": 16, "num_kv_heads": 4, "head_size": 8}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"block_size": 0}, "block_size is 0"),
        ({"block_size": 1 << 40}, "block_size"),
        ({"num_kv_heads": -1}, "num_kv_heads is -1"),
        ({"head_size": 0}, "head_size is 0"),
        ({"dtype": "float4"}, "unknown dtype 'float4'"),
        ({"axes": ("block", "token", "head")}, "axes"),
        ({"axes": ("block", "token", "token", "head", "channel")}, "axes"),
        ({"axes": ("block", "token", "head", "channel", "layer")}, "axes"),
        ({"kernel_block_size": 5}, "multiple of kernel_block_size 5"),
        ({"heads": (2, 2)}, r"heads \(2, 2\)"),
        ({"heads": (3, 5)}, r"heads \(3, 5\)"),
        ({"head_size_v": 4}, "two tensors"),
        ({"sliding_window": 0}, "sliding_window"),
        ({"group": 64}, "group is 64"),
        ({"tokens": TokenShard(size=2, interleave=3)}, "interleave 3"),
    ],
)
def test_full_attention_refuses(change: dict[str, Any], message: str) -> None:
    with pytest.raises(GeometryError, match=message):
        FullAttentionSpec(**{**FULL, **change})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({}, "neither conv parts nor ssm_heads"),
        ({"conv": (ConvPart(name="x", units=1, size=1),)}, "conv_width"),
        ({"ssm_heads": 2, "ssm_shape": (0,)}, "ssm_shape"),
        ({"ssm_heads": 2, "ssm_shape": (1 << 20, 1 << 20)}, "too large"),
        ({"ssm_heads": 2, "heads": (0, 3)}, "heads"),
        ({"conv": (ConvPart(name="x", units=1, size=1),) * 2, "conv_width": 1}, "one name"),
    ],
)
def test_mamba_refuses(change: dict[str, Any], message: str) -> None:
    with pytest.raises(GeometryError, match=message):
        MambaSpec(**change)


def test_others_refuse() -> None:
    with pytest.raises(GeometryError, match="shard 2 of 2"):
        TokenShard(rank=2, size=2)
    with pytest.raises(GeometryError, match="channel"):
        ScaleSpec(channels=4)
    with pytest.raises(GeometryError, match="no `kv`"):
        MLASpec(block_size=1, head_size=1, scales=ScaleSpec())
    with pytest.raises(GeometryError, match="outside tp 2"):
        WorkerInfo(engine_id="e", model=ModelInfo(name="m"), tp_rank=2, tp_size=2)
    with pytest.raises(GeometryError, match="unknown dtype"):
        itemsize("complex64")


def test_tensor_names() -> None:
    assert tensor_name("layer") == "layer"
    assert tensor_name("layer", "ssm") == "layer:ssm"
