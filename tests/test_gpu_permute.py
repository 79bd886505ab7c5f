"""The permutation in torch's operations copies the same bytes as that in numpy's."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from kvagent import FullAttentionSpec, MLASpec, ModelInfo, WorkerInfo
from kvagent.core.layout import MemoryRange, RankLayout, allocate, build_layout
from kvagent.core.plan import assign, make_plan
from kvagent.core.staging import Buffer, stage_track
from kvagent.cuda.permute import permute
from tests.harness import BLOCKS_FIRST_NHD, HND, NHD

BLOCKS, TOKENS = 12, 88
CUDA = pytest.param("cuda", marks=pytest.mark.gpu)


def layout_of(spec: Any, rank: int, size: int, address: int, layers: int = 2) -> RankLayout:
    specs = {f"layer.{i}": spec for i in range(layers)}
    info = WorkerInfo(engine_id="e", tp_rank=rank, tp_size=size, model=ModelInfo(name="m"))
    blocks = BLOCKS * 16 // spec.block_size
    nbytes, views = allocate(specs, info, blocks)
    return build_layout(specs, info, views, (MemoryRange(address, nbytes),), blocks)


def full(axes: tuple[str, ...], block: int = 16, dtype: str = "float16", size: int = 8) -> Any:
    return FullAttentionSpec(
        block_size=block, num_kv_heads=4, head_size=size, dtype=dtype, axes=axes
    )


MLA = MLASpec(block_size=16, head_size=24, dtype="bfloat16", axes=("block", "token", "channel"))
MLA_OTHER = MLASpec(
    block_size=8, head_size=24, dtype="bfloat16", axes=("token", "block", "channel")
)


@pytest.mark.parametrize("device", ["cpu", CUDA])
@pytest.mark.parametrize("all_heads", [False, True])
@pytest.mark.parametrize("span", [(0, TOKENS), (5, TOKENS - 3), (17, 18)], ids=str)
@pytest.mark.parametrize(
    ("local", "remote"),
    [
        ((full(HND), 1), (full(NHD), 1)),
        ((full(NHD), 1), (full(HND, 8), 2)),
        ((full(HND, 8), 2), (full(BLOCKS_FIRST_NHD, 16), 1)),
        (
            (full(NHD, dtype="float8_e4m3fn", size=3), 4),
            (full(HND, dtype="float8_e4m3fn", size=3), 1),
        ),
        ((MLA, 1), (MLA_OTHER, 1)),
    ],
    ids=["HND-NHD", "NHD-HND,8,tp2", "HND,8,tp2-blocks-first", "bytes", "MLA"],
)
def test_the_same_bytes(
    local: tuple[Any, int],
    remote: tuple[Any, int],
    span: tuple[int, int],
    all_heads: bool,
    device: str,
) -> None:
    generator = np.random.default_rng(3)
    (spec, size), (other, other_size) = local, remote
    here = layout_of(spec, 0, size, 4096)
    there = [layout_of(other, rank, other_size, 1 << 30) for rank in range(other_size)]
    tables = [
        [generator.permutation(BLOCKS * 16 // s.block_size).astype(np.int32)] for s in (spec, other)
    ]
    copied = 0
    for assignment in assign(here, there):
        plan = make_plan(here, there[assignment.remote], assignment)
        for track, granules in plan.locate(tables[0], tables[1], *span).items():
            area_bytes = 6000  # of few blocks: several chunks
            buffer = Buffer(1 << 40, area_bytes)
            staged = stage_track(
                here, there[assignment.remote], assignment, plan, track, buffer, all_heads
            )
            assert staged is not None
            before = generator.integers(0, 256, here.ranges[0].nbytes, np.uint8)
            by_numpy = before.copy()
            by_torch = torch.from_numpy(before.copy()).to(device)
            for part in staged.parts:
                for chunk in part.chunks(granules):
                    area = generator.integers(0, 256, area_bytes, np.uint8)
                    part.copy(chunk, [by_numpy], area)
                    inside = part.in_area(chunk)
                    for permutation in part.permutations:
                        permute(permutation, inside, [by_torch], torch.from_numpy(area).to(device))
            copied += int((by_numpy != before).sum())
            assert np.array_equal(by_numpy, by_torch.cpu().numpy())
    assert copied
