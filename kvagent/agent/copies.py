"""Where the staging buffer lies, and what copies out of it: on the host numpy, on a GPU torch.

The buffer lies where the cache does, so that a copy crosses no bus. Which blocks are read into it,
and which bytes are copied, is decided by `kvagent.core.staging`; when, by `staging`.
"""

from __future__ import annotations

import ctypes
from typing import Protocol

import numpy as np
from torch import Tensor

from kvagent.core.permute import Bytes
from kvagent.core.regions import MemoryRange, RankLayout
from kvagent.core.staged import Chunk, StagedPart
from kvagent.core.staging import AREAS
from kvagent.cuda.device import Device
from kvagent.cuda.permute import permute
from kvagent.memory.host import HostMemory

__all__ = ["Copier", "GpuCopier", "HostCopier", "copier_for"]


class Copier(Protocol):
    """One buffer of `AREAS` areas. All of it runs on one thread that is not the event loop's."""

    def open(self, nbytes: int) -> MemoryRange:
        """Makes the buffer. `GeometryError` when there is no such memory."""

    def copy(self, part: StagedPart, chunk: Chunk, area: int) -> None:
        """Puts a chunk where it belongs; returns when it is there."""

    def close(self) -> None:
        """Gives the buffer up."""


def copier_for(layout: RankLayout, device: Device | None) -> Copier:
    """The one for a cache that is registered as `layout` says."""
    if layout.kind == "vram":
        assert device is not None
        return GpuCopier(layout, device)
    return HostCopier(layout)


class HostCopier:
    def __init__(self, layout: RankLayout) -> None:
        self._layout = layout
        self._memory: HostMemory | None = None
        self._caches: list[Bytes] = []
        self._areas: list[Bytes] = []

    def open(self, nbytes: int) -> MemoryRange:
        memory = self._memory = HostMemory(nbytes)
        size = nbytes // AREAS
        self._caches = [_bytes_at(each.address, each.nbytes) for each in self._layout.ranges]
        self._areas = [_bytes_at(memory.address + i * size, size) for i in range(AREAS)]
        return MemoryRange(memory.address, nbytes)

    def copy(self, part: StagedPart, chunk: Chunk, area: int) -> None:
        part.copy(chunk, self._caches, self._areas[area])

    def close(self) -> None:
        if self._memory is not None:
            self._memory.close()


class GpuCopier:
    """On the device's side stream."""

    def __init__(self, layout: RankLayout, device: Device) -> None:
        self._layout = layout
        self._device = device
        self._caches: list[Tensor] = []
        self._areas: list[Tensor] = []

    def open(self, nbytes: int) -> MemoryRange:
        device = self._device
        device.bind()
        buffer = device.calls.allocate(device.index, nbytes)
        self._caches = [
            device.calls.view(each.device, each.address, each.nbytes)
            for each in self._layout.ranges
        ]
        size = nbytes // AREAS
        self._areas = [buffer[i * size : (i + 1) * size] for i in range(AREAS)]
        return MemoryRange(buffer.data_ptr(), nbytes, "vram", device.index)

    def copy(self, part: StagedPart, chunk: Chunk, area: int) -> None:
        self._device.flush_here()  # what was read into the area, before a kernel reads it there
        granules = part.in_area(chunk)

        def work() -> None:
            for permutation in part.permutations:
                permute(permutation, granules, self._caches, self._areas[area])

        self._device.copy(work)

    def close(self) -> None:
        self._areas.clear()
        self._caches.clear()


def _bytes_at(address: int, nbytes: int) -> Bytes:
    """A view that does not keep its memory mapped: it must not outlive it."""
    return np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(address))
