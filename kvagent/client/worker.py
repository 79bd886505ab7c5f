"""`WorkerClient`: what each worker process of an engine calls, at start-up only.

The connection stays open as long as the object lives: its end is how the sidecar learns that the
worker is gone.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

import torch

from kvagent.client.channel import Address, Channel
from kvagent.core.layout import TensorView, tensor_shapes
from kvagent.core.specs import CacheSpec, WorkerInfo
from kvagent.cuda.calls import CudaCalls, Gpu, Shared
from kvagent.cuda.handover import Handover
from kvagent.cuda.torch_cuda import TorchCuda
from kvagent.errors import AgentError, GeometryError
from kvagent.memory.host import MappedMemory, share_tensor, tensor_in
from kvagent.wire.messages import (
    Allocate,
    Allocated,
    GpuMemory,
    Join,
    JoinAccepted,
    Register,
    Registered,
    SharedRange,
)

SLOW = 120.0
"""Seconds for calls that fault in or register much memory."""


class WorkerClient:
    """One worker's connection to the sidecar of its rank."""

    def __init__(
        self,
        address: Address,
        *,
        timeout: float = 10.0,
        cuda: CudaCalls | None = None,
        handover: Handover | None = None,
    ) -> None:
        """`handover` is there when the agent is a thread of this process: see `EmbeddedAgent`.
        `cuda` is for tests."""
        self._cuda = cuda or TorchCuda()
        self._handover = handover
        self._channel = Channel(address, timeout)
        self._in_process = not isinstance(address, str)
        self._info: WorkerInfo | None = None
        self._endpoint = ""
        self._memory: MappedMemory | torch.Tensor | None = None

    def join(self, info: WorkerInfo, *, keep_cache: bool = False) -> None:
        """Says who this worker is; the first call.

        It starts afresh: a cache that a worker before this one left in the sidecar is given up,
        and peers that read from it are told. With `keep_cache` it re-attaches instead: the cache,
        its bytes and the transfers under way stay as they are, and `allocate_kv_caches` with the
        same specs maps them again. Only the rank that left it can have it back, and only memory
        that the sidecar owns: otherwise `CacheGoneError`, and a new client joins afresh.
        """
        answer = self._channel.call(Join(info=info, keep_cache=keep_cache), timeout=SLOW)
        if not isinstance(answer, JoinAccepted):
            raise AgentError(f"unexpected answer to join: {type(answer).__name__}")
        self._info = info
        self._endpoint = answer.endpoint

    @property
    def endpoint(self) -> str:
        """ "host:port" of this sidecar; rank 0's is what the other ranks get as `leader`."""
        if not self._endpoint:
            raise AgentError("the endpoint is known after join()")
        return self._endpoint

    def allocate_kv_caches(
        self,
        specs: Mapping[str, CacheSpec],
        num_blocks: int,
        device: torch.device | str = "cpu",
    ) -> dict[str, torch.Tensor]:
        """Cache memory owned by the sidecar, mapped here: one tensor per layer (and per named
        part, see `tensor_name`), of the shape that the spec's axes say. Zeroed, or as it was left
        after `join(keep_cache=True)`; `GeometryError` when specs or blocks are not the old ones.

        On a GPU with `device="cuda:0"`, this process's number of it: the sidecar's torch
        allocates, and this process opens the memory by CUDA IPC. `GeometryError` says what to set
        when it cannot be shared, or opened. The tensors must not be used once the sidecar is gone.
        """
        info = self._joined()
        gpu = self._gpu(torch.device(device))
        answer = self._channel.call(
            Allocate(specs=dict(specs), num_blocks=num_blocks, gpu=gpu.uuid if gpu else ""),
            timeout=SLOW,
        )
        if not isinstance(answer, Allocated) or (answer.memory is None) != (gpu is None):
            raise AgentError(f"unexpected answer to allocate: {type(answer).__name__}")
        dtypes = _dtypes(specs, info, num_blocks)
        if gpu is None or answer.memory is None:
            mapped = self._memory = MappedMemory(self._channel.take_fd(), answer.nbytes)
            return {
                name: mapped.tensor(view.shape, view.strides, view.offset, dtypes[name])
                for name, view in answer.views.items()
            }
        opened = self._memory = self._open(gpu, answer.memory, answer.nbytes)
        return {
            name: tensor_in(opened, view.shape, view.strides, view.offset, dtypes[name])
            for name, view in answer.views.items()
        }

    def _gpu(self, device: torch.device) -> Gpu | None:
        if device.type == "cpu":
            return None
        if device.type != "cuda":
            raise GeometryError(f"device {device}: a cache lies on the host or on a CUDA device")
        return self._cuda.describe(device.index or 0)

    def _open(self, gpu: Gpu, memory: GpuMemory, nbytes: int) -> torch.Tensor:
        if self._handover is not None:
            tensor: torch.Tensor = self._handover.take(memory.handed)
            return tensor
        return self._cuda.open(gpu.index, Shared(memory.handle, memory.offset, nbytes))

    def register_kv_caches(
        self, tensors: Mapping[str, torch.Tensor], specs: Mapping[str, CacheSpec]
    ) -> None:
        """Cache memory owned by the engine, in shared memory; strides are taken from the tensors.

        Raises `GeometryError` when a tensor is missing, has another shape than its spec says, or
        lies where the sidecar cannot map it. GPU memory of the engine's own is for `EmbeddedAgent`
        alone: what one process got from cudaMalloc, another cannot register.
        """
        info = self._joined()
        num_blocks = _count_blocks(tensors, specs, info)
        ranges: list[SharedRange] = []
        fds: list[int] = []
        views: dict[str, TensorView] = {}
        places: dict[int, int] = {}
        try:
            for name, tensor in tensors.items():
                gpu = self._cuda.device_of(tensor)
                if gpu is None and tensor.device.type != "cpu":
                    raise GeometryError(f"{name!r} is on {tensor.device}: on the host, or CUDA")
                if gpu is not None and not self._in_process:
                    raise GeometryError(
                        f"{name!r} is on GPU {gpu}, and a sidecar cannot register memory that "
                        "another process allocated there: take the cache from "
                        f"allocate_kv_caches(..., device='cuda:{gpu}'), or use EmbeddedAgent"
                    )
                storage = tensor.untyped_storage()
                key = storage.data_ptr()
                if key not in places:
                    places[key] = len(ranges)
                    if self._in_process:
                        ranges.append(
                            SharedRange(
                                nbytes=storage.nbytes(),
                                address=key,
                                device=-1 if gpu is None else gpu,
                            )
                        )
                    else:
                        shared = share_tensor(tensor)
                        fds.append(shared.fd)
                        ranges.append(SharedRange(nbytes=shared.nbytes, offset=shared.offset))
                size = tensor.element_size()
                views[name] = TensorView(
                    places[key],
                    tensor.data_ptr() - key,
                    tuple(tensor.shape),
                    tuple(stride * size for stride in tensor.stride()),
                )
            register = Register(
                specs=dict(specs), num_blocks=num_blocks, ranges=tuple(ranges), views=views
            )
            answer = self._channel.call(register, fds, timeout=SLOW)
        finally:
            for fd in fds:
                os.close(fd)
        if not isinstance(answer, Registered):
            raise AgentError(f"unexpected answer to register: {type(answer).__name__}")

    def wait_lost(self, timeout: float | None = None) -> bool:
        """Returns True when the sidecar is gone: then a new client has to join and register the
        caches again. False after `timeout` seconds; None waits for ever. For a thread of its own.
        """
        return self._channel.wait_closed(timeout)

    def close(self) -> None:
        """Ends the connection. The cache stays in the sidecar until another worker joins."""
        self._channel.close()

    def _joined(self) -> WorkerInfo:
        if self._info is None:
            raise AgentError("call join() first")
        return self._info


