"""Boxes of strided elements to runs of bytes. Knows nothing of layers, tokens or blocks.

A run is `(local offset, remote offset, length)`, contiguous on both sides.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvagent.errors import UnsupportedGeometry

__all__ = ["Dim", "box_runs", "coalesce", "common_run"]

Ints = npt.NDArray[np.int64]

MAX_RUNS = 1 << 16
"""Most runs of one box (one granule of one region)."""


class Dim(NamedTuple):
    """A dimension of both sides: `extent` steps of so many bytes on each."""

    extent: int
    local: int
    remote: int


def common_run(dims: Iterable[Dim], itemsize: int) -> tuple[int, list[Dim]]:
    """Bytes of the longest run that both sides have, and the dimensions that repeat it, the
    outermost of the local side first."""
    length = itemsize
    outer = []
    for dim in sorted((dim for dim in dims if dim.extent > 1), key=lambda dim: dim.local):
        if dim.local == dim.remote == length:
            length *= dim.extent
        else:
            outer.append(dim)
    return length, outer[::-1]


def box_runs(dims: Iterable[Dim], itemsize: int) -> tuple[Ints, Ints, int]:
    """The fewest equal runs of a box: local offsets, remote offsets, bytes of each.

    From the innermost dimension outwards, a dimension joins the run as long as its step is the
    run's length on both sides; the others are enumerated. Raises `UnsupportedGeometry` when that
    gives more than `MAX_RUNS` runs.
    """
    length, outer = common_run(dims, itemsize)
    count = math.prod(dim.extent for dim in outer)
    if count > MAX_RUNS:
        raise UnsupportedGeometry(
            f"the two layouts have only runs of {length} bytes in common, {count} for each part "
            f"of a block; the limit is {MAX_RUNS}"
        )
    local = remote = np.zeros(1, dtype=np.int64)
    for dim in outer:
        steps = np.arange(dim.extent, dtype=np.int64)
        local = (local[:, None] + steps * dim.local).ravel()
        remote = (remote[:, None] + steps * dim.remote).ravel()
    return local, remote, length


def coalesce(local: Ints, remote: Ints, length: Ints) -> tuple[Ints, Ints, Ints]:
    """The same bytes in the fewest runs, sorted by local offset. Runs must not overlap."""
    if len(local) < 2:
        return local, remote, length
    order = np.argsort(local, kind="stable")
    local, remote, length = local[order], remote[order], length[order]
    joined = (local[:-1] + length[:-1] == local[1:]) & (remote[:-1] + length[:-1] == remote[1:])
    starts = np.flatnonzero(np.concatenate(([True], ~joined)))
    return local[starts], remote[starts], np.add.reduceat(length, starts)
