"""What the handshake compares: every field by name, with both values."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from rigs import MODEL, full

from kvagent.core.compare import (
    Difference,
    EngineShape,
    differences,
    engine_shape,
    merge_shapes,
    one_sided_layers,
)
from kvagent.core.specs import (
    CacheSpec,
    ConvPart,
    MambaSpec,
    MLASpec,
    ModelInfo,
    ScaleSpec,
    TokenShard,
)
from kvagent.errors import GeometryError


def shape(*specs: CacheSpec, model: ModelInfo = MODEL) -> EngineShape:
    return engine_shape(model, {f"layer.{i}": spec for i, spec in enumerate(specs)})


def test_layout_and_ranks_do_not_matter() -> None:
    ours = shape(full(), full())
    theirs = shape(
        full(
            axes=("block", "head", "token", "channel"),
            block_size=64,
            kernel_block_size=16,
            heads=(0, 1),
            tokens=TokenShard(rank=1, size=2),
            group=3,
        ),
        full(block_size=8),
    )
    assert differences(ours, theirs) == []
    data = msgspec.msgpack.encode(theirs)
    assert msgspec.msgpack.decode(data, type=EngineShape) == theirs


@pytest.mark.parametrize("field", ModelInfo.__struct_fields__)
def test_every_field_of_the_model(field: str) -> None:
    value = 7 if field == "num_layers" else "other"
    ours, theirs = shape(full()), shape(full(), model=ModelInfo(**{"name": "model", field: value}))
    (found,) = differences(ours, theirs)
    assert found == Difference(f"model.{field}", str(getattr(MODEL, field)), str(value))
    assert str(found) == f"model.{field}: local {found.local!r}, remote {found.remote!r}"


MAMBA: dict[str, Any] = {
    "conv": (ConvPart(name="x", units=8, size=4),),
    "conv_width": 3,
    "ssm_heads": 8,
    "ssm_shape": (4, 2),
}
LATENT: dict[str, Any] = {"block_size": 16, "head_size": 576}
SCALED: dict[str, Any] = {"scales": ScaleSpec()}
SEPARATE: dict[str, Any] = {"axes": ("block", "token", "head", "channel")}


@pytest.mark.parametrize(
    ("ours", "theirs", "field", "local", "remote"),
    [
        (full(), full(num_kv_heads=8), "num_kv_heads", "4", "8"),
        (full(), full(dtype="uint8"), "dtype", "float16", "uint8"),
        (full(), full(sliding_window=9), "sliding_window", "none", "9"),
        (full(), full(scale_mode="per_tensor"), "scale_mode", "none", "per_tensor"),
        (full(), full(head_size_v=4, **SEPARATE), "head_size_v", "8", "4"),
        (
            full(**SCALED),
            full(scales=ScaleSpec(dtype="float16")),
            "scales.dtype",
            "float32",
            "float16",
        ),
        (full(**SCALED), full(scales=ScaleSpec(mode="e8")), "scales.mode", "none", "e8"),
        (
            full(**SCALED),
            full(scales=ScaleSpec(axes=("kv", "block", "token"))),
            "scales",
            "1 per token and head",
            "1 per token",
        ),
        (full(), MLASpec(**LATENT), "kind", "attention", "latent"),
        (MLASpec(**LATENT), MLASpec(**{**LATENT, "head_size": 512}), "head_size", "576", "512"),
        (MambaSpec(**MAMBA), MambaSpec(**{**MAMBA, "conv_width": 4}), "conv_width", "3", "4"),
        (
            MambaSpec(**MAMBA),
            MambaSpec(**{**MAMBA, "ssm_heads": 4}),
            "ssm",
            "8 x 4 x 2",
            "4 x 4 x 2",
        ),
        (
            MambaSpec(**MAMBA),
            MambaSpec(**MAMBA, ssm_dtype="bfloat16"),
            "ssm_dtype",
            "float32",
            "bfloat16",
        ),
        (
            MambaSpec(**MAMBA),
            MambaSpec(**{**MAMBA, "conv": (ConvPart(name="x", units=4, size=4),)}),
            "conv.x",
            "8 x 4",
            "4 x 4",
        ),
    ],
)
def test_every_field_of_a_layer(
    ours: CacheSpec, theirs: CacheSpec, field: str, local: str, remote: str
) -> None:
    found = differences(shape(ours), shape(theirs))
    assert Difference(f"layers[layer.0].{field}", local, remote) in found
    assert len(found) == 1


def test_per_block_scales_fix_the_block_size() -> None:
    scales = ScaleSpec(axes=("kv", "block", "head"))
    (found,) = differences(shape(full(scales=scales)), shape(full(scales=scales, block_size=32)))
    assert found.field == "layers[layer.0].scales.block_size"


def test_layers_that_differ_alike_are_named_once() -> None:
    ours, theirs = shape(*[full()] * 30), shape(*[full(head_size=4)] * 30)
    assert [found.field for found in differences(ours, theirs)] == [
        "layers[layer.0 +29].head_size",
        "layers[layer.0 +29].head_size_v",
    ]


def test_one_sided_layers_are_reported_not_refused() -> None:
    ours = engine_shape(MODEL, {"a": full(), "draft": full()})
    theirs = engine_shape(MODEL, {"b": full(), "a": full()})
    assert differences(ours, theirs) == []
    assert one_sided_layers(ours, theirs) == (("draft",), ("b",))


def test_no_common_layer_is_a_difference() -> None:
    ours = engine_shape(MODEL, {"a": full()})
    theirs = engine_shape(MODEL, {f"b{i}": full() for i in range(5)})
    assert differences(ours, theirs) == [Difference("layers", "a", "b0, b1, b2, ... (5)")]


def test_the_ranks_of_an_engine_make_one_shape() -> None:
    first = engine_shape(MODEL, {"a": full()})
    second = engine_shape(MODEL, {"b": full(), "c": MLASpec(**LATENT)})
    merged = merge_shapes([first, second, first])
    assert sorted(merged.by_layer()) == ["a", "b", "c"]
    assert merged == engine_shape(MODEL, {"a": full(), "b": full(), "c": MLASpec(**LATENT)})
    with pytest.raises(GeometryError, match=r"model\.name"):
        merge_shapes([first, engine_shape(ModelInfo(name="other"), {"b": full()})])
    with pytest.raises(GeometryError, match="layers"):
        merge_shapes([first, engine_shape(MODEL, {"a": full(head_size=4)})])
    with pytest.raises(GeometryError, match="'b' differently"):
        merge_shapes([first, second, engine_shape(MODEL, {"b": full(head_size=4)})])
    with pytest.raises(GeometryError, match="at least one"):
        merge_shapes([])
