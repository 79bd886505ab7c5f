"""The real `CudaCalls` as far as it goes without a GPU: what it refuses, and what it touches."""

from __future__ import annotations

import ctypes
import gc
import subprocess
import sys
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from kvagent.cuda import driver
from kvagent.cuda.calls import Shared
from kvagent.cuda.torch_cuda import TorchCuda, allocator_setting
from kvagent.errors import FabricError, GeometryError


class FakeLibrary:
    """libcuda: every call is recorded, and `codes` says which fail."""

    def __init__(self) -> None:
        self.called: list[str] = []
        self.codes: dict[str, int] = {}

    def __getattr__(self, name: str) -> Any:
        if name == "cuGetErrorName":
            return self._name

        def call(*arguments: Any) -> int:
            self.called.append(name)
            if name == "cuDeviceGetCount":
                arguments[0]._obj.value = 1
            if name == "cuDeviceGetUuid_v2":
                ctypes.memmove(arguments[0], bytes(range(16)), 16)
            if name == "cuDeviceGetPCIBusId":
                arguments[0].value = b"0000:3B:00.0"
            if name == "cuDeviceGetAttribute":
                arguments[0]._obj.value = 1
            return self.codes.get(name, 0)

        return call

    def _name(self, code: int, name: Any) -> int:
        name._obj.value = b"CUDA_ERROR_OF_TEST"
        return 0


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> FakeLibrary:
    made = FakeLibrary()
    monkeypatch.setattr(driver, "_library", lambda: made)
    return made


def test_what_a_device_is(library: FakeLibrary) -> None:
    gpu = TorchCuda().describe(0)
    assert gpu.uuid == "00010203-0405-0607-0809-0a0b0c0d0e0f"
    assert (gpu.pci, gpu.flushes) == ("0000:3b:00.0", True)
    assert TorchCuda().find(gpu.uuid) == gpu
    with pytest.raises(GeometryError, match=f"sees {gpu.uuid}.*CUDA_VISIBLE_DEVICES"):
        TorchCuda().find("another")


def test_the_primary_context(library: FakeLibrary, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: library.called.append("torch"))
    TorchCuda().bind(3)
    assert library.called == [
        "cuDeviceGet",
        "cuDevicePrimaryCtxRetain",
        "cuCtxSetCurrent",
        "cuThreadExchangeStreamCaptureMode",  # the engine may be capturing a graph
        "torch",
    ]


def test_names_of_errors(library: FakeLibrary) -> None:
    library.codes["cuFlushGPUDirectRDMAWrites"] = 801
    with pytest.raises(
        FabricError, match=r"cuFlushGPUDirectRDMAWrites: CUDA_ERROR_OF_TEST \(801\)"
    ):
        TorchCuda().flush(0)


def test_a_handle_that_cannot_be_had_or_opened(
    library: FakeLibrary, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TorchCuda, "unshareable", lambda _: "")
    library.codes = {"cuIpcGetMemHandle": 1, "cuIpcOpenMemHandle_v2": 1}
    with pytest.raises(GeometryError, match="neither expandable_segments nor cudaMallocAsync"):
        TorchCuda().export(torch.zeros(64, dtype=torch.uint8))
    with pytest.raises(GeometryError, match="same PID and IPC namespaces"):
        TorchCuda().open(0, Shared(bytes(64), 0, 64))


@pytest.mark.parametrize(
    ("environ", "backend", "said"),
    [
        ({"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}, "native", "expandable_segments"),
        (
            {"PYTORCH_ALLOC_CONF": "max_split_size_mb:64, expandable_segments:True"},
            "native",
            "PYTORCH_ALLOC_CONF=expandable_segments:False",
        ),
        ({}, "cudaMallocAsync", "backend:native"),
        ({"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:False"}, "native", ""),
        ({}, "native", ""),
    ],
)
def test_allocators(
    environ: dict[str, str], backend: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda.memory, "get_allocator_backend", lambda: backend)
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    for name, text in environ.items():
        monkeypatch.setenv(name, text)
    why = TorchCuda().unshareable()
    assert said in why
    assert bool(why) == bool(said)


def test_torch_without_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    assert "built without CUDA" in TorchCuda().unshareable()


def test_the_format_of_the_setting() -> None:
    assert allocator_setting("") == {}
    text = "garbage_collection_threshold:0.6,expandable_segments:True,"
    assert allocator_setting(text)["expandable_segments"] == "True"


def test_a_driver_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    driver._library.cache_clear()
    monkeypatch.setattr(driver.ctypes, "CDLL", missing)
    with pytest.raises(FabricError, match="no CUDA driver here"):
        TorchCuda().describe(0)
    driver._library.cache_clear()


def test_a_sidecar_of_host_memory_never_asks_cuda() -> None:
    """Importing all of the agent initialises no CUDA and loads no driver."""
    code = """
import sys
import kvagent.agent.agent, kvagent.client.embedded, torch
from kvagent.cuda import driver
from kvagent.cuda.torch_cuda import TorchCuda
TorchCuda().device_of(torch.zeros(1))
print(torch.cuda.is_initialized(), driver._library.cache_info().currsize)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=100
    )
    assert done.stdout.split() == ["False", "0"]


@pytest.mark.parametrize(
    ("shared", "said"),
    [
        (Shared(bytes(63), 0, 64), "handle of 63 bytes"),
        (Shared(bytes(64), 8, 64), "64 bytes from 8 of 0"),
    ],
)
def test_what_the_other_side_says_is_checked(
    library: FakeLibrary, shared: Shared, said: str
) -> None:
    with pytest.raises(GeometryError, match=said):
        TorchCuda().open(0, shared)


def test_opened_memory_is_closed_with_its_last_tensor(
    library: FakeLibrary, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driver, "address_range", lambda base: (base, 64))
    monkeypatch.setattr(torch.cuda, "device", lambda index: nullcontext())
    kept: list[Any] = []
    monkeypatch.setattr(torch, "as_tensor", lambda span, device: kept.append(span))
    TorchCuda().open(1, Shared(bytes(64), 0, 64))
    begin = ["cuDeviceGet", "cuDevicePrimaryCtxRetain", "cuCtxPushCurrent_v2"]
    end = ["cuCtxPopCurrent_v2", "cuDeviceGet", "cuDevicePrimaryCtxRelease_v2"]
    assert library.called == [*begin, "cuIpcOpenMemHandle_v2", *end]
    assert kept[0].__cuda_array_interface__["shape"] == (64,)
    library.called.clear()
    kept.clear()
    gc.collect()
    assert library.called == [*begin, "cuIpcCloseMemHandle", *end]
