"""Judges the kernel's settings: shared memory, huge pages, and who may read whose memory."""

from __future__ import annotations

from collections.abc import Iterator

from kvagent.doctor.facts import Finding, Machine, Severity

__all__ = ["check_huge_pages", "check_isolation", "check_shm"]

SMALL_SHM = 1 << 30
INITIAL_PID, INITIAL_USER, INITIAL_IPC = (
    "pid:[4026531836]",
    "user:[4026531837]",
    "ipc:[4026531839]",
)
"""The kernel's fixed names of the namespaces that a host begins with."""

SHARE_PID = "docker: --pid=host or --pid=container:NAME; Kubernetes: shareProcessNamespace: true"


def check_shm(machine: Machine) -> Iterator[Finding]:
    size = machine.shm_bytes
    if size is None:
        yield Finding(
            "shm",
            Severity.WARNING,
            "there is no /dev/shm",
            "mount a tmpfs there: engines that bring their own shared memory need it",
        )
    elif size < SMALL_SHM:
        yield Finding(
            "shm",
            Severity.WARNING,
            f"/dev/shm has {size >> 20} MiB",
            "docker: --shm-size; Kubernetes: an emptyDir of medium Memory. Caches that the sidecar "
            "allocates do not lie there, an engine's own (share_memory_()) do",
        )
    else:
        yield Finding("shm", Severity.OK, f"/dev/shm has {size / (1 << 30):.1f} GiB")


def check_huge_pages(machine: Machine) -> Iterator[Finding]:
    pages = machine.huge_pages
    pool = f"{pages.free} of {pages.total} huge pages free"
    if pages.free > 0:
        yield Finding(
            "huge pages",
            Severity.OK,
            f"{pool}: caches of up to {pages.free * 2 / 1024:.1f} GiB lie on them",
        )
    elif pages.usable:
        yield Finding(
            "huge pages", Severity.OK, f"{pool}; transparent ones for memfds: {pages.shmem}"
        )
    else:
        yield Finding(
            "huge pages",
            Severity.WARNING,
            f"{pool}, transparent ones for memfds: {pages.shmem or 'not there'}; reads from "
            "ordinary pages are half as fast between processes of one host",
            "echo advise > /sys/kernel/mm/transparent_hugepage/shmem_enabled, or reserve them: "
            "sysctl vm.nr_hugepages=CACHE_MIB/2",
        )


def check_isolation(machine: Machine) -> Iterator[Finding]:
    """CMA (process_vm_readv) and cuda_ipc between sidecars of this host, in other containers."""
    if machine.cma_error:
        yield Finding(
            "isolation",
            Severity.WARNING,
            f"process_vm_readv, which cma uses: {machine.cma_error}",
            "docker: --cap-add SYS_PTRACE, or a seccomp profile that allows it",
        )
    if machine.ptrace_scope >= 2:
        yield Finding(
            "isolation",
            Severity.WARNING,
            f"kernel.yama.ptrace_scope is {machine.ptrace_scope}: no cma without CAP_SYS_PTRACE",
            "sysctl kernel.yama.ptrace_scope=1",
        )
    place = machine.place
    own = [
        name
        for name, found, initial in (
            ("PID", place.pid_namespace, INITIAL_PID),
            ("user", place.user_namespace, INITIAL_USER),
            ("IPC", machine.ipc_namespace, INITIAL_IPC),
        )
        if found and found != initial
    ]
    where = f"in a container ({machine.container})" if machine.container else "on the host"
    found = f"{where}, uid {place.uid}, ptrace scope {machine.ptrace_scope}"
    if "PID" in own:
        yield Finding(
            "isolation",
            Severity.INFO,
            f"{found}, namespaces of its own: {', '.join(own)}. Sidecars of this host in another "
            "PID namespace are read over TCP, neither by cma nor by cuda_ipc",
            f"if there are such, let them share it: {SHARE_PID}; --peer tells",
        )
    else:
        yield Finding(
            "isolation",
            Severity.OK,
            found + (f", namespaces of its own: {', '.join(own)}" if own else ""),
        )
