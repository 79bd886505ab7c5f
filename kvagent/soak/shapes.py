"""What the soak's engines look like, and the pattern that tells every value of a cache apart.

All engines have the same model and differ in tensor parallelism, block size and layout. A value is
a function of the writer's seed and of token, layer, K or V, head and channel, so that a value in
any wrong place shows, as does one of another request.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kvagent import FullAttentionSpec, ModelInfo
from kvagent.memory.host import MappedMemory

LAYERS, HEADS, CHANNELS = 3, 4, 32
TOKENS = 8192
"""That a cache has room for."""
TOKEN_BYTES = LAYERS * 2 * HEADS * CHANNELS * 4
MODEL = ModelInfo(name="soak", num_layers=LAYERS)
LAYER_NAMES = [f"layer.{i}" for i in range(LAYERS)]

NHD = ("kv", "block", "token", "head", "channel")
HND = ("kv", "block", "head", "token", "channel")
BLOCKS_FIRST_NHD = ("block", "kv", "token", "head", "channel")
BLOCKS_FIRST_HND = ("block", "kv", "head", "token", "channel")
_CANONICAL = ("kv", "head", "block", "token", "channel")

Values = npt.NDArray[np.uint32]
Spans = Sequence[tuple[int, int]]
"""(seed, end) of consecutive ranges of tokens: a shared prefix, then the request's own."""


@dataclass(frozen=True, slots=True)
class Shape:
    """One engine."""

    name: str
    tp: int
    block_size: int
    axes: tuple[str, ...]
    tcp: bool = False
    chaos: bool = False
    """Its sidecars lose and delay control messages."""
    slow: bool = False
    """It reads a little at a time, so that much can happen in the middle."""

    @property
    def num_blocks(self) -> int:
        return TOKENS // self.block_size

    @property
    def rank_bytes(self) -> int:
        return TOKENS * TOKEN_BYTES // self.tp

    def spec(self) -> FullAttentionSpec:
        return FullAttentionSpec(
            block_size=self.block_size,
            num_kv_heads=HEADS,
            head_size=CHANNELS,
            dtype="float32",
            axes=self.axes,
        )

    def heads(self, rank: int) -> range:
        return range(rank * HEADS // self.tp, (rank + 1) * HEADS // self.tp)

    def extents(self) -> tuple[int, ...]:
        sizes = {"kv": 2, "block": self.num_blocks, "token": self.block_size, "channel": CHANNELS}
        return tuple((sizes | {"head": HEADS // self.tp})[axis] for axis in self.axes)


PRODUCERS = (
    Shape("p0", 1, 16, HND),
    Shape("p1", 2, 8, NHD),
    Shape("p2", 1, 16, BLOCKS_FIRST_NHD),
)
CONSUMERS = (
    Shape("c0", 1, 16, NHD),
    Shape("c1", 2, 16, HND),
    Shape("c2", 1, 32, BLOCKS_FIRST_HND),
)


class RankMemory:
    """One rank's cache, in memory that another process made: every process of the engine maps it,
    and it outlives each of them. `path` leads to its descriptor."""

    def __init__(self, shape: Shape, path: str) -> None:
        self._fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)  # open, so that it can be shared on
        self._memory = MappedMemory(os.dup(self._fd), shape.rank_bytes)
        extents = shape.extents()
        count = int(np.prod(extents))
        flat = self._memory.tensor((LAYERS * count,), (4,), 0, torch.float32)
        self.tensors = {
            name: flat[i * count : (i + 1) * count].view(extents)
            for i, name in enumerate(LAYER_NAMES)
        }
        order = [shape.axes.index(axis) for axis in _CANONICAL]
        self.layers: list[npt.NDArray[Any]] = [
            tensor.numpy().view(np.uint32).transpose(order) for tensor in self.tensors.values()
        ]
        """Each as (kv, head, block, token, channel), whatever the layout."""


def pattern(spans: Spans, layer: int, heads: range, start: int, stop: int) -> Values:
    """(kv, head, token, channel) of tokens `start` to `stop`; what lies beyond the last span has
    its seed."""
    tokens = np.arange(start, stop, dtype=np.uint32)
    seeds = np.full(len(tokens), spans[-1][0], np.uint32)
    for seed, end in reversed(spans[:-1]):
        seeds[: max(0, end - start)] = seed
    rows = _mixed(tokens * np.uint32(0x9E3779B1) + seeds * np.uint32(0x85EBCA6B))
    return rows[None, None, :, None] ^ _columns(layer, heads)


@lru_cache
def _columns(layer: int, heads: range) -> Values:
    kv = np.arange(2, dtype=np.uint32)[:, None, None, None] + np.uint32(2 * layer)
    head = np.array(heads, dtype=np.uint32)[None, :, None, None]
    channel = np.arange(CHANNELS, dtype=np.uint32)
    return _mixed(((kv * np.uint32(HEADS) + head) * np.uint32(CHANNELS) + channel) + np.uint32(1))


def _mixed(values: Values) -> Values:
    values = values ^ (values >> np.uint32(15))
    values = values * np.uint32(0x2C1B3C6D)
    return values ^ (values >> np.uint32(12))
