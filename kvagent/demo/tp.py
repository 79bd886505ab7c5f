"""Tensor parallelism: which part of the model a rank holds, and the two collectives it needs.

Every projection into heads or into the MLP is cut by rows, the way back by columns, so that one
sum at the end of each half layer suffices (Shoeybi et al., "Megatron-LM", 2019). Embedding and
output are cut by vocabulary. Not here: starting the processes.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import Store

from kvagent.core.specs import rank_heads
from kvagent.demo.config import ModelConfig
from kvagent.errors import TopologyError

Span = tuple[int, int]

_TIMEOUT = timedelta(seconds=120)


@dataclass(frozen=True)
class Shard:
    """What one of `size` ranks holds; all spans are half open and count global rows."""

    rank: int
    size: int
    heads: Span
    kv_heads: Span
    intermediate: Span
    vocab: Span

    @classmethod
    def of(cls, config: ModelConfig, rank: int, size: int) -> Shard:
        """Query heads follow their KV head. When there are more ranks than KV heads, several
        ranks hold the same KV head and share its query heads. `TopologyError` if none is left.
        """
        group = config.num_heads // config.num_kv_heads
        kv = rank_heads(rank, size, config.num_kv_heads)
        twins = [r for r in range(size) if rank_heads(r, size, config.num_kv_heads) == kv]
        share = _span(twins.index(rank), len(twins), (kv[1] - kv[0]) * group)
        if share[0] == share[1]:
            raise TopologyError(
                f"TP {size} leaves rank {rank} without a query head: {config.name} has "
                f"{config.num_heads} query heads in {config.num_kv_heads} groups"
            )
        first = kv[0] * group
        return cls(
            rank=rank,
            size=size,
            heads=(first + share[0], first + share[1]),
            kv_heads=kv,
            intermediate=_span(rank, size, config.intermediate_size),
            vocab=_span(rank, size, config.vocab_size),
        )


def _span(index: int, parts: int, total: int) -> Span:
    return index * total // parts, (index + 1) * total // parts


class Group:
    """All ranks of one engine; with one rank nothing is sent."""

    def __init__(self, rank: int, size: int, store: Store | None) -> None:
        """`store` is where the ranks meet (None only when `size` is 1). Returns when all have."""
        self.rank, self.size = rank, size
        if size > 1:
            assert store is not None
            # All ranks are on this host; a host name that resolves elsewhere must not matter.
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
            dist.init_process_group(
                "gloo", store=store, rank=rank, world_size=size, timeout=_TIMEOUT
            )

    def sum(self, partial: Tensor) -> Tensor:
        """The sum over all ranks, added up in float64 so that it hardly depends on their number.

        By way of rank 0: where ranks share few cores a step waits for wake-ups, not for bytes,
        and this has fewer of them than the ring of `all_reduce` (measured: a third of its time).
        """
        if self.size == 1:
            return partial
        total = partial.to("cpu", torch.float64)
        if self.rank == 0:
            others = range(1, self.size)
            parts = [torch.empty_like(total) for _ in others]
            _wait(dist.irecv(part, src=rank) for part, rank in zip(parts, others, strict=True))
            for part in parts:
                total += part
            _wait(dist.isend(total, dst=rank) for rank in others)
        else:
            dist.send(total, dst=0)
            dist.recv(total, src=0)
        return total.to(partial)

    def gather_columns(self, part: Tensor, columns: int) -> Tensor | None:
        """All ranks' columns side by side, `[rows, columns]`, on rank 0; None elsewhere."""
        if self.size == 1:
            return part
        spans = [_span(rank, self.size, columns) for rank in range(self.size)]
        width = max(stop - start for start, stop in spans)
        # On the host: that is all that gloo gathers.
        padded = torch.zeros(part.shape[0], width, dtype=part.dtype)
        padded[:, : part.shape[1]] = part
        parts = [torch.empty_like(padded) for _ in spans] if self.rank == 0 else None
        dist.gather(padded, parts)
        if parts is None:
            return None
        whole = torch.cat([p[:, : b - a] for p, (a, b) in zip(parts, spans, strict=True)], dim=1)
        return whole.to(part.device)

    def close(self) -> None:
        if self.size > 1:
            dist.destroy_process_group()


def _wait(works: Iterable[dist.Work | None]) -> None:
    for work in list(works):  # the list: all are started before the first is waited for
        assert work is not None
        work.wait()
