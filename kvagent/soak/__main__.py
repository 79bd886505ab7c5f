"""`python -m kvagent.soak`: the options of `scripts/soak`."""

from __future__ import annotations

import json
import secrets
from enum import Enum
from typing import Annotated

import typer

from kvagent.demo.processes import exit_on_sigterm


class Transport(str, Enum):
    """What the sidecars may use (UCX_TLS)."""

    shm = "shm"
    tcp = "tcp"
    both = "both"


def main(
    minutes: Annotated[float, typer.Option(help="How long faults are injected.")] = 10.0,
    seed: Annotated[int | None, typer.Option(help="Decides all; default: a new one.")] = None,
    transport: Annotated[Transport, typer.Option(help="Between engines.")] = Transport.both,
    chaos: Annotated[bool, typer.Option(help="Control messages are lost too.")] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Random traffic under random faults, every fetched byte checked. Exits with 1 if anything
    was wrong, stuck, left over or grew."""
    from kvagent.soak.report import show
    from kvagent.soak.run import Soak

    with exit_on_sigterm():
        soak = Soak(secrets.randbelow(1 << 30) if seed is None else seed, minutes)
        soak.transport, soak.chaos = transport.value, chaos
        result = soak.run()
    if as_json:
        print(json.dumps(result))
    else:
        show(result)
    raise typer.Exit(0 if result["ok"] else 1)


if __name__ == "__main__":
    typer.run(main)
