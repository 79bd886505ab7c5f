"""Shared host memory: what is made here, what is received, what an engine shares by itself."""

from __future__ import annotations

import fcntl
import mmap
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvagent.errors import GeometryError
from kvagent.memory import host
from kvagent.memory.host import HostMemory, MappedMemory, share_tensor

MIB = 1 << 20


def memfd(nbytes: int, seals: int | None = None) -> int:
    fd = os.memfd_create("test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, nbytes)
    if seals is not None:
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.fixture
def memory() -> Iterator[HostMemory]:
    made = HostMemory(MIB + 5)
    yield made
    made.close()


def test_memory_is_sealed_zeroed_and_page_aligned(memory: HostMemory) -> None:
    assert memory.nbytes == MIB + 5
    assert memory.address % mmap.PAGESIZE == 0
    assert memory.pages in ("huge", "transparent", "ordinary")
    whole = memory.tensor((memory.nbytes,), (1,), 0, torch.uint8)
    assert whole.data_ptr() == memory.address
    assert not whole.any()
    for size in (0, 2 * MIB):
        with pytest.raises(PermissionError):
            os.ftruncate(memory.fd, size)


def test_both_sides_see_the_same_bytes(memory: HostMemory) -> None:
    other = MappedMemory(os.dup(memory.fd), memory.nbytes)
    assert other.address != memory.address
    # A tensor with a block stride larger than the block, as in a padded page.
    shape, strides, offset = (4, 3, 8), (128, 16, 2), 4096
    here = memory.tensor(shape, strides, offset, torch.bfloat16)
    there = other.tensor(shape, strides, offset, torch.bfloat16)
    here.copy_(torch.arange(96).reshape(shape))
    assert torch.equal(here, there)
    assert here.stride() == (64, 8, 1)
    assert there.data_ptr() == other.address + offset
    other.close()


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float16, torch.float32, torch.int64])
def test_dtypes(memory: HostMemory, dtype: torch.dtype) -> None:
    size = dtype.itemsize
    tensor = memory.tensor((2, 4), (4 * size, size), 64, dtype)
    assert tensor.dtype == dtype
    assert tensor.is_contiguous()


@given(
    shape=st.lists(st.integers(0, 5), min_size=1, max_size=3),
    strides=st.lists(st.integers(-8, 64), min_size=3, max_size=3),
    offset=st.integers(-8, 300),
)
def test_a_tensor_lies_inside_or_is_refused(
    shape: list[int], strides: list[int], offset: int
) -> None:
    memory = HostMemory(256)
    strides = strides[: len(shape)]
    try:
        tensor = memory.tensor(shape, strides, offset, torch.int16)
    except GeometryError:
        last = offset + sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True))
        sound = offset >= 0 and min(shape) > 0 and min(strides) >= 0 and last + 2 <= 256
        assert not sound or offset % 2 or any(stride % 2 for stride in strides)
    else:
        assert tensor.shape == tuple(shape)
        tensor.fill_(1)  # touches the first and the last element
        assert tensor.data_ptr() == memory.address + offset
    memory.close()


def test_tensors_outlive_close() -> None:
    before = open_files()
    memory = HostMemory(MIB)
    tensor = memory.tensor((MIB,), (1,), 0, torch.uint8)
    part = tensor[5:10]
    memory.close()
    memory.close()
    del tensor
    part.fill_(7)
    assert part.tolist() == [7] * 5
    with pytest.raises(GeometryError, match="closed"):
        memory.tensor((1,), (1,), 0, torch.uint8)
    del part
    assert open_files() == before
    with open("/proc/self/maps") as maps:
        assert "memfd:kvagent" not in maps.read()


def test_more_memory_than_there_is() -> None:
    before = open_files()
    with pytest.raises(GeometryError, match="bytes"):
        HostMemory(1 << 60)
    with pytest.raises(GeometryError):
        HostMemory(0)
    assert open_files() == before


def test_received_memory_is_sealed_or_refused() -> None:
    before = open_files()
    fd = memfd(8192)
    mapped = MappedMemory(os.dup(fd), 8192)
    with pytest.raises(PermissionError):
        os.ftruncate(fd, 0)
    mapped.close()
    os.close(fd)

    for nbytes, offset in ((8193, 0), (1, 8192), (0, 0), (1, -1), (1 << 62, 1 << 62)):
        with pytest.raises(GeometryError, match="holds 8192"):
            MappedMemory(memfd(8192), nbytes, offset)
    with pytest.raises(GeometryError, match="mapping"):
        MappedMemory(memfd(8192, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_WRITE), 8192)
    with tempfile.TemporaryFile(dir=os.getcwd()) as file:
        file.truncate(8192)
        with pytest.raises(GeometryError, match="not of shared memory"):
            MappedMemory(os.dup(file.fileno()), 8192)
    assert open_files() == before


