"""Arithmetic of token shards: who holds which tokens of a context that is split over ranks."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from kvagent.core.specs import TokenShard
from kvagent.errors import GeometryError

__all__ = ["check_token_shard", "held", "held_before", "own_number", "shards_meet"]

Ints = npt.NDArray[np.int64]

MAX_SHARDS = 1024


def check_token_shard(shard: TokenShard) -> None:
    """Raise `GeometryError` for a shard that no engine of this world has."""
    if not (shard.size <= MAX_SHARDS and shard.interleave <= 1 << 30):
        raise GeometryError(f"impossible token shard {shard}")


def held_before(shard: TokenShard, token: int) -> int:
    """How many of the tokens `[0, token)` the shard holds; also the place of `token` among the
    shard's own tokens when it holds it."""
    rounds, rest = divmod(token, shard.size * shard.interleave)
    return rounds * shard.interleave + min(
        max(rest - shard.rank * shard.interleave, 0), shard.interleave
    )


def held(shard: TokenShard, tokens: Ints) -> npt.NDArray[np.bool_]:
    """For each token whether the shard holds it."""
    mine: npt.NDArray[np.bool_] = tokens // shard.interleave % shard.size == shard.rank
    return mine


def own_number(shard: TokenShard, tokens: Ints) -> Ints:
    """The place of each token, which the shard must hold, among the shard's own tokens."""
    rounds = tokens // (shard.interleave * shard.size)
    number: Ints = rounds * shard.interleave + tokens % shard.interleave
    return number


def shards_meet(one: TokenShard, other: TokenShard) -> bool:
    """Whether any token belongs to both.

    Both are unions of intervals of `interleave` tokens, with periods `size * interleave`. The
    distances between interval starts are all numbers congruent to the difference of the first
    starts, modulo the gcd of the periods; two intervals meet when the distance is small enough.
    """
    step = math.gcd(one.size * one.interleave, other.size * other.interleave)
    distance = (other.rank * other.interleave - one.rank * one.interleave) % step
    return distance < one.interleave or step - distance < other.interleave
