"""Host memory that the sidecar and its engine both map: made here, or received as a descriptor.

`HostMemory` is a sealed memfd: it cannot shrink, so whoever maps it cannot be killed by SIGBUS.
`MappedMemory` is the other side, and `share_tensor` finds the descriptor of memory that an engine
shares in its own way (torch's sharing, a memfd, a file in /dev/shm).

Tensors are views without a copy. They keep the mapping alive: `close` gives up our own hold, and
the pages go with the last tensor. What is registered with a fabric must outlive it; that is the
caller's business. GPU memory: `kvagent.cuda`.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from kvagent.errors import GeometryError

__all__ = [
    "HostMemory",
    "MappedMemory",
    "Pages",
    "SharedTensor",
    "share_tensor",
    "tensor_in",
]

Pages = Literal["huge", "transparent", "ordinary"]
_Bytes = npt.NDArray[np.uint8]

HUGE_PAGE = 2 << 20
_MADV_POPULATE_WRITE = 23
_SIZE_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW

_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


class MappedMemory:
    """`nbytes` bytes from `offset` of a descriptor's memory, mapped and faulted in.

    Takes over `fd`, also when it fails. `GeometryError`: too small, not shared memory, or not to
    be written. Memory that could shrink later is sealed; only memory that cannot be sealed (what
    `shm_open` makes, and so torch's) is accepted as it is, when it belongs to our own user or root,
    as those who may connect: the engine and its sidecar share their fate anyway.
    """

    def __init__(self, fd: int, nbytes: int, offset: int = 0) -> None:
        try:
            _check_received(fd, nbytes, offset)
            self._map: mmap.mmap | None = _map(fd, nbytes, offset)
        finally:
            os.close(fd)
        self._bytes: _Bytes | None = np.frombuffer(
            self._map, np.uint8, nbytes, offset % mmap.ALLOCATIONGRANULARITY
        )
        self.nbytes = nbytes
        self.address = self._bytes.ctypes.data
        _populate(self._bytes)

    def tensor(
        self, shape: Sequence[int], strides: Sequence[int], offset: int, dtype: torch.dtype
    ) -> torch.Tensor:
        """A view; `strides` and `offset` in bytes. `GeometryError` when it does not lie inside."""
        if self._bytes is None:
            raise GeometryError("this memory is closed")
        end = _end_of(self.address, self.nbytes, shape, strides, offset, dtype)
        # By way of numpy, since torch.frombuffer does not keep the mapping from being closed.
        flat = torch.from_numpy(self._bytes[offset:end]).view(dtype)
        return flat.as_strided(tuple(shape), [stride // dtype.itemsize for stride in strides])

    def close(self) -> None:
        """Unmaps, now or when the last tensor is gone. Safe to call twice."""
        self._bytes = None
        if self._map is not None:
            try:
                self._map.close()
            except BufferError:
                pass  # tensors hold it
            self._map = None


def tensor_in(
    memory: torch.Tensor,
    shape: Sequence[int],
    strides: Sequence[int],
    offset: int,
    dtype: torch.dtype,
) -> torch.Tensor:
    """A view into flat uint8 memory, of the host or of a GPU; `strides` and `offset` in bytes.

    Raises `GeometryError` when it does not lie inside.
    """
    end = _end_of(memory.data_ptr(), memory.numel(), shape, strides, offset, dtype)
    flat = memory[offset:end].view(dtype)
    steps = [stride // dtype.itemsize for stride in strides]
    return flat.as_strided(tuple(shape), steps, flat.storage_offset())


def _end_of(
    address: int,
    nbytes: int,
    shape: Sequence[int],
    strides: Sequence[int],
    offset: int,
    dtype: torch.dtype,
) -> int:
    size = dtype.itemsize
    last = sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True))
    if min(shape, default=1) < 1 or min(strides, default=0) < 0:
        raise GeometryError(f"shape {tuple(shape)}, strides {tuple(strides)} of a tensor")
    if any(value % size for value in (address + offset, *strides)):
        raise GeometryError(f"offset {offset}, strides {tuple(strides)}: {dtype} is misaligned")
    if offset < 0 or offset + last + size > nbytes:
        raise GeometryError(f"a tensor from {offset} to {offset + last + size} in {nbytes} bytes")
    return offset + last + size


class HostMemory(MappedMemory):
    """Zeroed memory of our own, on huge pages when there are enough. `fd` is for the other side.

    Raises `GeometryError` when the machine has not that much.
    """

    def __init__(self, nbytes: int) -> None:
        if nbytes < 1:
            raise GeometryError(f"{nbytes} bytes of memory")
        fd = _huge_memfd(nbytes) if nbytes >= HUGE_PAGE else None
        huge = fd is not None
        if fd is None:
            if nbytes > _available():
                raise GeometryError(f"{nbytes} bytes of memory: only {_available()} are available")
            fd = _sealed_memfd(nbytes, mmap.PAGESIZE, 0)
        self.fd = fd
        try:
            super().__init__(os.dup(fd), nbytes)
        except BaseException:
            os.close(fd)
            raise
        self.pages: Pages = "huge" if huge else _page_kind(self.address, nbytes)

    @property
    def advice(self) -> str:
        """What to do for huge pages, where there are none though they would matter; else ""."""
        if self.pages != "ordinary" or self.nbytes < HUGE_PAGE:
            return ""
        return (
            f"the cache of {self.nbytes >> 20} MiB lies on ordinary pages, from which other "
            "processes of this host read half as fast as from huge ones. As root: `sysctl "
            f"vm.nr_hugepages={-(-self.nbytes // HUGE_PAGE)}` (or `echo advise > "
            "/sys/kernel/mm/transparent_hugepage/shmem_enabled`), then start again"
        )

    def close(self) -> None:
        super().close()
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)


class SharedTensor(NamedTuple):
    """Where a tensor's storage lies: `nbytes` from `offset` of `fd`, which is the caller's."""

    fd: int
    offset: int
    nbytes: int


def share_tensor(tensor: torch.Tensor) -> SharedTensor:
    """The descriptor behind a tensor that lies in shared memory, whoever made it.

    Raises `GeometryError` for a tensor in private memory, which no other process can map.
    """
    if tensor.device.type != "cpu":
        raise GeometryError(f"a tensor on {tensor.device} has no host memory to share")
    storage = tensor.untyped_storage()
    begin, end = storage.data_ptr(), storage.data_ptr() + storage.nbytes()
    mapping = _shared_mapping(begin, end)
    fd = None if mapping is None else _descriptor(mapping)
    if mapping is None or fd is None:
        raise GeometryError(
            "the tensor is in private memory, which the sidecar cannot map: take it from "
            "WorkerClient.allocate_kv_caches, or call share_memory_() on it right after it is made"
        )
    return SharedTensor(fd, begin - mapping.begin + mapping.offset, storage.nbytes())


# ---------------------------------------------------------------- making and mapping


def _sealed_memfd(nbytes: int, page: int, flags: int) -> int:
    fd = os.memfd_create("kvagent", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING | flags)
    try:
        os.ftruncate(fd, _round_up(nbytes, page))
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SIZE_SEALS | fcntl.F_SEAL_SEAL)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _available() -> int:
    """Bytes that can be had without swapping. Faulting in more would call the OOM killer."""
    with open("/proc/meminfo") as lines:
        fields = (line.split() for line in lines)
        return next(int(field[1]) * 1024 for field in fields if field[0] == "MemAvailable:")


def _huge_memfd(nbytes: int) -> int | None:
    """None when there are not enough free huge pages: mapping it is what reserves them."""
    try:
        fd = _sealed_memfd(nbytes, HUGE_PAGE, os.MFD_HUGETLB | os.MFD_HUGE_2MB)
    except OSError:
        return None
    try:
        mmap.mmap(fd, 0).close()
    except OSError:
        os.close(fd)
        return None
    return fd


def _check_received(fd: int, nbytes: int, offset: int) -> None:
    status = os.fstat(fd)
    if nbytes < 1 or offset < 0 or offset + nbytes > status.st_size:
        raise GeometryError(
            f"{nbytes} bytes from {offset} of a descriptor that holds {status.st_size}"
        )
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError:
        raise GeometryError("the descriptor is not of shared memory (memfd or /dev/shm)") from None
    if seals & fcntl.F_SEAL_SHRINK:
        return
    try:
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SIZE_SEALS)
    except OSError:
        if status.st_uid not in (0, os.geteuid()):
            raise GeometryError(
                "the memory can shrink, cannot be sealed, and belongs to another user"
            ) from None
    # It may have shrunk before it was sealed.
    if os.fstat(fd).st_size < offset + nbytes:
        raise GeometryError("the descriptor's memory shrank")


def _map(fd: int, nbytes: int, offset: int) -> mmap.mmap:
    start = offset - offset % mmap.ALLOCATIONGRANULARITY
    status = os.fstat(fd)
    # Whole pages: a mapping of huge pages can only be unmapped so.
    length = min(_round_up(offset - start + nbytes, status.st_blksize), status.st_size - start)
    try:
        return mmap.mmap(fd, length, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE, 0, start)
    except (OSError, ValueError) as error:
        raise GeometryError(f"mapping {nbytes} bytes: {error}") from error


def _populate(memory: _Bytes) -> None:
    """Faults all pages in: a read into untouched memory is 5 to 20 times slower."""
    address = memory.ctypes.data
    start = address - address % mmap.PAGESIZE
    length = address + memory.nbytes - start
    _libc.madvise(start, length, mmap.MADV_HUGEPAGE)  # where the system allows it for shared memory
    if _libc.madvise(start, length, _MADV_POPULATE_WRITE) == 0:
        return
    error = ctypes.get_errno()
    if error != errno.EINVAL:
        raise GeometryError(f"{memory.nbytes} bytes cannot be had: {os.strerror(error)}")
    memory[:: mmap.PAGESIZE].max()  # Linux before 5.14; shared memory takes its pages on reading


def _page_kind(address: int, nbytes: int) -> Pages:
    """What the kernel gave us; asking for transparent huge pages is no more than a wish."""
    with open("/proc/self/smaps") as lines:
        inside = False
        for line in lines:
            name, _, rest = line.partition(" ")
            if "-" in name:
                inside = int(name.split("-")[0], 16) <= address < int(name.split("-")[1], 16)
            elif inside and name == "ShmemPmdMapped:":
                return "transparent" if int(rest.split()[0]) * 1024 > nbytes // 2 else "ordinary"
    return "ordinary"


def _round_up(value: int, unit: int) -> int:
    return -(-value // unit) * unit


# ---------------------------------------------------------------- finding


class _Mapping(NamedTuple):
    begin: int
    end: int
    offset: int
    device: int
    inode: int
    path: str


def _shared_mapping(begin: int, end: int) -> _Mapping | None:
    """The shared file mapping that holds `begin` to `end`, which the kernel may list in parts."""
    found: _Mapping | None = None
    with open("/proc/self/maps") as lines:
        for line in lines:
            bounds, flags, offset, device, inode, *path = line.split(None, 5)
            low, high = (int(bound, 16) for bound in bounds.split("-"))
            if high <= begin:
                continue
            major, minor = (int(part, 16) for part in device.split(":"))
            part = _Mapping(
                low,
                high,
                int(offset, 16),
                os.makedev(major, minor),
                int(inode),
                path[0].rstrip("\n") if path else "",
            )
            if found is None:
                if low > begin or "s" not in flags or not part.inode:
                    return None
                found = part
            elif (low, part.offset, part.inode, part.device) == (
                found.end,
                found.offset + found.end - found.begin,
                found.inode,
                found.device,
            ):
                found = found._replace(end=high)
            else:
                return None
            if found.end >= end:
                return found
    return None


def _descriptor(mapping: _Mapping) -> int | None:
    """A new descriptor of the mapped file: from one that is open, or from its path."""
    for name in os.listdir("/proc/self/fd"):
        try:
            status = os.fstat(int(name))
            if (status.st_dev, status.st_ino) == (mapping.device, mapping.inode):
                return os.dup(int(name))
        except OSError:
            continue
    try:
        fd = os.open(mapping.path, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return None
    status = os.fstat(fd)
    if (status.st_dev, status.st_ino) == (mapping.device, mapping.inode):
        return fd
    os.close(fd)
    return None
