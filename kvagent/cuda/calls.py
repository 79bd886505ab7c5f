"""Everything that kvagent asks of CUDA. `torch_cuda` asks it; tests put a recorder in its place.

Which thread calls what matters to CUDA, and is said here: a call about a device is made on a
thread that `bind` has bound to it, unless it is said otherwise. `bind` comes first on such a
thread, since a call without a context would make one on device 0.

Every method raises `GeometryError` (the memory cannot be had or shared), or `FabricError` (CUDA
itself failed: what this process does with the device has ended).
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

__all__ = ["CudaCalls", "Gpu", "Shared"]


@dataclass(frozen=True, slots=True)
class Gpu:
    """A device of this process. `index` is this process's number of it, which CUDA_VISIBLE_DEVICES
    may make another one elsewhere; `uuid` is the same everywhere, without nvidia-smi's "GPU-"."""

    index: int
    name: str
    uuid: str
    pci: str
    """Address on the PCI bus as /sys writes it, "0000:3b:00.0"; empty when it cannot be told."""
    flushes: bool = False
    """Whether `flush` does anything: the device takes RDMA writes, and can be told to wait for
    them."""


@dataclass(frozen=True, slots=True)
class Shared:
    """What another process needs to open memory: the legacy IPC handle of the allocation, and the
    place in it."""

    handle: bytes
    offset: int
    nbytes: int


class CudaCalls(Protocol):
    """See the module. A `Tensor` of memory is flat and of uint8."""

    # -------------------------------------------------------- on any thread

    def device_of(self, tensor: Tensor) -> int | None:
        """The device that a tensor lies on; None for host memory."""

    def find(self, uuid: str) -> Gpu:
        """The device of that uuid; `GeometryError` when this process has no such."""

    def describe(self, device: int) -> Gpu: ...

    def unshareable(self) -> str:
        """Why memory that torch allocates cannot be shared with another process, and what to set;
        empty when nothing is known that speaks against it."""

    def bind(self, device: int) -> None:
        """Makes the device's primary context, which torch uses too, that of the calling thread, one
        of the agent's own."""

    def open(self, device: int, shared: Shared) -> Tensor:
        """Memory of another process, open as long as a tensor of it lives."""

    # -------------------------------------------------------- memory

    def allocate(self, device: int, nbytes: int) -> Tensor:
        """Zeroed memory from torch's allocator; the zeros are there when this returns."""

    def export(self, tensor: Tensor) -> Shared:
        """What another process needs to `open` it."""

    def view(self, device: int, address: int, nbytes: int) -> Tensor:
        """Memory that somebody else keeps alive."""

    def pin(self, address: int, nbytes: int) -> None:
        """Page-locks host memory, so that copies to and from the device need no buffer."""

    def unpin(self, address: int) -> None: ...

    # -------------------------------------------------------- order

    def event_done(self, event: Any) -> bool:
        """Whether a `torch.cuda.Event` has come to pass; does not wait."""

    def flush(self, device: int) -> None:
        """Waits until what peers wrote into the device's memory by RDMA, and what the NIC said it
        had written, is visible to all that is launched from now on, in other processes too."""

    def stream(self, device: int) -> Any:
        """A stream of our own, which waits for no other and which no other waits for."""

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        """torch's operations inside go to that stream."""

    def finish(self, stream: Any) -> None:
        """Waits, asleep, until all that was put on the stream has ended."""
