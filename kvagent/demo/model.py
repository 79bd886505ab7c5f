"""The forward pass of a Llama model over a paged KV cache, one rank's share.

The cache tensors may have their axes in any order: they are looked at through views in one fixed
order, so there is one code path. Attention is computed request by request, so the result of one
does not depend on which others are in the batch. Not here: what to compute next.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from kvagent.demo.config import HND, ModelConfig
from kvagent.demo.tp import Group, Shard
from kvagent.demo.weights import LayerWeights, Weights


class Chunk(msgspec.Struct, frozen=True, array_like=True):
    """Tokens of one request at positions `start`, `start + 1`, ...

    `blocks` is the request's block table from position 0, at least up to the last of `tokens`.
    `sample`: the logits after the last token are wanted.
    """

    tokens: list[int]
    start: int
    blocks: list[int]
    sample: bool

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)


class PagedCache:
    """The keys and values of one layer: views `[block, head, token, channel]` of its tensor."""

    def __init__(self, tensor: Tensor, axes: Sequence[str]) -> None:
        self.key, self.value = tensor.permute([axes.index(axis) for axis in HND])
        self.block_size = self.key.shape[2]

    def write(self, blocks: Tensor, slots: Tensor, key: Tensor, value: Tensor) -> None:
        """Stores `[tokens, head, channel]`; token i goes to `slots[i]` of block `blocks[i]`."""
        self.key[blocks, :, slots] = key.to(self.key)
        self.value[blocks, :, slots] = value.to(self.value)

    def read(self, blocks: Tensor, length: int, like: Tensor) -> tuple[Tensor, Tensor]:
        """The first `length` tokens of a block table: two `[head, tokens, channel]`."""
        key, value = (
            part[blocks].transpose(0, 1).flatten(1, 2)[:, :length].to(like)
            for part in (self.key, self.value)
        )
        return key, value


class Model:
    """`caches` by layer, in order; `weights` are the share of `shard`."""

    def __init__(
        self,
        config: ModelConfig,
        weights: Weights,
        shard: Shard,
        group: Group,
        caches: Sequence[PagedCache],
    ) -> None:
        self._config, self._weights, self._shard, self._group = config, weights, shard, group
        self._caches = caches
        self._device = weights.norm.device
        exponent = torch.arange(0, config.head_size, 2, device=self._device) / config.head_size
        self._frequencies = 1.0 / config.rope_theta**exponent

    @torch.inference_mode()
    def forward(self, chunks: Sequence[Chunk]) -> Tensor | None:
        """Computes all chunks and stores their keys and values.

        Returns logits `[chunks with sample, vocabulary]` on rank 0, None on the others.
        """
        batch = _Batch(chunks, self._caches[0], self._frequencies)
        hidden = self._embed(batch.tokens)
        for weights, cache in zip(self._weights.layers, self._caches, strict=True):
            hidden = hidden + self._attention(weights, cache, hidden, batch)
            hidden = hidden + self._mlp(weights, hidden)
        hidden = self._norm(hidden[batch.last], self._weights.norm)
        logits = F.linear(hidden, self._weights.head)
        return self._group.gather_columns(logits, self._config.vocab_size)

    def _embed(self, tokens: Tensor) -> Tensor:
        first, end = self._shard.vocab
        mine = (tokens >= first) & (tokens < end)
        rows = self._weights.embedding[torch.where(mine, tokens - first, 0)]
        return self._group.sum(rows * mine[:, None])

    def _norm(self, hidden: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(hidden, weight.shape, weight, self._config.rms_eps)

    def _attention(
        self, weights: LayerWeights, cache: PagedCache, hidden: Tensor, batch: _Batch
    ) -> Tensor:
        config, shard = self._config, self._shard
        heads, kv_heads = shard.heads[1] - shard.heads[0], shard.kv_heads[1] - shard.kv_heads[0]
        projected = F.linear(self._norm(hidden, weights.input_norm), weights.qkv)
        query, key, value = torch.split(
            projected.view(len(projected), -1, config.head_size),
            [heads, kv_heads, kv_heads],
            dim=1,
        )
        query, key = batch.rotate(query), batch.rotate(key)
        cache.write(batch.block_of_token, batch.slot_of_token, key, value)
        answers = [
            attend(query[rows], *cache.read(blocks, chunk.end, query), chunk.start)
            for chunk, rows, blocks in zip(batch.chunks, batch.rows, batch.tables, strict=True)
        ]
        return self._group.sum(F.linear(torch.cat(answers).flatten(1), weights.output))

    def _mlp(self, weights: LayerWeights, hidden: Tensor) -> Tensor:
        gate, up = F.linear(self._norm(hidden, weights.mlp_norm), weights.gate_up).chunk(2, dim=1)
        return self._group.sum(F.linear(F.silu(gate) * up, weights.down))


def attend(query: Tensor, key: Tensor, value: Tensor, start: int) -> Tensor:
    """Causal attention of `query` `[tokens, head, channel]`, whose first token is at position
    `start`, over `key` and `value` `[kv head, positions, channel]`; the shape of `query`.
    """
    tokens, heads, channels = query.shape
    grouped = query.transpose(0, 1).reshape(key.shape[0], -1, channels)  # (query head, token)
    scores = grouped @ key.transpose(1, 2) * channels**-0.5
    if tokens > 1:
        position = torch.arange(start, start + tokens, device=query.device)
        future = torch.arange(key.shape[1], device=query.device) > position[:, None]
        scores.view(key.shape[0], -1, *future.shape).masked_fill_(future, -torch.inf)
    answers = torch.matmul(scores.softmax(dim=-1), value)
    return answers.view(heads, tokens, channels).transpose(0, 1)


class _Batch:
    """The index tensors of one step, made once for all layers."""

    def __init__(self, chunks: Sequence[Chunk], cache: PagedCache, frequencies: Tensor) -> None:
        device, cache_device = frequencies.device, cache.key.device
        self.chunks = chunks
        ends = torch.tensor([len(chunk.tokens) for chunk in chunks]).cumsum(0).tolist()
        self.rows = [slice(a, b) for a, b in zip([0, *ends], ends, strict=False)]
        self.last = [b - 1 for chunk, b in zip(chunks, ends, strict=True) if chunk.sample]
        self.tokens = torch.tensor([t for chunk in chunks for t in chunk.tokens], device=device)
        self.tables = [
            torch.tensor(chunk.blocks[: -(-chunk.end // cache.block_size)], device=cache_device)
            for chunk in chunks
        ]
        positions = torch.cat([torch.arange(chunk.start, chunk.end) for chunk in chunks])
        self.block_of_token = torch.cat(
            [
                table[torch.arange(chunk.start, chunk.end, device=cache_device) // cache.block_size]
                for chunk, table in zip(chunks, self.tables, strict=True)
            ]
        )
        self.slot_of_token = (positions % cache.block_size).to(cache_device)
        angles = positions.to(device)[:, None].float() * frequencies
        self._cos, self._sin = angles.cos()[:, None], angles.sin()[:, None]

    def rotate(self, heads: Tensor) -> Tensor:
        """Rotary embedding of `[tokens, head, channel]`; a pair is channel i and i + half."""
        first, second = heads.chunk(2, dim=-1)
        return torch.cat(
            (first * self._cos - second * self._sin, second * self._cos + first * self._sin), dim=-1
        )
