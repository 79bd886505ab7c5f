"""`python -m kvagent.two_nodes`: the options of `scripts/two_nodes`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from kvagent.two_nodes.namespaces import NamespacesError, enter

SKIPPED = 3


def main(
    compose: Annotated[Path, typer.Argument(help="The compose file.")],
    prompts: Annotated[int, typer.Option(min=1, max=32, help="Sent at once.")] = 6,
    max_tokens: Annotated[int, typer.Option(min=1, help="Most tokens of an answer.")] = 24,
    cut_seconds: Annotated[float, typer.Option(min=0, help="How long the link is down.")] = 5.0,
    megabits: Annotated[
        float, typer.Option(min=1, help="Mbit/s of the link while it is to be cut.")
    ] = 50.0,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the result as JSON, as the last line.")
    ] = False,
) -> None:
    """The two nodes of docker/compose.yml in Linux namespaces: the demo over a network link, which
    is then cut in the middle of a transfer. Exits with 1 when anything was not as it should be, and
    with 3 where namespaces are not allowed."""
    try:
        enter()
    except NamespacesError as error:
        print(f"two_nodes: skipped: {error}", file=sys.stderr)
        raise typer.Exit(SKIPPED) from None
    from kvagent.two_nodes.show import TwoNodesShow

    show = TwoNodesShow(
        compose=compose.resolve(),
        prompts=prompts,
        max_tokens=max_tokens,
        cut_seconds=cut_seconds,
        megabits=megabits,
    )
    raise typer.Exit(0 if show.run(as_json=as_json) else 1)


if __name__ == "__main__":
    typer.run(main)
