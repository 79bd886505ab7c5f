"""libcuda, the driver's own library: the calls that torch has no public name for.

Signatures and numbers are those of cuda.h (CUDA 12 and 13; `cuDeviceGetUuid_v2` came with 11.4,
`cuFlushGPUDirectRDMAWrites` with 11.3). Contexts are the devices' primary ones, as in torch. The
library is loaded by the first call.
"""

from __future__ import annotations

import ctypes
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache

from kvagent.errors import FabricError

__all__ = [
    "CudaDriverError",
    "address_range",
    "attribute",
    "bind",
    "count",
    "describe",
    "flush",
    "ipc_close",
    "ipc_handle",
    "ipc_open",
    "pin",
    "pushed",
    "unpin",
]

HANDLE_BYTES = 64
GPU_DIRECT_RDMA_FLUSH_WRITES_OPTIONS = 117
FLUSH_BY_HOST = 1
"""Bit of that attribute: `flush` is supported."""

_FLUSH_CURRENT_CONTEXT, _FLUSH_TO_ALL_DEVICES = 0, 200
_LAZY_ENABLE_PEER_ACCESS = 1
_HOST_REGISTER_PORTABLE = 1
_CAPTURE_RELAXED = 2


class CudaDriverError(FabricError):
    """The driver refused; the message has its name for why."""


class _Uuid(ctypes.Structure):
    _fields_ = (("bytes", ctypes.c_ubyte * 16),)


class _Handle(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_ubyte * HANDLE_BYTES),)


@lru_cache(maxsize=1)
def _library() -> ctypes.CDLL:
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise CudaDriverError(
            f"there is no CUDA driver here: {error} (in a container: docker run --gpus all)"
        ) from error
    library.cuIpcOpenMemHandle_v2.argtypes = [
        ctypes.POINTER(ctypes.c_uint64),
        _Handle,  # by value
        ctypes.c_uint,
    ]
    _check(library, "cuInit", library.cuInit(0))
    return library


def _check(library: ctypes.CDLL, what: str, code: int) -> None:
    if code:
        name = ctypes.c_char_p()
        library.cuGetErrorName(code, ctypes.byref(name))
        raise CudaDriverError(f"{what}: {(name.value or b'error').decode()} ({code})")


def _call(name: str, *arguments: object) -> None:
    library = _library()
    _check(library, name, getattr(library, name)(*arguments))


def count() -> int:
    """Devices of this process."""
    number = ctypes.c_int()
    _call("cuDeviceGetCount", ctypes.byref(number))
    return number.value


def attribute(device: int, number: int) -> int:
    value = ctypes.c_int()
    _call("cuDeviceGetAttribute", ctypes.byref(value), number, _device(device))
    return value.value


def describe(device: int) -> tuple[str, str, str]:
    """Name, uuid and PCI address. Needs no context."""
    handle = _device(device)
    name = ctypes.create_string_buffer(256)
    _call("cuDeviceGetName", name, len(name), handle)
    raw = _Uuid()
    _call("cuDeviceGetUuid_v2", ctypes.byref(raw), handle)
    pci = ctypes.create_string_buffer(32)
    _call("cuDeviceGetPCIBusId", pci, len(pci), handle)
    text = str(uuid.UUID(bytes=bytes(raw.bytes)))
    return name.value.decode(), text, pci.value.decode().lower()


def bind(device: int) -> None:
    """Retains the primary context, for the life of the process, and makes it the thread's.

    The engine may capture a CUDA graph meanwhile, by default in the mode that forbids other threads
    of its process what might be captured, and fails when they do it. What a thread of ours does is
    none of the graph's, and it says so.
    """
    context = ctypes.c_void_p()
    _call("cuDevicePrimaryCtxRetain", ctypes.byref(context), _device(device))
    _call("cuCtxSetCurrent", context)
    _call("cuThreadExchangeStreamCaptureMode", ctypes.byref(ctypes.c_int(_CAPTURE_RELAXED)))


@contextmanager
def pushed(device: int) -> Iterator[None]:
    """For a moment, whatever thread this is, and whatever it is bound to."""
    context = ctypes.c_void_p()
    _call("cuDevicePrimaryCtxRetain", ctypes.byref(context), _device(device))
    try:
        _call("cuCtxPushCurrent_v2", context)
        try:
            yield
        finally:
            _call("cuCtxPopCurrent_v2", ctypes.byref(context))
    finally:
        _call("cuDevicePrimaryCtxRelease_v2", _device(device))


def address_range(address: int) -> tuple[int, int]:
    """Where the allocation begins that an address lies in, and its size."""
    base, size = ctypes.c_uint64(), ctypes.c_size_t()
    _call(
        "cuMemGetAddressRange_v2",
        ctypes.byref(base),
        ctypes.byref(size),
        ctypes.c_uint64(address),
    )
    return base.value, size.value


def ipc_handle(base: int) -> bytes:
    """Of the allocation that begins at `base`."""
    handle = _Handle()
    _call("cuIpcGetMemHandle", ctypes.byref(handle), ctypes.c_uint64(base))
    return bytes(handle.reserved)


def ipc_open(handle: bytes) -> int:
    """Where another process's allocation begins here. Opening one again counts."""
    base = ctypes.c_uint64()
    _call(
        "cuIpcOpenMemHandle_v2",
        ctypes.byref(base),
        _Handle.from_buffer_copy(handle),
        _LAZY_ENABLE_PEER_ACCESS,
    )
    return base.value


def ipc_close(base: int) -> None:
    _call("cuIpcCloseMemHandle", ctypes.c_uint64(base))


def flush() -> None:
    """To all devices: an engine's context is another one than that which owns the memory."""
    _call("cuFlushGPUDirectRDMAWrites", _FLUSH_CURRENT_CONTEXT, _FLUSH_TO_ALL_DEVICES)


def pin(address: int, nbytes: int) -> None:
    _call(
        "cuMemHostRegister_v2",
        ctypes.c_void_p(address),
        ctypes.c_size_t(nbytes),
        _HOST_REGISTER_PORTABLE,
    )


def unpin(address: int) -> None:
    _call("cuMemHostUnregister", ctypes.c_void_p(address))


def _device(device: int) -> int:
    handle = ctypes.c_int()
    _call("cuDeviceGet", ctypes.byref(handle), device)
    return handle.value
