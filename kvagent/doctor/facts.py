"""What the doctor knows of a machine, and what it says about it."""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum

import msgspec

from kvagent.fabric.place import Place

__all__ = [
    "Distribution",
    "Finding",
    "HugePages",
    "Machine",
    "Severity",
    "Torch",
    "Transport",
    "Ucx",
    "worst",
]


class Severity(str, Enum):
    """ok: looked at and good; info: good to know; warning: works, but slower or less safe than it
    could be; error: transfers fail."""

    OK = "ok"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


class Finding(msgspec.Struct, frozen=True):
    """One line of the report. `todo` is what to do about it, empty when nothing is."""

    check: str
    severity: Severity
    found: str
    todo: str = ""


def worst(findings: Iterable[Finding]) -> int:
    """The exit code: 0 for ok and info, 1 for a warning, 2 for an error."""
    codes = {Severity.WARNING: 1, Severity.ERROR: 2}
    return max((codes.get(finding.severity, 0) for finding in findings), default=0)


class Distribution(msgspec.Struct, frozen=True):
    """An installed package, and the folder that it lies in."""

    name: str
    version: str
    folder: str


class Torch(msgspec.Struct, frozen=True):
    """`cuda` is the CUDA version that it was built for, `devices` are the GPUs that it can use."""

    version: str
    cuda: str = ""
    devices: int = 0


class HugePages(msgspec.Struct, frozen=True, kw_only=True):
    """Of 2 MiB. `shmem` is the chosen word of shmem_enabled, which is about memfds."""

    total: int
    free: int
    shmem: str

    @property
    def usable(self) -> bool:
        """Whether a cache can lie on some."""
        return self.free > 0 or self.shmem in ("always", "within_size", "advise", "force")


class Transport(msgspec.Struct, frozen=True):
    """A way that UCX found: its name (`tcp`, `cma`, `rc_mlx5`) and its device (`eth0`)."""

    name: str
    device: str

    def __str__(self) -> str:
        return f"{self.name}/{self.device}"


class Ucx(msgspec.Struct, frozen=True, kw_only=True):
    """What NIXL's plugin loads. `error`: why nothing could be learnt."""

    error: str = ""
    nixl: str = ""
    """File of the NIXL that was loaded."""
    version: str = ""
    libraries: tuple[str, ...] = ()
    """Files of every libucp in the process."""
    transports: tuple[Transport, ...] = ()
    warnings: tuple[str, ...] = ()
    """What UCX itself complained of."""

    def has(self, *beginnings: str) -> bool:
        """Whether a transport's name begins with one of these."""
        return any(transport.name.startswith(beginnings) for transport in self.transports)


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """Read from /proc, /sys, the environment and the installed packages. Sizes in bytes."""

    python: tuple[int, int, int]
    executable: str
    place: Place
    ipc_namespace: str
    container: str
    """What says that this is one (`docker`, `kubernetes`, ...); empty: nothing does."""
    torch: Torch | None
    packages: tuple[Distribution, ...]
    """Every installed NIXL."""
    nixl_config: str
    """Path of a ~/.nixl.cfg, which NIXL reads, or empty."""
    ucx_environ: dict[str, str]
    """Variables that begin with UCX_."""
    memlock: int | None
    """Soft limit; None: unlimited."""
    ipc_lock: bool
    """CAP_IPC_LOCK: the limit does not hold."""
    shm_bytes: int | None
    """Size of /dev/shm; None: there is none."""
    huge_pages: HugePages
    ptrace_scope: int
    """Yama's; 0 without Yama."""
    cma_error: str
    """What process_vm_readv of a child said; empty: it works."""
    interfaces: tuple[str, ...]
    """Network interfaces that are up, lo included."""
    rdma_devices: tuple[str, ...]
    gpus: tuple[str, ...]
    """NVIDIA device files."""