def _dtypes(
    specs: Mapping[str, CacheSpec], info: WorkerInfo, num_blocks: int
) -> dict[str, torch.dtype]:
    found: dict[str, torch.dtype] = {}
    for layer, spec in specs.items():
        for name, shape in tensor_shapes(layer, spec, info, num_blocks).items():
            found[name] = getattr(torch, shape.dtype)
    return found


def _count_blocks(
    tensors: Mapping[str, torch.Tensor], specs: Mapping[str, CacheSpec], info: WorkerInfo
) -> int:
    """The number of blocks that the tensors have room for, by their own shapes."""
    for layer, spec in specs.items():
        one = tensor_shapes(layer, spec, info, 1)
        two = tensor_shapes(layer, spec, info, 2)
        for name, (shape, dtype) in one.items():
            tensor = tensors.get(name)
            if tensor is None:
                raise GeometryError(f"no tensor {name!r}; given: {', '.join(tensors) or 'none'}")
            if tensor.dtype != getattr(torch, dtype):
                raise GeometryError(f"{name!r} is {tensor.dtype}, its spec says {dtype}")
            pairs = zip(shape, two[name].shape, strict=True)
            axis = next(i for i, (a, b) in enumerate(pairs) if a != b)
            if tensor.dim() != len(shape):
                raise GeometryError(
                    f"{name!r} has {tensor.dim()} dimensions, its spec says {len(shape)}"
                )
            return int(tensor.shape[axis] // shape[axis])
    raise GeometryError("no layers: specs is empty")
