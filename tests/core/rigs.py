"""Small layouts for tests, without any memory behind them."""

from __future__ import annotations

from typing import Any

from kvagent.core.layout import MemoryRange, RankLayout, allocate, build_layout
from kvagent.core.specs import CacheSpec, FullAttentionSpec, ModelInfo, WorkerInfo

MODEL = ModelInfo(name="model")
NHD = ("kv", "block", "token", "head", "channel")
HND = ("kv", "block", "head", "token", "channel")
BLOCKS_FIRST = ("block", "kv", "token", "head", "channel")


def full(**fields: Any) -> FullAttentionSpec:
    return FullAttentionSpec(
        **{"block_size": 16, "num_kv_heads": 4, "head_size": 8, "dtype": "float16", **fields}
    )


def worker(tp_rank: int = 0, tp_size: int = 1, pp_rank: int = 0, pp_size: int = 1) -> WorkerInfo:
    return WorkerInfo(
        engine_id="engine",
        model=MODEL,
        tp_rank=tp_rank,
        tp_size=tp_size,
        pp_rank=pp_rank,
        pp_size=pp_size,
    )


def layout(
    specs: dict[str, CacheSpec] | CacheSpec,
    info: WorkerInfo | None = None,
    num_blocks: int = 32,
    base: int = 1 << 40,
) -> RankLayout:
    """A rank's layout as `allocate` places it, at address `base`."""
    if not isinstance(specs, dict):
        specs = {"layer.0": specs}
    info = info or worker()
    nbytes, views = allocate(specs, info, num_blocks)
    return build_layout(specs, info, views, (MemoryRange(base, nbytes),), num_blocks)


def engine(
    specs: dict[str, CacheSpec] | CacheSpec, tp_size: int, num_blocks: int = 32
) -> list[RankLayout]:
    """The layouts of all tensor-parallel ranks of an engine."""
    return [
        layout(specs, worker(rank, tp_size), num_blocks, (rank + 1) << 40)
        for rank in range(tp_size)
    ]
