"""Reads a `Machine` from /proc, /sys, the environment and the installed packages."""

from __future__ import annotations

import ctypes
import errno
import os
import resource
import subprocess
import sys
from collections.abc import Mapping
from importlib.metadata import distributions
from pathlib import Path

from kvagent.doctor.facts import Distribution, HugePages, Machine, Torch
from kvagent.fabric.place import namespace, read_place

__all__ = ["read_machine"]

NIXL_PACKAGES = ("nixl", "nixl-cu12", "nixl-cu13")
CAP_IPC_LOCK = 14


def read_machine(root: Path = Path("/"), environ: Mapping[str, str] = os.environ) -> Machine:
    """This machine as this process sees it; files are looked for under `root`."""
    return Machine(
        python=sys.version_info[:3],
        executable=sys.executable,
        place=read_place(root),
        ipc_namespace=namespace("ipc", root),
        container=_container(root, environ),
        torch=_torch(),
        packages=_packages(),
        nixl_config=_nixl_config(environ),
        ucx_environ={name: environ[name] for name in sorted(environ) if name.startswith("UCX_")},
        memlock=_memlock(),
        ipc_lock=_has_capability(root, CAP_IPC_LOCK),
        shm_bytes=_shm_bytes(root),
        huge_pages=_huge_pages(root),
        ptrace_scope=_number(root / "proc/sys/kernel/yama/ptrace_scope"),
        cma_error=_try_cma(),
        interfaces=_interfaces(root),
        rdma_devices=_names(root / "sys/class/infiniband"),
        gpus=tuple(n for n in _names(root / "dev") if n[:6] == "nvidia" and n[6:].isdecimal()),
    )


# ---------------------------------------------------------------- files


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""


def _number(path: Path) -> int:
    """0 when the file is not there."""
    text = _text(path)
    return int(text) if text.isdecimal() else 0


def _names(folder: Path) -> tuple[str, ...]:
    try:
        return tuple(sorted(os.listdir(folder)))
    except OSError:
        return ()


def _container(root: Path, environ: Mapping[str, str]) -> str:
    if "KUBERNETES_SERVICE_HOST" in environ:
        return "kubernetes"
    for path, name in ((".dockerenv", "docker"), ("run/.containerenv", "podman")):
        if (root / path).exists():
            return name
    for variable in _text(root / "proc/1/environ").split("\0"):
        if variable.startswith("container="):
            return variable.removeprefix("container=")
    return ""


def _has_capability(root: Path, number: int) -> bool:
    for line in _text(root / "proc/self/status").splitlines():
        if line.startswith("CapEff:"):
            return bool(int(line.split()[1], 16) >> number & 1)
    return False


def _shm_bytes(root: Path) -> int | None:
    try:
        status = os.statvfs(root / "dev/shm")
    except OSError:
        return None
    return status.f_blocks * status.f_frsize


def _huge_pages(root: Path) -> HugePages:
    pool = root / "sys/kernel/mm/hugepages/hugepages-2048kB"
    words = _text(root / "sys/kernel/mm/transparent_hugepage/shmem_enabled")
    return HugePages(
        total=_number(pool / "nr_hugepages"),
        free=_number(pool / "free_hugepages") - _number(pool / "resv_hugepages"),
        shmem=words.partition("[")[2].partition("]")[0],
    )


def _interfaces(root: Path) -> tuple[str, ...]:
    """lo says "unknown" of itself when it is up."""
    folder = root / "sys/class/net"
    return tuple(n for n in _names(folder) if _text(folder / n / "operstate") in ("up", "unknown"))


# ---------------------------------------------------------------- this process


def _memlock() -> int | None:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return None if soft == resource.RLIM_INFINITY else soft


def _try_cma() -> str:
    """Reads one byte of a process that stands beside this one, as a sidecar does.

    `cat` waits; its own code is at no address that we know, so that the kernel's answer to a wrong
    address (EFAULT) is the good one: it comes after the permission was checked.
    """
    try:
        process = subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
    except OSError as error:
        return f"not tried: cat: {error.strerror}"
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        buffer = ctypes.create_string_buffer(1)
        here = (ctypes.c_size_t * 2)(ctypes.addressof(buffer), 1)
        there = (ctypes.c_size_t * 2)(8, 1)
        one, flags = ctypes.c_ulong(1), ctypes.c_ulong(0)
        libc.process_vm_readv(process.pid, here, one, there, one, flags)
        code = ctypes.get_errno()
    finally:
        process.communicate()
    return "" if code == errno.EFAULT else os.strerror(code)


# ---------------------------------------------------------------- packages


def _torch() -> Torch | None:
    try:
        import torch
    except (ImportError, OSError):
        return None
    usable = torch.cuda.is_available()
    return Torch(
        torch.__version__, torch.version.cuda or "", torch.cuda.device_count() if usable else 0
    )


def _packages() -> tuple[Distribution, ...]:
    found = {
        Distribution(package, each.version, str(each.locate_file("")))
        for package in NIXL_PACKAGES
        for each in distributions(name=package)
    }
    return tuple(sorted(found, key=lambda each: (each.name, each.version, each.folder)))


def _nixl_config(environ: Mapping[str, str]) -> str:
    home = environ.get("HOME", "")
    path = Path(home) / ".nixl.cfg"
    return str(path) if home and path.exists() else ""
