"""Asks NIXL's own UCX what it is and what it finds. Run as a process: it prints one JSON object.

The plugin is loaded as a sidecar loads it, and the library that came with it is asked by ctypes,
with the few calls of `ucp.h` that do not change: there need be no `ucx_info` here, and one from a
package would speak of another UCX.
"""

from __future__ import annotations

import ctypes
import os
import re
import sys
from typing import Any

import msgspec

from kvagent.doctor.facts import Transport, Ucx

__all__ = ["look", "parse_context"]

_FEATURES = 0x1  # UCP_PARAM_FIELD_FEATURES
_RMA_AMO_WAKEUP_AM = 0x2 | 0x4 | 0x10 | 0x40
_RESOURCE = re.compile(r"^#\s+resource\s.*\sflags\s+\S+\s+(\S+?)/(\S+)\s*$", re.MULTILINE)


class _Params(ctypes.Structure):
    """The beginning of ucp_params_t; no field is read that `field_mask` does not name."""

    _fields_ = (
        ("field_mask", ctypes.c_uint64),
        ("features", ctypes.c_uint64),
        ("rest", ctypes.c_uint64 * 64),
    )


def look() -> Ucx:
    """Loads NIXL into this process."""
    try:
        import nixl  # noqa: F401  (chooses the CUDA flavour and provides nixl._bindings)
        import nixl._bindings as bindings
    except (ImportError, OSError) as error:
        return Ucx(error=f"NIXL cannot be loaded: {error}")
    file = str(bindings.__file__)
    config = bindings.nixlAgentConfig()
    config.useProgThread = False
    try:
        bindings.nixlAgent("kvagent-doctor", config).getPluginParams("UCX")
    except Exception as error:  # NIXL's errors have no common base
        return Ucx(nixl=file, error=f"NIXL has no UCX plugin: {error}")
    libraries = _loaded("libucp")
    if not libraries:
        return Ucx(nixl=file, error="NIXL's UCX plugin brought no libucp")
    ucp = ctypes.CDLL(libraries[0])
    ucp.ucp_get_version_string.restype = ctypes.c_char_p
    try:
        transports = parse_context(_context_info(ucp))
    except OSError as error:
        return Ucx(nixl=file, libraries=libraries, error=str(error))
    return Ucx(
        nixl=file,
        version=ucp.ucp_get_version_string().decode(),
        libraries=_loaded("libucp"),
        transports=transports,
    )


def parse_context(text: str) -> tuple[Transport, ...]:
    """What `ucp_context_print_info` prints."""
    return tuple(Transport(name, device) for name, device in _RESOURCE.findall(text))


def _loaded(name: str) -> tuple[str, ...]:
    with open("/proc/self/maps") as lines:
        paths = {line.split(None, 5)[5].strip() for line in lines if line.count("/") > 0}
    return tuple(sorted(path for path in paths if os.path.basename(path).startswith(name)))


def _context_info(ucp: Any) -> str:
    config, context = ctypes.c_void_p(), ctypes.c_void_p()
    _check(ucp, ucp.ucp_config_read(None, None, ctypes.byref(config)))
    version = [ctypes.c_uint() for _ in range(3)]
    ucp.ucp_get_version(*map(ctypes.byref, version))
    params = _Params(_FEATURES, _RMA_AMO_WAKEUP_AM)
    _check(
        ucp,
        ucp.ucp_init_version(
            version[0], version[1], ctypes.byref(params), config, ctypes.byref(context)
        ),
    )
    libc = ctypes.CDLL(None)
    libc.open_memstream.restype = ctypes.c_void_p
    text, size = ctypes.c_char_p(), ctypes.c_size_t()
    stream = ctypes.c_void_p(libc.open_memstream(ctypes.byref(text), ctypes.byref(size)))
    ucp.ucp_context_print_info(context, stream)
    libc.fclose(stream)
    return (text.value or b"").decode(errors="replace")


def _check(ucp: Any, status: int) -> None:
    """ucs_status_t: 0 is good, errors are negative, and libucs, which libucp brings, has words."""
    if status:
        (libucs,) = _loaded("libucs")[:1]
        words = ctypes.CDLL(libucs).ucs_status_string
        words.restype = ctypes.c_char_p
        raise OSError(f"UCX does not start: {words(status).decode()}")


if __name__ == "__main__":
    sys.stdout.write(msgspec.json.encode(look()).decode() + "\n")