def test_an_offset_need_not_be_of_a_page() -> None:
    fd = memfd(3 * 4096)
    os.pwrite(fd, b"here", 4096 + 64)
    mapped = MappedMemory(fd, 4, 4096 + 64)
    assert bytes(mapped.tensor((4,), (1,), 0, torch.uint8).tolist()) == b"here"
    mapped.close()


@pytest.mark.parametrize("strategy", ["file_descriptor", "file_system"])
def test_torch_shares_its_own_way(strategy: str) -> None:
    torch_sharing = torch.multiprocessing
    usual = torch_sharing.get_sharing_strategy()
    torch_sharing.set_sharing_strategy(strategy)
    try:
        tensor = torch.arange(5000, dtype=torch.float32).share_memory_()
    finally:
        torch_sharing.set_sharing_strategy(usual)
    address = tensor.data_ptr()
    shared = share_tensor(tensor[10:20])
    assert tensor.data_ptr() == address
    assert shared.nbytes == tensor.untyped_storage().nbytes()
    mapped = MappedMemory(shared.fd, shared.nbytes, shared.offset)
    other = mapped.tensor((5000,), (4,), 0, torch.float32)
    assert torch.equal(tensor, other)
    other[7] = -1
    assert tensor[7] == -1
    del other
    mapped.close()


def test_a_tensor_of_ours_is_shared_too(memory: HostMemory) -> None:
    tensor = memory.tensor((100,), (4,), 4096 + 8, torch.int32)
    shared = share_tensor(tensor)
    assert (shared.offset, shared.nbytes) == (4096 + 8, 400)
    assert os.fstat(shared.fd).st_ino == os.fstat(memory.fd).st_ino
    os.close(shared.fd)


def test_private_memory_is_refused() -> None:
    with pytest.raises(GeometryError, match=r"share_memory_\(\)"):
        share_tensor(torch.zeros(1 << 16))
    with pytest.raises(GeometryError, match="meta"):
        share_tensor(torch.zeros(4, device="meta"))


OTHER_SIDE = """
import sys, torch
from kvagent.memory.host import MappedMemory
memory = MappedMemory(int(sys.argv[1]), int(sys.argv[2]))
memory.tensor((8,), (8,), 4096, torch.int64)[:] = torch.arange(8)
"""


def test_another_process_maps_it(memory: HostMemory) -> None:
    subprocess.run(
        [sys.executable, "-c", OTHER_SIDE, str(memory.fd), str(memory.nbytes)],
        pass_fds=[memory.fd],
        check=True,
    )
    assert memory.tensor((8,), (8,), 4096, torch.int64).tolist() == list(range(8))


def free_huge_pages() -> int:
    with open("/proc/meminfo") as lines:
        values = dict(line.split(":") for line in lines)
    if values["Hugepagesize"].split() != ["2048", "kB"]:
        return 0
    return int(values["HugePages_Free"])


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")
@pytest.mark.parametrize(("owner", "good"), [(0, True), (10001, True), (10002, False)])
def test_memory_that_cannot_be_sealed_must_be_ours_or_roots(
    monkeypatch: pytest.MonkeyPatch, owner: int, good: bool
) -> None:
    """vLLM runs as root in its image, and its sidecar does not."""
    path = f"/dev/shm/kvagent-test-{os.getpid()}"
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
    os.unlink(path)
    os.ftruncate(fd, MIB)
    os.fchown(fd, owner, owner)
    monkeypatch.setattr(os, "geteuid", lambda: 10001)
    if good:
        MappedMemory(fd, MIB).close()
    else:
        with pytest.raises(GeometryError, match="cannot be sealed, and belongs to another user"):
            MappedMemory(fd, MIB)


def test_who_does_without_huge_pages_is_told_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "_huge_memfd", lambda nbytes: None)
    monkeypatch.setattr(host, "_page_kind", lambda address, nbytes: "ordinary")
    memory = HostMemory(5 * MIB)
    assert "sysctl vm.nr_hugepages=3`" in memory.advice
    memory.close()
    small = HostMemory(MIB)
    assert small.advice == ""
    small.close()
    monkeypatch.setattr(host, "_page_kind", lambda address, nbytes: "transparent")
    good = HostMemory(5 * MIB)
    assert good.advice == ""
    good.close()


@pytest.mark.skipif(free_huge_pages() < 2, reason="no free huge pages of 2 MiB")
def test_huge_pages_are_used_when_there_are_enough() -> None:
    memory = HostMemory(2 * MIB + 1)
    assert memory.pages == "huge"
    other = MappedMemory(os.dup(memory.fd), memory.nbytes)
    other.tensor((1,), (1,), 2 * MIB, torch.uint8)[:] = 9
    assert memory.tensor((1,), (1,), 2 * MIB, torch.uint8).item() == 9
    other.close()
    memory.close()
    too_much = HostMemory((free_huge_pages() + 1) * 2 * MIB)
    assert too_much.pages != "huge"
    too_much.close()
