"""Says of each GPU which network devices are next to it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from kvagent.cuda.nics import VARIABLE, Distance, gpu_addresses, near_nics
from kvagent.doctor.facts import Finding, Severity

__all__ = ["check_nics"]


def check_nics(environ: Mapping[str, str], root: Path = Path("/")) -> Iterator[Finding]:
    """`environ` is where UCX_NET_DEVICES may be set by somebody."""
    for pci in gpu_addresses(root):
        near = near_nics(pci, root)
        if near is None:
            yield Finding(
                "nics",
                Severity.INFO,
                f"GPU {pci}: no RDMA port is up: other hosts are reached by TCP, which copies "
                "through host memory",
            )
            continue
        ports = [nic.port for nic in near.nics]
        found = f"GPU {pci}: {', '.join(ports)}, {near.distance}"
        chosen = [name for name in environ.get(VARIABLE, "").split(",") if name]
        if chosen and chosen != ["all"] and not set(ports) & set(chosen):
            yield Finding(
                "nics",
                Severity.WARNING,
                f"{found}; but {VARIABLE}={environ[VARIABLE]}",
                f"leave {VARIABLE} unset, or name these too",
            )
        elif near.distance is Distance.SYSTEM:
            yield Finding(
                "nics",
                Severity.WARNING,
                found,
                "reads cross between NUMA nodes: use a GPU that has a NIC of its own beside it",
            )
        else:
            yield Finding("nics", Severity.OK, found)
