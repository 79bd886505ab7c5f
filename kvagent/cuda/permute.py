"""`kvagent.core.permute` in torch's operations, for memory that numpy cannot see.

What is copied is the same to the byte; `kvagent.core.permute.Permutation` says what. Memory is
given as flat tensors of uint8, the caches' and an area's of the staging buffer. Operations go to
the stream that torch has current, and this returns before they have run.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from kvagent.core.permute import Permutation
from kvagent.core.runs import Dim, common_run
from kvagent.core.track import Granules, Place

__all__ = ["permute"]

_UNITS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}


class _Box(NamedTuple):
    """A strided box of runs, in bytes: extents and strides of the outer dimensions, and the run
    that lies at each place."""

    extents: tuple[int, ...]
    strides: tuple[int, ...]
    run: int

    def at(self, memory: Tensor, offset: int, unit: int) -> Tensor:
        """The box in `memory`, with its runs as a last dimension of words of `unit` bytes."""
        words = memory[: memory.numel() // unit * unit].view(_UNITS[unit])
        return words.as_strided(
            (*self.extents, self.run // unit),
            (*(stride // unit for stride in self.strides), 1),
            words.storage_offset() + offset // unit,
        )


def permute(
    permutation: Permutation, granules: Granules, caches: Sequence[Tensor], area: Tensor
) -> None:
    """`Permutation.copy`, from `area` into `caches`. `granules` must be sorted by remote block and
    slot, and be numbered as the area's blocks."""
    if len(granules.local_block):
        _permute_whole(permutation, granules, caches, area)
    for place in granules.partial:
        _permute_part(permutation, place, caches, area)


def _permute_whole(
    permutation: Permutation, granules: Granules, caches: Sequence[Tensor], area: Tensor
) -> None:
    dims = (*permutation.dims, permutation.token)
    ours, theirs = permutation.local_pace, permutation.remote_pace
    local, remote = _boxes(
        dims,
        permutation.itemsize,
        ((ours.blocks, ours.block_stride), (ours.slots, ours.slot_stride)),
        ((theirs.blocks, theirs.block_stride), (theirs.slots, theirs.slot_stride)),
    )
    # One copy of the indices to the device serves all regions.
    indices = np.stack(granules[:4]).astype(np.int64)
    into_block, into_slot, from_block, from_slot = torch.from_numpy(indices).to(area.device)
    for memory, at, source_at in zip(
        permutation.memories, permutation.local, permutation.remote, strict=True
    ):
        cache = caches[memory]
        unit = _unit(local, remote, cache.data_ptr() + at, area.data_ptr() + source_at)
        source = remote.at(area, source_at, unit)
        local.at(cache, at, unit)[into_block, into_slot] = source[from_block, from_slot]


def _permute_part(
    permutation: Permutation, place: Place, caches: Sequence[Tensor], area: Tensor
) -> None:
    token = permutation.token._replace(extent=place.end - place.begin)
    local, remote = _boxes((*permutation.dims, token), permutation.itemsize, (), ())
    ours, theirs = permutation.local_pace, permutation.remote_pace
    into = (
        place.local_block * ours.block_stride
        + place.local_slot * ours.slot_stride
        + place.begin * token.local
    )
    out_of = (
        place.remote_block * theirs.block_stride
        + place.remote_slot * theirs.slot_stride
        + place.begin * token.remote
    )
    for memory, at, source_at in zip(
        permutation.memories, permutation.local, permutation.remote, strict=True
    ):
        cache, begin, end = caches[memory], at + into, source_at + out_of
        unit = _unit(local, remote, cache.data_ptr() + begin, area.data_ptr() + end)
        local.at(cache, begin, unit).copy_(remote.at(area, end, unit))


def _boxes(
    dims: tuple[Dim, ...],
    itemsize: int,
    ours: tuple[tuple[int, int], ...],
    theirs: tuple[tuple[int, int], ...],
) -> tuple[_Box, _Box]:
    """The two sides of a copy; `ours` and `theirs` are (extent, stride) of what is indexed."""
    run, outer = common_run(dims, itemsize)
    extents = tuple(dim.extent for dim in outer)
    return (
        _Box(
            (*(extent for extent, _ in ours), *extents),
            (*(stride for _, stride in ours), *(dim.local for dim in outer)),
            run,
        ),
        _Box(
            (*(extent for extent, _ in theirs), *extents),
            (*(stride for _, stride in theirs), *(dim.remote for dim in outer)),
            run,
        ),
    )


def _unit(local: _Box, remote: _Box, *addresses: int) -> int:
    """The widest word that runs, strides and addresses are multiples of, in bytes."""
    return math.gcd(max(_UNITS), local.run, *local.strides, *remote.strides, *addresses)
