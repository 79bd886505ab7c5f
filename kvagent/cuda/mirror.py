"""A GPU cache's copy in host memory, for transports that cannot take GPU memory.

The mirror is as large as the cache and laid out like it, and is all that peers and the fabric
know. What an engine offers is copied down before the offer is visible to anybody; what was
fetched is copied up before it is reported, and no other byte of the cache is written. Each side
decides for itself whether it has one.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch
from torch import Tensor

from kvagent.core.mirror import Span
from kvagent.core.regions import MemoryRange
from kvagent.cuda.device import Device
from kvagent.errors import KVAgentError
from kvagent.memory.host import HostMemory

__all__ = ["Mirror"]

log = logging.getLogger("kvagent.mirror")


class Mirror:
    """`ranges` are those of the mirror, one for each of the cache's, in the same order."""

    def __init__(self, device: Device, cache: Sequence[MemoryRange]) -> None:
        """Makes the memory and pins it; on the device's thread. `GeometryError` when there is not
        so much."""
        self._device = device
        self._memory: list[HostMemory] = []
        self._pinned: list[int] = []
        calls = device.calls
        try:
            for each in cache:
                self._memory.append(HostMemory(each.nbytes))
        except BaseException:
            self._give_up()
            raise
        try:
            for memory in self._memory:
                calls.pin(memory.address, memory.nbytes)
                self._pinned.append(memory.address)
        except KVAgentError as error:
            log.warning("the mirror is not page-locked, and copies are slower: %s", error)
        self.ranges = tuple(MemoryRange(m.address, m.nbytes) for m in self._memory)
        self._above = [calls.view(r.device, r.address, r.nbytes) for r in cache]
        self._below = [m.tensor((m.nbytes,), (1,), 0, torch.uint8) for m in self._memory]

    async def down(self, spans: Sequence[Span]) -> None:
        """From the GPU: returns when the bytes are in host memory."""
        await self._device.run(lambda: self._copy(spans, self._above, self._below))

    async def up(self, spans: Sequence[Span]) -> None:
        """To the GPU: returns when the bytes are there, for kernels of every stream."""
        await self._device.run(lambda: self._copy(spans, self._below, self._above))

    def _copy(
        self, spans: Sequence[Span], source: Sequence[Tensor], into: Sequence[Tensor]
    ) -> None:
        def work() -> None:
            for memory, begin, end in spans:
                into[memory][begin:end].copy_(source[memory][begin:end], non_blocking=True)

        self._device.copy(work)

    async def close(self) -> None:
        """Waits for copies, and gives the memory up. No peer reads it any more."""
        await self._device.run(self._give_up)

    def _give_up(self) -> None:
        for address in self._pinned:
            try:
                self._device.calls.unpin(address)
            except KVAgentError as error:
                log.debug("unpin: %s", error)
        self._pinned.clear()
        for memory in self._memory:
            memory.close()
