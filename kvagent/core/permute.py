"""Copies between two layouts in host memory: the granules of a box, from one order to another.

The memory is given as flat arrays of bytes, one for each range of a layout; numpy checks that
every access lies inside. Runs are elements of one opaque dtype, so that numpy's own loops copy
them: there is no Python loop over runs or blocks, only one over regions.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kvagent.core.grids import Grid
from kvagent.core.regions import Family, RankLayout
from kvagent.core.rows import Pace
from kvagent.core.runs import Dim
from kvagent.core.track import Granules

__all__ = ["Bytes", "Permutation"]

Bytes = npt.NDArray[np.uint8]
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Permutation:
    """The regions of one box in two memories, of which the remote one is a single range.

    memories, local: range and byte offset there of each region; remote: its offset in the other.
    `lanes` (local, remote) say how granules repeat, `dims` and `token` what one consists of.
    """

    memories: tuple[int, ...]
    local: tuple[int, ...]
    remote: tuple[int, ...]
    lanes: tuple[Pace, Pace]
    dims: tuple[Dim, ...]
    token: Dim
    itemsize: int

    @classmethod
    def of(
        cls, grid: Grid, layout: RankLayout, family: Family, base: int, lanes: tuple[Pace, Pace]
    ) -> Permutation:
        """`layout`, `family`: the local ones of the grid; `base`: address of the remote range;
        `lanes`: for granules other than the grid's own."""
        raise NotImplementedError

    def run(self, tokens: int) -> tuple[int, tuple[Dim, ...]]:
        """Bytes of the longest common runs of `tokens` tokens, and the dimensions around them."""
        length, outer = self.itemsize, []
        dims = (*self.dims, self.token._replace(extent=tokens))
        for dim in sorted((dim for dim in dims if dim.extent > 1), key=lambda dim: dim.local):
            if dim.local == dim.remote == length:
                length *= dim.extent
            else:
                outer.append(dim)
        return length, tuple(reversed(outer))
