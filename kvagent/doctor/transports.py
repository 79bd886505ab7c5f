"""Judges what UCX found: ways to other hosts, to other processes of this one, and to GPUs."""

from __future__ import annotations

from collections.abc import Iterator

from kvagent.doctor.facts import Finding, Machine, Severity, Ucx

__all__ = ["check_cuda", "check_memlock", "check_transports"]

RDMA = ("rc", "dc", "ud", "srd", "gga")
"""Beginnings of the names of transports over InfiniBand, RoCE and EFA."""

MEMLOCK_FIX = (
    "ulimit -l unlimited; systemd: LimitMEMLOCK=infinity; docker: --ulimit memlock=-1; "
    "Kubernetes: the limit of the container runtime, or the capability IPC_LOCK"
)


def check_transports(machine: Machine, ucx: Ucx, *, this_host_only: bool) -> Iterator[Finding]:
    """`this_host_only`: the sidecar binds to loopback, and so does its data plane."""
    if ucx.error:
        return
    ways = ", ".join(map(str, ucx.transports))
    yield Finding("transports", Severity.OK if ways else Severity.ERROR, ways or "UCX found none")
    remote = [way for way in ucx.transports if way.name == "tcp" and way.device != "lo"]
    if not this_host_only and not remote and not ucx.has(*RDMA):
        yield Finding(
            "transports",
            Severity.ERROR,
            f"no way to another host; interfaces that are up: {', '.join(machine.interfaces)}",
            "look at UCX_TLS and UCX_NET_DEVICES, and whether the container has a network",
        )
    if not ucx.has("cma"):
        yield Finding(
            "transports",
            Severity.WARNING,
            "no cma: reads between processes of this host go over TCP, several times slower",
            "let UCX_TLS name cma, or leave it unset; see also the check isolation",
        )
    if machine.rdma_devices and not this_host_only and not ucx.has(*RDMA):
        yield Finding(
            "transports",
            Severity.WARNING,
            f"UCX does not use the RDMA devices {', '.join(machine.rdma_devices)}",
            "docker: --device /dev/infiniband; Kubernetes: the RDMA device plugin; look at "
            "UCX_TLS and UCX_NET_DEVICES, and at ibstat for ports that are down",
        )


def check_cuda(machine: Machine, ucx: Ucx) -> Iterator[Finding]:
    """UCX without its CUDA modules registers GPU memory "fine", and fails later."""
    if ucx.error:
        return
    if not machine.gpus:
        yield Finding("cuda", Severity.INFO, "no NVIDIA GPU here: host memory only")
        return
    missing = [name for name in ("cuda_copy", "cuda_ipc") if not ucx.has(name)]
    if missing:
        yield Finding(
            "cuda",
            Severity.ERROR,
            f"UCX has no {' and no '.join(missing)}, and here is {', '.join(machine.gpus)}",
            "is libcuda.so.1 there (docker: --gpus all)? does the CUDA flavour of the loaded NIXL "
            f"({ucx.nixl}) suit the driver? does UCX_TLS leave cuda out?",
        )
    else:
        yield Finding("cuda", Severity.OK, f"UCX sees CUDA; {', '.join(machine.gpus)}")


def check_memlock(machine: Machine, ucx: Ucx) -> Iterator[Finding]:
    """RDMA pins what is registered; shared memory, TCP and CUDA do not."""
    if machine.memlock is None:
        yield Finding("memlock", Severity.OK, "unlimited")
    elif machine.ipc_lock:
        yield Finding("memlock", Severity.OK, "limited, but CAP_IPC_LOCK lifts the limit")
    elif ucx.has(*RDMA):
        yield Finding(
            "memlock",
            Severity.ERROR,
            f"{machine.memlock >> 10} KiB, and RDMA pins the whole cache",
            MEMLOCK_FIX,
        )
    else:
        yield Finding("memlock", Severity.OK, f"{machine.memlock >> 10} KiB; nothing here pins")
