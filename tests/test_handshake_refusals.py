"""What does not fit is refused at the handshake, by the name of the field and with both values."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest
import torch

from kvagent import (
    ConvPart,
    FullAttentionSpec,
    MambaSpec,
    MLASpec,
    ModelInfo,
    ScaleSpec,
    WorkerClient,
    WorkerInfo,
)
from kvagent.client.engine import EngineClient
from kvagent.core.specs import CacheSpec
from tests.harness import Engine
from tests.loopback import LoopbackSidecar, Stage

MODEL = ModelInfo(name="llama", revision="r1", dtype="bfloat16", num_layers=2, rope="base=1e4")
FULL = FullAttentionSpec(block_size=4, num_kv_heads=4, head_size=8, dtype="float32")
SCALED = msgspec.structs.replace(FULL, dtype="uint8", scales=ScaleSpec())
MLA = MLASpec(block_size=4, head_size=16, dtype="float32")
MAMBA = MambaSpec(
    conv=(ConvPart(name="x", units=2, size=4),), conv_width=3, ssm_heads=2, ssm_shape=(4, 2)
)


class One(Engine):
    """An engine of one rank with any model and spec."""

    def __init__(self, sidecar: LoopbackSidecar, name: str, model: ModelInfo, spec: CacheSpec):
        worker = WorkerClient(sidecar.socket)
        worker.join(WorkerInfo(engine_id=name, model=model))
        self.caches: list[dict[str, torch.Tensor]] = [
            worker.allocate_kv_caches({"layer.0": spec}, num_blocks=8)
        ]
        self.workers = [worker]
        self.client = EngineClient(sidecar.socket)
        self.client.wait_ready(20)
        self.seen = []


@pytest.fixture(scope="module")
def stage() -> Iterator[Stage]:
    made = Stage()
    yield made
    made.close()


@pytest.fixture(scope="module")
def sidecars(stage: Stage) -> list[LoopbackSidecar]:
    return stage.sidecars(2)


def changed(thing: Any, **fields: Any) -> Any:
    return msgspec.structs.replace(thing, **fields)


CASES: list[tuple[str, Callable[[], tuple[ModelInfo, Any, ModelInfo, Any]], str, str]] = [
    *(
        (
            f"model.{field}",
            lambda field=field, value=value: (MODEL, FULL, changed(MODEL, **{field: value}), FULL),
            str(getattr(MODEL, field)),
            str(value),
        )
        for field, value in {
            "name": "qwen",
            "revision": "r2",
            "dtype": "float16",
            "num_layers": 3,
            "quantization": "fp8",
            "rope": "base=1e6",
            "attention": "flash",
        }.items()
    ),
    ("num_kv_heads", lambda: (MODEL, FULL, MODEL, changed(FULL, num_kv_heads=2)), "4", "2"),
    ("head_size", lambda: (MODEL, FULL, MODEL, changed(FULL, head_size=16)), "8", "16"),
    (
        "head_size_v",
        lambda: (
            MODEL,
            changed(FULL, axes=("block", "token", "head", "channel")),
            MODEL,
            changed(FULL, axes=("block", "token", "head", "channel"), head_size_v=4),
        ),
        "8",
        "4",
    ),
    (
        "dtype",
        lambda: (MODEL, FULL, MODEL, changed(FULL, dtype="float16")),
        "float32",
        "float16",
    ),
    (
        "sliding_window",
        lambda: (MODEL, FULL, MODEL, changed(FULL, sliding_window=64)),
        "none",
        "64",
    ),
    (
        "scale_mode",
        lambda: (MODEL, FULL, MODEL, changed(FULL, scale_mode="per_tensor")),
        "none",
        "per_tensor",
    ),
    (
        "scales",
        lambda: (MODEL, SCALED, MODEL, changed(SCALED, scales=None)),
        "per token and head",
        "none",
    ),
    (
        "scales.dtype",
        lambda: (
            MODEL,
            SCALED,
            MODEL,
            changed(SCALED, scales=changed(SCALED.scales, dtype="float16")),
        ),
        "float32",
        "float16",
    ),
    (
        "scales.mode",
        lambda: (MODEL, SCALED, MODEL, changed(SCALED, scales=changed(SCALED.scales, mode="e8"))),
        "none",
        "e8",
    ),
    ("kind", lambda: (MODEL, FULL, MODEL, MLA), "attention", "latent"),
    ("head_size", lambda: (MODEL, MLA, MODEL, changed(MLA, head_size=32)), "16", "32"),
    ("conv_width", lambda: (MODEL, MAMBA, MODEL, changed(MAMBA, conv_width=4)), "3", "4"),
    (
        "conv.x",
        lambda: (MODEL, MAMBA, MODEL, changed(MAMBA, conv=(changed(MAMBA.conv[0], size=8),))),
        "2 x 4",
        "2 x 8",
    ),
    ("ssm", lambda: (MODEL, MAMBA, MODEL, changed(MAMBA, ssm_shape=(4, 4))), "4 x 2", "4 x 4"),
    (
        "ssm_dtype",
        lambda: (MODEL, MAMBA, MODEL, changed(MAMBA, ssm_dtype="bfloat16")),
        "float32",
        "bfloat16",
    ),
]


@pytest.mark.parametrize(
    ("field", "make", "there", "here"), CASES, ids=[f"{i}-{c[0]}" for i, c in enumerate(CASES)]
)
def test_refused_by_name(
    sidecars: list[LoopbackSidecar],
    field: str,
    make: Callable[[], tuple[ModelInfo, Any, ModelInfo, Any]],
    there: str,
    here: str,
) -> None:
    model, spec, other_model, other_spec = make()
    with (
        One(sidecars[0], "prefill", model, spec) as producer,
        One(sidecars[1], "decode", other_model, other_spec) as consumer,
    ):
        ticket = producer.client.offer("r", [1], 4)
        consumer.client.fetch("r", ticket, [2])
        reason = consumer.received("r")
        assert reason is not None
        assert reason.startswith("handshake: mismatch")
        named = [part for part in reason.split("; ") if f"{field}: " in part]
        assert named, reason
        assert there in named[0]
        assert here in named[0]
        producer.sent("r")  # and its blocks are not kept waiting
