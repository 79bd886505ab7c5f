"""A stand-in for CUDA: "GPU memory" is host memory of this process, and every call is recorded.

It is strict where CUDA is lenient or strange: a call on a thread that was not bound fails, a handle
is opened only when it was exported, and an event passes only when the test says so.
"""

from __future__ import annotations

import ctypes
import secrets
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from kvagent.cuda.calls import Gpu, Shared
from kvagent.errors import FabricError, GeometryError


class FakeEvent:
    def __init__(self) -> None:
        self.passed = threading.Event()
        self.failure = ""


class FakeCuda:
    """A `CudaCalls` of `count` devices. `calls` is what was called, in order: (name, ...)."""

    def __init__(self, count: int = 2, *, flushes: bool = True) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.problem = ""
        self.gpus = [
            Gpu(i, f"Fake {i}", f"uuid-{i}", f"0000:0{i}:00.0", flushes) for i in range(count)
        ]
        self._places: dict[int, tuple[int, int]] = {}
        """Device and size of every "GPU" allocation, by address."""
        self._exported: dict[bytes, Tensor] = {}
        self._bound = threading.local()
        self._lock = threading.Lock()

    def named(self, *names: str) -> list[tuple[Any, ...]]:
        return [call for call in self.calls if call[0] in names]

    def tensor(self, device: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """What an engine allocated by itself on a device."""
        made = torch.zeros(*shape, dtype=dtype)
        storage = made.untyped_storage()
        self._places[storage.data_ptr()] = (device, storage.nbytes())
        return made

    def _say(self, *call: Any) -> None:
        with self._lock:
            self.calls.append(call)

    def _check(self, what: str, device: int | None = None) -> None:
        bound = getattr(self._bound, "device", None)
        assert bound is not None, f"{what} on a thread without a context"
        assert device in (None, bound), f"{what} of GPU {device} on a thread bound to {bound}"

    # ------------------------------------------------------------ CudaCalls

    def device_of(self, tensor: Tensor) -> int | None:
        at = tensor.data_ptr()
        for address, (device, nbytes) in self._places.items():
            if address <= at < address + nbytes:
                return device
        return None

    def find(self, uuid: str) -> Gpu:
        for gpu in self.gpus:
            if gpu.uuid == uuid:
                return gpu
        raise GeometryError(f"this process has no GPU {uuid}")

    def describe(self, device: int) -> Gpu:
        return self.gpus[device]

    def unshareable(self) -> str:
        return self.problem

    def bind(self, device: int) -> None:
        self._bound.device = device
        self._say("bind", device, threading.current_thread().name)

    def allocate(self, device: int, nbytes: int) -> Tensor:
        self._check("allocate", device)
        self._say("allocate", device, nbytes)
        # As a GPU's: at a multiple of 512.
        spare = torch.zeros(nbytes + 512, dtype=torch.uint8)
        skip = -spare.data_ptr() % 512
        self._places[spare.data_ptr()] = (device, nbytes + 512)
        return spare[skip : skip + nbytes]

    def export(self, tensor: Tensor) -> Shared:
        self._check("export", self.device_of(tensor))
        handle = secrets.token_bytes(64)
        self._exported[handle] = tensor
        self._say("export", self.device_of(tensor))
        return Shared(handle, 0, tensor.nbytes)

    def open(self, device: int, shared: Shared) -> Tensor:
        if shared.handle not in self._exported:
            raise GeometryError("the sidecar's GPU memory cannot be opened")
        tensor = self._exported[shared.handle]
        assert self.device_of(tensor) == device
        self._say("open", device, shared.nbytes)
        return tensor[shared.offset : shared.offset + shared.nbytes]

    def view(self, device: int, address: int, nbytes: int) -> Tensor:
        self._check("view", device)
        buffer = (ctypes.c_uint8 * nbytes).from_address(address)
        return torch.frombuffer(buffer, dtype=torch.uint8)

    def pin(self, address: int, nbytes: int) -> None:
        self._check("pin")
        self._say("pin", address, nbytes)

    def unpin(self, address: int) -> None:
        self._check("unpin")
        self._say("unpin", address)

    def event_done(self, event: FakeEvent) -> bool:
        self._check("event_done")
        self._say("query")
        if event.failure:
            raise FabricError(f"CUDA: {event.failure}")
        done = event.passed.is_set()
        if done:
            self._say("passed")
        return done

    def flush(self, device: int) -> None:
        self._check("flush", device)
        self._say("flush", device)

    def stream(self, device: int) -> Any:
        self._check("stream", device)
        self._say("stream", device)
        return ("stream", device)

    @contextmanager
    def on(self, stream: Any) -> Iterator[None]:
        self._check("on", stream[1])
        self._say("on")
        yield
        self._say("off")

    def finish(self, stream: Any) -> None:
        self._check("finish", stream[1])
        self._say("finish")
