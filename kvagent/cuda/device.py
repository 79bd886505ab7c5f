"""One GPU as an agent uses it: a thread that is bound to it, and what runs there.

The event loop never calls CUDA: a call may wait for the device. Copies have a stream of their own,
and the thread waits for each before it says that it is done, so that whoever hears of it may launch
what he likes on any stream of any process.

When are bytes that a peer's read brought visible to kernels? UCX reports a read when the NIC has
(or, by cuda_ipc and cuda_copy, when an event after the copy has passed). A NIC may have said so
before its last write has got through the bus: the more so as NIXL asks for relaxed ordering
(UCX_IB_PCI_RELAXED_ORDERING=try, its `ucx_utils.cpp`). `cuFlushGPUDirectRDMAWrites` waits for that;
where the hardware keeps the order by itself it does nothing (CUDA driver API, "Context
management"). So it is called after the last read and before anybody is told, and before a kernel of
ours moves the bytes on. The attribute SYNC_MEMOPS, which makes synchronous copies into registered
memory wait, is set by UCX itself when it first sees the memory (`cuda_copy_md.c`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from kvagent.cuda.calls import CudaCalls, Gpu

__all__ = ["EVENT_POLL", "Device"]

T = TypeVar("T")

EVENT_POLL = 0.001
"""Seconds between looks at an event. Waiting for it in CUDA would spin, or take the thread."""


class Device:
    """`await start()` first. Not for other memory than this GPU's."""

    def __init__(self, calls: CudaCalls, index: int) -> None:
        self.calls = calls
        self.index = index
        self.stream: Any = None
        self._gpu: Gpu | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="kvagent-cuda")

    @property
    def gpu(self) -> Gpu:
        assert self._gpu is not None
        return self._gpu

    async def start(self) -> None:
        """Binds the thread before anything else runs there."""
        await self.run(self._start)

    def _start(self) -> None:
        self.bind()
        self._gpu = self.calls.describe(self.index)
        self.stream = self.calls.stream(self.index)

    def bind(self) -> None:
        """The device's context becomes that of the calling thread."""
        self.calls.bind(self.index)

    async def run(self, work: Callable[[], T]) -> T:
        """`work` on the thread; it goes on when its waiter is cancelled."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    async def wait(self, event: Any) -> None:
        """Returns when an event of this process has passed."""
        while not await self.run(lambda: self.calls.event_done(event)):  # noqa: ASYNC110
            await asyncio.sleep(EVENT_POLL)

    async def flush(self) -> None:
        """See the module."""
        await self.run(self.flush_here)

    def flush_here(self) -> None:
        """The same, when the calling thread is bound already."""
        if self.gpu.flushes:
            self.calls.flush(self.index)

    def copy(self, work: Callable[[], None]) -> None:
        """`work` puts copies on the stream; returns when they are done. On a bound thread."""
        try:
            with self.calls.on(self.stream):
                work()
        finally:
            self.calls.finish(self.stream)  # also of what was put there before it failed

    async def close(self) -> None:
        """Waits for what runs on the thread."""
        await asyncio.to_thread(self._thread.shutdown)
