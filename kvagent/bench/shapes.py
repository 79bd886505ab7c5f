"""Caches named after models, and what is fetched from them. Facts of the models' public configs.

A TOML file adds shapes:

    [my-model]
    layers = 48
    kv_heads = 8
    head_size = 128
    dtype = "bfloat16"       # the default
    window = 1024            # sliding attention in the layers that are not full; 0: none
    full_every = 6           # every sixth layer is full
    latent = 0               # MLA: elements per token and layer, instead of heads
"""

from __future__ import annotations

import sys
from enum import Enum
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt

from kvagent.core.specs import CacheSpec, FullAttentionSpec, MLASpec, itemsize, rank_heads
from kvagent.errors import ConfigError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

__all__ = ["SHAPES", "Fragmentation", "Request", "Shape", "Workload", "read_shapes"]

HND = ("kv", "block", "head", "token", "channel")

Ids = npt.NDArray[np.int32]


class Shape(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What one model keeps of each token."""

    layers: int
    kv_heads: int = 1
    head_size: int = 0
    dtype: str = "bfloat16"
    window: int = 0
    full_every: int = 1
    latent: int = 0

    def __post_init__(self) -> None:
        if bool(self.latent) == bool(self.head_size):
            raise ConfigError("a shape has either latent (MLA) or head_size (and kv_heads)")
        if min(self.layers, self.kv_heads, self.full_every) < 1:
            raise ConfigError("layers, kv_heads and full_every are 1 or more")
        itemsize(self.dtype)

    def full(self, layer: int) -> bool:
        return not self.window or layer % self.full_every == self.full_every - 1

    @property
    def groups(self) -> int:
        """Cache groups: full attention, and sliding windows."""
        return len({self.full(layer) for layer in range(self.layers)})

    def specs(self, block_size: int) -> dict[str, CacheSpec]:
        """By layer name; full attention is cache group 0."""
        found: dict[str, CacheSpec] = {}
        for layer in range(self.layers):
            full = self.full(layer) or self.groups == 1
            if self.latent:
                found[f"layer.{layer}"] = MLASpec(
                    block_size=block_size, head_size=self.latent, dtype=self.dtype
                )
                continue
            found[f"layer.{layer}"] = FullAttentionSpec(
                block_size=block_size,
                num_kv_heads=self.kv_heads,
                head_size=self.head_size,
                dtype=self.dtype,
                axes=HND,
                sliding_window=None if self.full(layer) else self.window,
                group=0 if full else 1,
            )
        return found

    def bytes_per_token(self, tp: int = 1) -> int:
        """Of a full layer of the cache, all `tp` ranks together: heads, or the latent, that more
        than one rank holds count for each of them."""
        if self.latent:
            per_layer = self.latent * tp
        else:
            held = sum(
                b - a for a, b in (rank_heads(rank, tp, self.kv_heads) for rank in range(tp))
            )
            per_layer = 2 * held * self.head_size
        return per_layer * itemsize(self.dtype) * sum(map(self.full, range(self.layers)))


SHAPES = {
    "llama-3.1-8b": Shape(layers=32, kv_heads=8, head_size=128),
    "llama-3.1-70b": Shape(layers=80, kv_heads=8, head_size=128),
    "qwen3-235b-a22b": Shape(layers=94, kv_heads=4, head_size=128),
    "deepseek-r1": Shape(layers=61, latent=576),
    "gpt-oss-120b": Shape(layers=36, kv_heads=8, head_size=64, window=128, full_every=2),
    "smollm2-135m": Shape(layers=30, kv_heads=3, head_size=64),
}


def read_shapes(path: str | None) -> dict[str, Shape]:
    """`SHAPES`, and those of a TOML file. Raises `ConfigError`."""
    if path is None:
        return SHAPES
    try:
        tables = tomllib.loads(Path(path).read_text(encoding="utf-8"))
        return SHAPES | msgspec.convert(tables, dict[str, Shape])
    except (OSError, ValueError, msgspec.ValidationError) as error:
        raise ConfigError(f"shapes in {path!r}: {error}") from error


class Fragmentation(str, Enum):
    """Of the producer's block table; the consumer's blocks are in order."""

    contiguous = "contiguous"
    half = "half"
    shuffled = "shuffled"

    def table(self, blocks: int) -> Ids:
        """All blocks, once each: in order, in pairs out of order, or each by itself."""
        rng = np.random.default_rng(blocks)
        if self is Fragmentation.contiguous:
            return np.arange(blocks, dtype=np.int32)
        if self is Fragmentation.half:
            pairs = rng.permutation(-(-blocks // 2))
            table = (pairs[:, None] * 2 + np.arange(2)).ravel().astype(np.int32)
            return table[table < blocks]
        return rng.permutation(blocks).astype(np.int32)


class Request(msgspec.Struct, frozen=True):
    """Block ids of one fetch on both sides; every cache group has the same."""

    remote: list[int]
    local: list[int]
    tokens: int


class Workload(msgspec.Struct, frozen=True, kw_only=True):
    """`concurrency` requests of `tokens` tokens each, fetched at once."""

    name: str
    shape: Shape
    tokens: int
    block_size: int = 16
    producer_tp: int = 1
    consumer_tp: int = 1
    fragmentation: Fragmentation = Fragmentation.contiguous
    concurrency: int = 1

    def __post_init__(self) -> None:
        if self.tokens % self.block_size or self.tokens < 1:
            raise ConfigError(f"{self.tokens} tokens are not whole blocks of {self.block_size}")
        if min(self.producer_tp, self.consumer_tp, self.concurrency) < 1:
            raise ConfigError("tensor-parallel sizes and concurrency are 1 or more")

    def resized(self, nbytes: int) -> Workload:
        """The same with as many tokens as make about `nbytes` bytes in all at the consumer."""
        per_block = self.shape.bytes_per_token(self.consumer_tp) * self.block_size
        blocks = max(1, round(nbytes / self.concurrency / per_block))
        return msgspec.structs.replace(self, tokens=blocks * self.block_size)

    @property
    def blocks(self) -> int:
        """Of one request."""
        return self.tokens // self.block_size

    @property
    def num_blocks(self) -> int:
        """Of the caches."""
        return self.blocks * self.concurrency

    def requests(self) -> list[Request]:
        remote = self.fragmentation.table(self.num_blocks).tolist()
        local = list(range(self.num_blocks))
        return [
            Request(remote[i : i + self.blocks], local[i : i + self.blocks], self.tokens)
            for i in range(0, self.num_blocks, self.blocks)
        ]

    def block_ids(self, ids: list[int]) -> list[list[int]]:
        """One list for each cache group."""
        return [ids] * self.shape.groups
