"""Which network devices are next to a GPU, from /sys; and what UCX is told of it.

Distance is by where both hang on the PCI tree, as `nvidia-smi topo` has it: under one switch, under
one root complex, in one NUMA node, elsewhere. NIXL's UCX has RDMA pick near devices by itself
(MAX_HCA_PER_GPU, its `ucx_utils.cpp`); a list keeps it from the far ones altogether, and is what
people look for in a log.
"""

from __future__ import annotations

import logging
import os
from collections.abc import MutableMapping, Sequence
from enum import IntEnum
from pathlib import Path
from typing import NamedTuple

from kvagent.cuda.calls import Gpu

__all__ = ["Distance", "Near", "Nic", "gpu_addresses", "near_nics", "net_devices", "tell_ucx"]

log = logging.getLogger("kvagent.nics")

VARIABLE = "UCX_NET_DEVICES"
_NVIDIA = "0x10de"
_DISPLAY = ("0x0300", "0x0302")
"""Classes of PCI devices: VGA controllers, and 3D controllers without an output."""


class Distance(IntEnum):
    """How far a NIC is from a GPU; smaller is nearer."""

    SWITCH = 0
    ROOT = 1
    NODE = 2
    SYSTEM = 3

    def __str__(self) -> str:
        return (
            "the same PCI switch",
            "the same root complex",
            "the same NUMA node",
            "another NUMA node",
        )[self]


class Nic(NamedTuple):
    """An RDMA port that is up, as UCX names it ("mlx5_0:1"), and the interface on the same card;
    empty when it has none."""

    port: str
    interface: str


class Near(NamedTuple):
    """The nearest ports to a GPU, all at one distance."""

    nics: tuple[Nic, ...]
    distance: Distance


def gpu_addresses(root: Path = Path("/")) -> list[str]:
    """PCI addresses of NVIDIA's GPUs, whether or not a driver is loaded."""
    folder = root / "sys/bus/pci/devices"
    return [
        name
        for name in _names(folder)
        if _text(folder / name / "vendor") == _NVIDIA
        and _text(folder / name / "class")[:6] in _DISPLAY
    ]


def near_nics(pci: str, root: Path = Path("/")) -> Near | None:
    """The RDMA ports nearest to the device at a PCI address; None when there is none that is up."""
    here = root / "sys/bus/pci/devices" / pci
    found: dict[Distance, list[Nic]] = {}
    for name in _names(root / "sys/class/infiniband"):
        folder = root / "sys/class/infiniband" / name
        distance = _distance(here, folder / "device")
        interface = next(iter(_names(folder / "device/net")), "")
        for port in _names(folder / "ports"):
            if "ACTIVE" in _text(folder / "ports" / port / "state"):
                found.setdefault(distance, []).append(Nic(f"{name}:{port}", interface))
    if not found:
        return None
    nearest = min(found)
    return Near(tuple(found[nearest]), nearest)


def net_devices(pci: str, root: Path = Path("/")) -> tuple[str, ...]:
    """For UCX_NET_DEVICES: the nearest RDMA ports, and the interfaces by which peers without RDMA
    are reached. Empty when there is nothing to choose."""
    near = near_nics(pci, root)
    if near is None:
        return ()
    folder = root / "sys/class/net"
    up = [n for n in _names(folder) if _text(folder / n / "operstate") in ("up", "unknown")]
    return (*(nic.port for nic in near.nics), *up)


def tell_ucx(
    chosen: Sequence[str],
    gpu: Gpu,
    environ: MutableMapping[str, str] = os.environ,
    root: Path = Path("/"),
) -> None:
    """Sets UCX_NET_DEVICES, unless it is set, for agents that are made from now on, and says so.

    `chosen` is the setting `nics`; empty: the nearest. Only for a process of our own.
    """
    if VARIABLE in environ:
        log.info("%s=%s, from the environment", VARIABLE, environ[VARIABLE])
        return
    devices = tuple(chosen) or net_devices(gpu.pci, root)
    if not devices:
        log.info("no RDMA port is up: UCX chooses among all network devices")
        return
    environ[VARIABLE] = ",".join(devices)
    why = "the setting nics" if chosen else f"nearest to GPU {gpu.index} at {gpu.pci}"
    log.info("%s=%s: %s", VARIABLE, environ[VARIABLE], why)


def _distance(one: Path, other: Path) -> Distance:
    here, there = _branch(one), _branch(other)
    if here and there and here[0] == there[0]:
        # Below the root complex the first bridge they share is a switch's.
        return Distance.SWITCH if here[1:2] == there[1:2] and here[1:2] else Distance.ROOT
    node = _text(one / "numa_node")
    same = node == _text(other / "numa_node") and node not in ("", "-1")
    return Distance.NODE if same else Distance.SYSTEM


def _branch(device: Path) -> list[str]:
    """The PCI bridges above a device, the root complex ("pci0000:3a") first."""
    parts = [part for part in device.resolve().parts if part.startswith("pci0") or ":" in part]
    return parts[:-1]


def _names(folder: Path) -> list[str]:
    try:
        return sorted(os.listdir(folder))
    except OSError:
        return []


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""
