"""The command line: `kvagent serve | proxy | engine | demo`. Only options and words are here."""

from __future__ import annotations

import sys
from typing import Annotated, Optional

import typer

from kvagent.errors import KVAgentError

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Moves KV cache between the engines of disaggregated LLM serving.",
)

Text = Annotated[Optional[str], typer.Option()]  # noqa: UP045  (typer reads it at run time)


@app.command()
def serve(
    socket: Annotated[str | None, typer.Option(help="Unix socket for the engine.")] = None,
    bind: Annotated[str | None, typer.Option(help="HOST:PORT for other sidecars.")] = None,
    advertise: Annotated[str | None, typer.Option(help="Host they are told to dial.")] = None,
    http: Annotated[str | None, typer.Option(help="HOST:PORT for /metrics, /status.")] = None,
    config: Annotated[str | None, typer.Option(help="TOML file with any setting.")] = None,
    insecure: Annotated[
        bool | None, typer.Option("--insecure", help="Bind beyond loopback without keys.")
    ] = None,
    log_level: Annotated[str | None, typer.Option(help="debug to error.")] = None,
) -> None:
    """Run the sidecar of one GPU worker."""
    from kvagent.agent.serve import serve as run
    from kvagent.config import load

    flags = {
        "socket": socket,
        "bind": bind,
        "advertise": advertise,
        "http": http,
        "insecure": insecure,
        "log_level": log_level,
    }
    run(load(config, flags))


@app.command()
def proxy(
    prefill: Annotated[list[str], typer.Option(help="URL of a prefill server; repeatable.")],
    decode: Annotated[list[str], typer.Option(help="URL of a decode server; repeatable.")],
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="0 takes a free one.")] = 8000,
) -> None:
    """Run the OpenAI-compatible proxy in front of prefill and decode servers."""
    from kvagent.proxy import run_proxy

    run_proxy(prefill, decode, host=host, port=port)


def main() -> None:
    """The console script: errors of ours are a line, not a trace."""
    try:
        app()
    except KVAgentError as error:
        print(f"kvagent: {error}", file=sys.stderr)
        sys.exit(2)
