"""Judges Python, torch, NIXL and UCX: what is installed, and whether it is one of each."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby

from kvagent.doctor.facts import Distribution, Finding, Machine, Severity, Ucx

__all__ = ["check_nixl", "check_python", "check_torch", "check_ucx"]

FIRST_PYTHON, LAST_PYTHON = (3, 10), (3, 13)
MUST_AGREE = ("UCX_TCP_RX_SEG_SIZE", "UCX_TCP_TX_SEG_SIZE")


def check_python(machine: Machine) -> Iterator[Finding]:
    version = ".".join(map(str, machine.python))
    fits = FIRST_PYTHON <= machine.python[:2] <= LAST_PYTHON
    yield Finding(
        "python",
        Severity.OK if fits else Severity.ERROR,
        f"{version}, {machine.executable}",
        "" if fits else "use Python 3.10 to 3.13: NIXL has no wheels for others",
    )


def check_torch(machine: Machine) -> Iterator[Finding]:
    torch = machine.torch
    if torch is None:
        yield Finding("torch", Severity.ERROR, "cannot be imported", "pip install torch")
    elif machine.gpus and not torch.cuda:
        yield Finding(
            "torch",
            Severity.WARNING,
            f"{torch.version}, built without CUDA, and here is {', '.join(machine.gpus)}",
            "install torch's CUDA build if the cache is to lie on the GPU",
        )
    elif machine.gpus and not torch.devices:
        yield Finding(
            "torch",
            Severity.WARNING,
            f"{torch.version}, CUDA {torch.cuda}, sees no GPU, and here is "
            f"{', '.join(machine.gpus)}",
            "look at nvidia-smi and CUDA_VISIBLE_DEVICES; a driver older than torch's CUDA does it",
        )
    else:
        cuda = f"CUDA {torch.cuda}, GPUs: {torch.devices}" if torch.cuda else "without CUDA"
        yield Finding("torch", Severity.OK, f"{torch.version}, {cuda}")


def check_nixl(machine: Machine, ucx: Ucx) -> Iterator[Finding]:
    packages = machine.packages
    if not packages:
        yield Finding("nixl", Severity.ERROR, "not installed", "pip install nixl (Linux only)")
        return
    words = ", ".join(f"{each.name} {each.version}" for each in packages)
    loaded = f"; loaded: {ucx.nixl}" if ucx.nixl else ""
    yield from _twice(packages)
    versions = sorted({each.version for each in packages})
    if len(versions) > 1:
        yield Finding(
            "nixl",
            Severity.ERROR,
            f"several versions: {words}{loaded}",
            "reinstall so that nixl, nixl-cu12 and nixl-cu13 are of one version; peers must have "
            "the same one",
        )
    elif ucx.error and not ucx.nixl:
        yield Finding("nixl", Severity.ERROR, f"{words}: {ucx.error}", "reinstall nixl")
    else:
        yield Finding("nixl", Severity.OK, f"{words}{loaded}")
    if machine.nixl_config:
        yield Finding(
            "nixl",
            Severity.WARNING,
            f"NIXL also reads {machine.nixl_config}",
            "remove it unless it is meant for this sidecar",
        )


def _twice(packages: tuple[Distribution, ...]) -> Iterator[Finding]:
    for name, group in groupby(packages, lambda each: each.name):
        places = [f"{each.version} in {each.folder}" for each in group]
        if len(places) > 1:
            yield Finding(
                "nixl",
                Severity.WARNING,
                f"{name} is installed {len(places)} times: {'; '.join(places)}",
                "keep one; which one is imported depends on the order of sys.path",
            )


def check_ucx(machine: Machine, ucx: Ucx) -> Iterator[Finding]:
    if ucx.error:
        if ucx.nixl:  # else it is NIXL's finding
            yield Finding(
                "ucx",
                Severity.ERROR,
                "; ".join([ucx.error, *ucx.warnings]),
                "look at the UCX_ variables in the environment; without any, reinstall nixl",
            )
        return
    if len(ucx.libraries) > 1:
        yield Finding(
            "ucx",
            Severity.ERROR,
            f"two UCX in one process: {', '.join(ucx.libraries)}",
            "unset LD_LIBRARY_PATH and LD_PRELOAD, or remove the other one (HPC-X, MPI, a package)",
        )
    else:
        yield Finding("ucx", Severity.OK, f"{ucx.version}, {', '.join(ucx.libraries)}")
    for warning in ucx.warnings:
        yield Finding("ucx", Severity.WARNING, f"UCX says: {warning}", _fix(warning))
    if machine.ucx_environ:
        pairs = ", ".join(f"{name}={value}" for name, value in machine.ucx_environ.items())
        yield Finding("ucx", Severity.INFO, f"environment: {pairs}")
    changed = [name for name in MUST_AGREE if name in machine.ucx_environ]
    if changed:
        yield Finding(
            "ucx",
            Severity.WARNING,
            f"{', '.join(changed)} is set",
            "unset it: kvagent uses large segments over TCP, and agrees on them with its peers",
        )


def _fix(warning: str) -> str:
    if "network device" in warning:
        return "correct UCX_NET_DEVICES, or unset it for all interfaces"
    if "transport" in warning:
        return "correct UCX_TLS, or unset it for all transports"
    return "see UCX's documentation"
