"""The real `CudaCalls`: memory, events and streams by torch, the rest by the driver.

torch is asked only for what its documentation names. Memory that it did not allocate comes to it
by `__cuda_array_interface__`, which keeps the owner alive as long as the tensor.
"""

from __future__ import annotations

import os
import weakref
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from kvagent.cuda import driver
from kvagent.cuda.calls import Gpu, Shared
from kvagent.errors import FabricError, GeometryError

__all__ = ["ALLOCATOR_VARIABLES", "TorchCuda", "allocator_setting"]

ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""torch looks at both, at the first one first."""


class TorchCuda:
    """A `CudaCalls`. Making one costs nothing and touches no GPU."""

    def device_of(self, tensor: Tensor) -> int | None:
        return tensor.device.index if tensor.device.type == "cuda" else None

    def find(self, uuid: str) -> Gpu:
        gpus = [self.describe(device) for device in range(driver.count())]
        for gpu in gpus:
            if gpu.uuid == uuid:
                return gpu
        seen = ", ".join(gpu.uuid for gpu in gpus) or "none"
        raise GeometryError(
            f"this process has no GPU {uuid}; it sees {seen}: start it with the same "
            "CUDA_VISIBLE_DEVICES (in a container: the same --gpus) as its engine"
        )

    def describe(self, device: int) -> Gpu:
        name, uuid, pci = driver.describe(device)
        options = driver.attribute(device, driver.GPU_DIRECT_RDMA_FLUSH_WRITES_OPTIONS)
        return Gpu(device, name, uuid, pci, bool(options & driver.FLUSH_BY_HOST))

    def unshareable(self) -> str:
        if torch.version.cuda is None:
            return f"torch {torch.__version__} is built without CUDA: install its CUDA build"
        for name in ALLOCATOR_VARIABLES:
            settings = allocator_setting(os.environ.get(name, ""))
            if settings.get("expandable_segments", "").lower() == "true":
                return (
                    f"{name} has expandable_segments:True, and such memory has no CUDA IPC "
                    f"handle: set {name}=expandable_segments:False"
                )
        backend = torch.cuda.memory.get_allocator_backend()
        if backend != "native":
            return (
                f"torch allocates with {backend}, and such memory has no CUDA IPC handle: set "
                "PYTORCH_CUDA_ALLOC_CONF=backend:native"
            )
        return ""

    def bind(self, device: int) -> None:
        driver.bind(device)
        torch.cuda.set_device(device)

    # ------------------------------------------------------------ memory

    def allocate(self, device: int, nbytes: int) -> Tensor:
        try:
            tensor = torch.zeros(nbytes, dtype=torch.uint8, device=torch.device("cuda", device))
        except torch.OutOfMemoryError as error:
            free, _ = torch.cuda.mem_get_info(device)
            raise GeometryError(
                f"{nbytes} bytes of GPU memory: GPU {device} has {free} free"
            ) from error
        torch.cuda.synchronize(device)
        return tensor

    def export(self, tensor: Tensor) -> Shared:
        address = tensor.data_ptr()
        try:
            base, _ = driver.address_range(address)
            handle = driver.ipc_handle(base)
        except driver.CudaDriverError as error:
            why = self.unshareable() or (
                "which allocators can do is said in PYTORCH_CUDA_ALLOC_CONF: neither "
                "expandable_segments nor cudaMallocAsync; MIG and WSL have no CUDA IPC either"
            )
            raise GeometryError(f"GPU memory cannot be shared: {error}; {why}") from error
        return Shared(handle, address - base, tensor.nbytes)

    def open(self, device: int, shared: Shared) -> Tensor:
        if len(shared.handle) != driver.HANDLE_BYTES:
            raise GeometryError(f"an IPC handle of {len(shared.handle)} bytes")
        try:
            with driver.pushed(device):
                base = driver.ipc_open(shared.handle)
                size = driver.address_range(base)[1]
        except driver.CudaDriverError as error:
            raise GeometryError(
                f"the sidecar's GPU memory cannot be opened: {error}. Engine and sidecar need the "
                "same GPU and user, and in containers the same PID and IPC namespaces "
                "(docker run --pid=container:... --ipc=container:..., Kubernetes: one pod with "
                "shareProcessNamespace)"
            ) from error
        span = _Span(base + shared.offset, shared.nbytes)
        weakref.finalize(span, _close_quietly, device, base)
        if shared.offset + shared.nbytes > size:
            raise GeometryError(f"{shared.nbytes} bytes from {shared.offset} of {size}")
        return _tensor(span, device)

    def view(self, device: int, address: int, nbytes: int) -> Tensor:
        return _tensor(_Span(address, nbytes), device)

    def pin(self, address: int, nbytes: int) -> None:
        driver.pin(address, nbytes)

    def unpin(self, address: int) -> None:
        driver.unpin(address)

    # ------------------------------------------------------------ order

    def event_done(self, event: Any) -> bool:
        try:
            return bool(event.query())
        except RuntimeError as error:
            raise FabricError(f"CUDA: {error}") from error

    def flush(self, device: int) -> None:
        driver.flush()

    def stream(self, device: int) -> Any:
        return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        return torch.cuda.stream(stream)

    def finish(self, stream: Any) -> None:
        # Not blocking, the host would spin.
        event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        event.record(stream)
        try:
            event.synchronize()
        except RuntimeError as error:
            raise FabricError(f"CUDA: {error}") from error


class _Span:
    """Memory as torch takes it from other libraries."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (address, False),
            "strides": None,
            "version": 3,
        }


def _tensor(span: _Span, device: int) -> Tensor:
    with torch.cuda.device(device):  # else torch would ask about it on device 0
        return torch.as_tensor(span, device=torch.device("cuda", device))


def _close_quietly(device: int, base: int) -> None:
    try:
        with driver.pushed(device):
            driver.ipc_close(base)
    except FabricError:
        pass  # the context is gone, and the mapping with it


def allocator_setting(text: str) -> dict[str, str]:
    """What stands in one of `ALLOCATOR_VARIABLES`: "key:value,key:value"."""
    pairs = (part.partition(":") for part in text.split(",") if part.strip())
    return {key.strip(): value.strip() for key, _, value in pairs}
