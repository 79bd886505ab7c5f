"""Which remote rank to read each head from: head ranges intersected, replicas spread.

    local rank of 2, 8 heads      | 0  1  2  3   | 4  5  6  7
    remote ranks of 3             | 0  1 | 2  3  4 | 5  6  7
    read_shares(0, 2, 3, 8)         rank 0, heads 0:2    rank 1, heads 2:4

Knows heads and ranks only; which bytes lie behind a share is the plan's business.
"""

from __future__ import annotations

from typing import NamedTuple

from kvagent.core.specs import rank_heads
from kvagent.errors import TopologyError

__all__ = ["ReadShare", "read_shares"]


class ReadShare(NamedTuple):
    """Read the heads `start <= head < stop` (global numbers) from the remote rank `rank`."""

    rank: int
    start: int
    stop: int


def read_shares(tp_rank: int, tp_size: int, remote_tp_size: int, num_heads: int) -> list[ReadShare]:
    """What the local rank reads from which remote rank, in the order of the heads.

    Takes any two sizes. The shares cover the heads that the local rank holds, each exactly once,
    and name no rank twice. Where several remote ranks hold a head, the local ranks that need it
    spread evenly over them.

    Raises `TopologyError` for a remote size below 1, `GeometryError` for a local rank or number of
    heads that cannot be.
    """
    if remote_tp_size < 1:
        raise TopologyError(f"remote tensor parallel size must be at least 1, not {remote_tp_size}")
    first, last = rank_heads(tp_rank, tp_size, num_heads)
    if remote_tp_size > num_heads:
        return [
            ReadShare(
                _pick_holder(head, tp_rank, tp_size, remote_tp_size, num_heads), head, head + 1
            )
            for head in range(first, last)
        ]
    shares = []
    for rank in range(remote_tp_size):
        held_from, held_to = rank_heads(rank, remote_tp_size, num_heads)
        start, stop = max(held_from, first), min(held_to, last)
        if start < stop:
            shares.append(ReadShare(rank, start, stop))
    return shares


def _holders(head: int, tp_size: int, num_heads: int) -> range:
    """The ranks that hold `head`, when there are at least as many ranks as heads.

    Rank r then holds the one head h with h <= r * num_heads / tp_size < h + 1; solved for r, both
    bounds round up.
    """
    return range(-(-head * tp_size // num_heads), -(-(head + 1) * tp_size // num_heads))


def _pick_holder(head: int, tp_rank: int, tp_size: int, remote_tp_size: int, num_heads: int) -> int:
    """The remote rank to read a replicated head from: the k-th of m local readers takes the
    replica that lies k/m of the way through the replicas."""
    remote = _holders(head, remote_tp_size, num_heads)
    if tp_size <= num_heads:  # the local rank is the only reader
        return remote[0]
    local = _holders(head, tp_size, num_heads)
    return remote[local.index(tp_rank) * len(remote) // len(local)]
