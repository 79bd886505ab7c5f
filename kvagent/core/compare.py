"""Whether two engines' caches mean the same: what the handshake compares, field by field.

Only what decides the *values* is here: the model's fingerprint, and what kind of cache each layer
has. How the values are spread over ranks, blocks and strides may differ freely; that is `plan`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Annotated

import msgspec

from kvagent.core.specs import (
    CacheSpec,
    FullAttentionSpec,
    MambaSpec,
    MLASpec,
    ModelInfo,
    ScaleSpec,
)
from kvagent.errors import GeometryError

__all__ = [
    "Difference",
    "EngineShape",
    "LayerKind",
    "differences",
    "engine_shape",
    "merge_shapes",
    "one_sided_layers",
]

Text = Annotated[str, msgspec.Meta(max_length=256)]


class LayerKind(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One kind of cache, as named fields in words, and the layers that have it."""

    fields: Annotated[dict[Text, Text], msgspec.Meta(max_length=64)]
    layers: Annotated[tuple[Text, ...], msgspec.Meta(max_length=4096)]


class EngineShape(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a rank, or a whole engine, says about the meaning of its cache."""

    model: ModelInfo
    kinds: Annotated[tuple[LayerKind, ...], msgspec.Meta(max_length=4096)]

    def by_layer(self) -> dict[str, dict[str, str]]:
        """The fields of every layer."""
        return {layer: kind.fields for kind in self.kinds for layer in kind.layers}


class Difference(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One field that keeps two engines apart, with both values in words."""

    field: str
    local: str
    remote: str

    def __str__(self) -> str:
        return f"{self.field}: local {self.local!r}, remote {self.remote!r}"


def engine_shape(model: ModelInfo, specs: Mapping[str, CacheSpec]) -> EngineShape:
    """The shape of a worker's caches; `specs` by layer name."""
    return _shape(model, ((layer, _fields(spec)) for layer, spec in specs.items()))


def merge_shapes(shapes: Iterable[EngineShape]) -> EngineShape:
    """One shape for all ranks of an engine. Raises `GeometryError` when they contradict each
    other: another model, or one layer described in two ways."""
    shapes = list(shapes)
    if not shapes:
        raise GeometryError("an engine has at least one rank")
    layers: dict[str, dict[str, str]] = {}
    for shape in shapes:
        for found in differences(shapes[0], shape, common=False):
            raise GeometryError(f"two ranks of one engine differ: {found}")
        for layer, fields in shape.by_layer().items():
            known = layers.setdefault(layer, fields)
            if known != fields:
                raise GeometryError(f"two ranks of one engine describe layer {layer!r} differently")
    return _shape(shapes[0].model, layers.items())


def one_sided_layers(
    local: EngineShape, remote: EngineShape
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Layers that only one side has (a draft model's): (only local, only remote). They are left
    out of transfers, which is no error."""
    ours, theirs = local.by_layer(), remote.by_layer()
    return (
        tuple(layer for layer in ours if layer not in theirs),
        tuple(layer for layer in theirs if layer not in ours),
    )


def differences(
    local: EngineShape, remote: EngineShape, *, common: bool = True
) -> list[Difference]:
    """Every field that must agree and does not; [] means compatible.

    Layers are compared by name. Having no layer in common is a difference too, unless `common`
    is false. Layers that differ in the same way are named once, with their number.
    """
    found = [
        Difference(f"model.{name}", str(ours), str(theirs))
        for name in ModelInfo.__struct_fields__
        if (ours := getattr(local.model, name)) != (theirs := getattr(remote.model, name))
    ]
    ours, theirs = local.by_layer(), remote.by_layer()
    shared = [layer for layer in ours if layer in theirs]
    if common and not shared:
        found.append(Difference("layers", _sample(ours), _sample(theirs)))
    alike: dict[tuple[str, str, str], list[str]] = {}
    for layer in shared:
        for field, one, other in _compare(ours[layer], theirs[layer]):
            alike.setdefault((field, one, other), []).append(layer)
    for (field, one, other), layers in alike.items():
        more = f" +{len(layers) - 1}" if len(layers) > 1 else ""
        found.append(Difference(f"layers[{layers[0]}{more}].{field}", one, other))
    return found


def _compare(ours: dict[str, str], theirs: dict[str, str]) -> Iterator[tuple[str, str, str]]:
    if ours.get("kind") != theirs.get("kind"):
        yield "kind", ours.get("kind", ""), theirs.get("kind", "")
        return
    for field in {**ours, **theirs}:
        if ours.get(field, "none") != theirs.get(field, "none"):
            yield field, ours.get(field, "none"), theirs.get(field, "none")


def _sample(layers: Mapping[str, object]) -> str:
    names = list(layers)
    return ", ".join(names[:3]) + (f", ... ({len(names)})" if len(names) > 3 else "")


def _shape(model: ModelInfo, layers: Iterable[tuple[str, dict[str, str]]]) -> EngineShape:
    kinds: dict[tuple[tuple[str, str], ...], list[str]] = {}
    for layer, fields in layers:
        kinds.setdefault(tuple(fields.items()), []).append(layer)
    return EngineShape(
        model=model,
        kinds=tuple(
            LayerKind(fields=dict(fields), layers=tuple(names)) for fields, names in kinds.items()
        ),
    )


def _fields(spec: CacheSpec) -> dict[str, str]:
    if isinstance(spec, MambaSpec):
        fields = {"kind": "state"}
        for part in spec.conv:
            fields[f"conv.{part.name}"] = f"{part.units} x {part.size}"
        if spec.conv:
            fields |= {"conv_width": str(spec.conv_width), "conv_dtype": spec.conv_dtype}
        if spec.ssm_heads:
            shape = " x ".join(map(str, (spec.ssm_heads, *spec.ssm_shape)))
            fields |= {"ssm": shape, "ssm_dtype": spec.ssm_dtype}
        return fields
    if isinstance(spec, FullAttentionSpec):
        fields = {
            "kind": "attention",
            "num_kv_heads": str(spec.num_kv_heads),
            "head_size": str(spec.head_size),
            "head_size_v": str(spec.head_size_v or spec.head_size),
        }
    else:
        fields = {"kind": "latent", "head_size": str(spec.head_size)}
    fields |= {
        "dtype": spec.dtype,
        "sliding_window": str(spec.sliding_window or "none"),
        "scale_mode": spec.scale_mode or "none",
    }
    return fields | _scale_fields(spec, spec.scales)


def _scale_fields(spec: FullAttentionSpec | MLASpec, scales: ScaleSpec | None) -> dict[str, str]:
    if scales is None:
        return {"scales": "none"}
    per = [axis for axis in ("token", "head") if axis in scales.axes]
    fields = {
        "scales": f"{scales.channels if 'channel' in scales.axes else 1} per "
        + " and ".join(per or ["block"]),
        "scales.dtype": scales.dtype,
        "scales.mode": scales.mode or "none",
    }
    if "token" not in scales.axes:
        fields["scales.block_size"] = str(spec.kernel_block_size or spec.block_size)
    return fields
