"""GPU memory that the sidecar owns and its engine opens, as `kvagent.memory.host` is for hosts.

It outlives the engine, so that peers which are reading when the engine dies finish their reads.
CUDA's legacy IPC handles are what another process opens it with: they are of whole allocations,
good as long as this process lives, and only within one host (in containers: one PID and IPC
namespace) and one user.
"""

from __future__ import annotations

from torch import Tensor

from kvagent.cuda.calls import CudaCalls, Gpu, Shared
from kvagent.errors import GeometryError

__all__ = ["CudaMemory"]


class CudaMemory:
    """Zeroed memory on one GPU. Made on a thread of its own, which it binds."""

    pages = "gpu"

    def __init__(self, calls: CudaCalls, uuid: str, nbytes: int) -> None:
        """`GeometryError`: no such GPU here, not so much memory, or it could not be shared."""
        why = calls.unshareable()
        if why:
            raise GeometryError(f"`kvagent serve` cannot share GPU memory: {why}")
        self.gpu: Gpu = calls.find(uuid)
        calls.bind(self.gpu.index)
        self.tensor: Tensor | None = calls.allocate(self.gpu.index, nbytes)
        self.shared: Shared = calls.export(self.tensor)
        self.nbytes = nbytes
        self.address = self.tensor.data_ptr()

    def close(self) -> None:
        """Gives it up; the allocator has it again when nobody else holds the tensor."""
        self.tensor = None
