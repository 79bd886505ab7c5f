"""`kvagent doctor`: collects, judges and prints."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import msgspec

from kvagent.config import Config, split_address
from kvagent.doctor.children import run_child, ucx_warnings
from kvagent.doctor.collect import read_machine
from kvagent.doctor.doors import check_doors, look_at_doors
from kvagent.doctor.facts import Finding, Machine, Severity, Ucx, worst
from kvagent.doctor.gpus import check_nics
from kvagent.doctor.host import check_huge_pages, check_isolation, check_shm
from kvagent.doctor.keys import check_keys, look_at_keys, read_ring
from kvagent.doctor.peer import PeerRead
from kvagent.doctor.reading import WATCH, carriers
from kvagent.doctor.reads import check_peer, check_self_read
from kvagent.doctor.selfread import READER, SelfRead
from kvagent.doctor.software import check_nixl, check_python, check_torch, check_ucx
from kvagent.doctor.transports import check_cuda, check_memlock, check_transports

__all__ = ["check_machine", "examine", "print_findings"]

Progress = Callable[[str], object]

STYLES = {Severity.OK: "green", Severity.INFO: "cyan", Severity.WARNING: "yellow"}


def examine(config: Config, peers: Sequence[str], *, as_json: bool) -> int:
    """Print the findings; the exit code that says the worst of them. `peers` are HOST:PORT.

    Raises `ConfigError` for a peer that is no address.
    """
    addresses = {peer: split_address(peer, "peer") for peer in peers}
    from rich.console import Console

    with Console(stderr=True).status("looking at this machine") as status:
        findings = [*_look(config, addresses, status.update)]
    if as_json:
        report = {"worst": worst(findings), "findings": findings}
        print(msgspec.json.encode(report).decode())
    else:
        print_findings(findings)
    return worst(findings)


def check_machine(machine: Machine, ucx: Ucx, *, this_host_only: bool) -> Iterator[Finding]:
    """All that follows from facts alone."""
    yield from check_python(machine)
    yield from check_torch(machine)
    yield from check_nixl(machine, ucx)
    yield from check_ucx(machine, ucx)
    yield from check_transports(machine, ucx, this_host_only=this_host_only)
    yield from check_cuda(machine, ucx)
    yield from check_memlock(machine, ucx)
    yield from check_shm(machine)
    yield from check_huge_pages(machine)
    yield from check_isolation(machine)


def _look(
    config: Config, peers: Mapping[str, tuple[str, int]], progress: Progress
) -> Iterator[Finding]:
    local = config.is_loopback()
    environ = _data_plane(only_lo=local)
    machine = read_machine()
    progress("asking UCX what it finds")
    yield from check_machine(machine, _ask_ucx(environ), this_host_only=local)
    yield from check_nics(os.environ)
    progress("trying the ports")
    yield from check_doors(asyncio.run(look_at_doors(config)), this_host_only=local)
    ring = read_ring(config.keys) if config.keys else None
    if ring is not None:
        yield from check_keys(ring, look_at_keys(Path(ring.folder)), machine.place.uid)
    for kind in _kinds(machine):
        progress(f"reading {kind} memory from another process")
        outcome = run_child("selfread", [kind], SelfRead, {**environ, **WATCH})
        read = outcome.value or SelfRead(kind=kind, error=outcome.error)
        yield from check_self_read(read, carriers(outcome.log).get(READER, ""))
    for peer, (host, port) in peers.items():
        progress(f"reading from {peer}")
        found = run_child(
            "peer", [host, str(port), config.keys], PeerRead, {**_data_plane(False), **WATCH}
        )
        read_there = found.value or PeerRead(error=found.error)
        yield from check_peer(
            peer,
            read_there,
            carriers(found.log),
            machine.place,
            ring=ring,
            this_host_only=local,
        )


def _kinds(machine: Machine) -> Iterator[str]:
    """Those that there may be here; about the others there are findings already."""
    yield "ordinary"
    if machine.huge_pages.usable:
        yield "huge"
    if machine.gpus:
        yield "cuda"


def _data_plane(only_lo: bool) -> dict[str, str]:
    """What `serve` adds to the environment."""
    return {"UCX_NET_DEVICES": "lo"} if only_lo and "UCX_NET_DEVICES" not in os.environ else {}


def _ask_ucx(environ: Mapping[str, str]) -> Ucx:
    outcome = run_child("ucx", [], Ucx, environ)
    ucx = outcome.value or Ucx(error=f"asking UCX failed: {outcome.error}")
    return msgspec.structs.replace(ucx, warnings=ucx_warnings(outcome.log))


def _printable(text: str) -> str:
    """Some of it is what a peer said, who shall not get at the terminal."""
    from rich.markup import escape

    return escape("".join(letter if letter.isprintable() else " " for letter in text))


def print_findings(findings: Sequence[Finding]) -> None:
    """As a table, with the number of the bad ones."""
    from rich.console import Console
    from rich.table import Table

    table = Table("check", "")
    table.add_column("found, and what to do about it", overflow="fold")
    for finding in findings:
        style = STYLES.get(finding.severity, "bold red")
        todo = f"\n[bold]-> {_printable(finding.todo)}[/]" if finding.todo else ""
        table.add_row(
            _printable(finding.check),
            f"[{style}]{finding.severity.value}[/]",
            _printable(finding.found) + todo,
        )
    console = Console()
    console.print(table)
    counts = {
        severity: sum(finding.severity is severity for finding in findings)
        for severity in (Severity.ERROR, Severity.WARNING)
    }
    console.print(f"errors: {counts[Severity.ERROR]}, warnings: {counts[Severity.WARNING]}")
