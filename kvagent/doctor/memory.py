"""Memory of every kind that a cache can lie in, for the doctor to read from."""

from __future__ import annotations

import ctypes
import mmap
import time
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kvagent.core.regions import MemoryRange
from kvagent.memory.host import HostMemory

__all__ = ["NoMemory", "Sample", "make_sample"]

_MADV_NOHUGEPAGE = 15
_SEED = 7


class NoMemory(Exception):
    """There is no memory of that kind here; says why."""


class Sample:
    """`range.nbytes` bytes as a tensor; `owner` is what keeps them mapped. `pages` says what they
    are made of."""

    def __init__(self, tensor: torch.Tensor, pages: str, owner: Any = None) -> None:
        self._tensor, self._owner = tensor, owner
        self.pages = pages
        self.range = MemoryRange(
            tensor.data_ptr(),
            tensor.nbytes,
            "vram" if tensor.is_cuda else "dram",
            tensor.device.index or 0,
        )

    def fill(self) -> None:
        """With bytes that are the same in every process."""
        self._tensor.copy_(torch.from_numpy(self._expected()))
        self._wait()

    def is_filled(self) -> bool:
        return bool((self._tensor.cpu().numpy() == self._expected()).all())

    def copy_seconds(self) -> float:
        """How long a plain copy to memory of the same kind takes, the best of some tries."""
        target = torch.zeros_like(self._tensor)
        seconds = []
        for _ in range(4):
            begin = time.perf_counter()
            target.copy_(self._tensor)
            self._wait()
            seconds.append(time.perf_counter() - begin)
        return min(seconds)

    def _wait(self) -> None:
        if self._tensor.is_cuda:
            torch.cuda.synchronize()

    def _expected(self) -> npt.NDArray[np.uint8]:
        return np.random.default_rng(_SEED).integers(0, 256, self.range.nbytes, np.uint8)


def make_sample(kind: str, nbytes: int) -> Sample:
    """Kinds: `ordinary`, `huge`, `cuda`. Raises `NoMemory`."""
    if kind == "cuda":
        if not torch.cuda.is_available():
            raise NoMemory("torch sees no GPU")
        tensor = torch.zeros(nbytes, dtype=torch.uint8, device="cuda:0")
        return Sample(tensor, torch.cuda.get_device_name(0))
    if kind == "huge":
        memory = HostMemory(nbytes)
        if memory.pages == "ordinary":
            raise NoMemory("no huge pages are free, and shared memory gets no transparent ones")
        return Sample(memory.tensor((nbytes,), (1,), 0, torch.uint8), memory.pages, memory)
    mapping = mmap.mmap(-1, nbytes)
    array = np.frombuffer(mapping, np.uint8)
    madvise = ctypes.CDLL(None).madvise
    madvise(ctypes.c_void_p(array.ctypes.data), ctypes.c_size_t(nbytes), _MADV_NOHUGEPAGE)
    return Sample(torch.from_numpy(array).zero_(), "ordinary", mapping)
