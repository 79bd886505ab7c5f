"""The command line: `kvagent serve | config | doctor | keys | ...`. Only options are here."""

from __future__ import annotations

import sys
from enum import Enum
from typing import TYPE_CHECKING, Annotated

import typer

from kvagent.errors import KVAgentError

if TYPE_CHECKING:
    from kvagent.config import Effective

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Moves KV cache between the engines of disaggregated LLM serving.",
)


def _print_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        print(f"kvagent {version('kvagent')}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    pass


ConfigFile = Annotated[
    str | None, typer.Option("--config", help="TOML file with any setting; or KVAGENT_CONFIG.")
]
Socket = Annotated[str | None, typer.Option(help="Unix socket for the engine.")]
Bind = Annotated[str | None, typer.Option(help="HOST:PORT for other sidecars.")]
Advertise = Annotated[str | None, typer.Option(help="Host they are told to dial.")]
Http = Annotated[str | None, typer.Option(help="HOST:PORT for /metrics, /status.")]
Keys = Annotated[str | None, typer.Option(help="Folder of keys, made by `kvagent keys new`.")]
Insecure = Annotated[
    bool | None, typer.Option("--insecure", help="Bind beyond loopback without keys.")
]
LogLevel = Annotated[str | None, typer.Option(help="debug to error.")]
LogFormat = Annotated[str | None, typer.Option(help="text or json.")]


def settings(config_file: str | None, **flags: str | bool | None) -> Effective:
    from kvagent.config import load_command

    return load_command(config_file, flags)


@app.command()
def serve(
    socket: Socket = None,
    bind: Bind = None,
    advertise: Advertise = None,
    http: Http = None,
    config_file: ConfigFile = None,
    keys: Keys = None,
    insecure: Insecure = None,
    log_level: LogLevel = None,
    log_format: LogFormat = None,
) -> None:
    """Run the sidecar of one worker of an engine."""
    from kvagent.agent.serve import serve as run

    effective = settings(
        config_file,
        socket=socket,
        bind=bind,
        advertise=advertise,
        http=http,
        keys=keys,
        insecure=insecure,
        log_level=log_level,
        log_format=log_format,
    )
    run(effective.config)


@app.command()
def config(
    socket: Socket = None,
    bind: Bind = None,
    advertise: Advertise = None,
    http: Http = None,
    config_file: ConfigFile = None,
    keys: Keys = None,
    insecure: Insecure = None,
    log_level: LogLevel = None,
    log_format: LogFormat = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Print what `serve` would run with, given the same flags, and where each value is from."""
    from kvagent.explain import show_config

    effective = settings(
        config_file,
        socket=socket,
        bind=bind,
        advertise=advertise,
        http=http,
        keys=keys,
        insecure=insecure,
        log_level=log_level,
        log_format=log_format,
    )
    show_config(effective, as_json=as_json)


@app.command()
def doctor(
    peer: Annotated[
        list[str] | None,
        typer.Option(help="HOST:PORT of a running engine's leader to read from; repeatable."),
    ] = None,
    socket: Socket = None,
    bind: Bind = None,
    advertise: Advertise = None,
    http: Http = None,
    config_file: ConfigFile = None,
    keys: Keys = None,
    insecure: Insecure = None,
    log_level: LogLevel = None,
    log_format: LogFormat = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Check this machine for what `serve` needs, given the same flags; 1 for warnings, 2 for
    errors."""
    from kvagent.config import split_address

    effective = settings(
        config_file,
        socket=socket,
        bind=bind,
        advertise=advertise,
        http=http,
        keys=keys,
        insecure=insecure,
        log_level=log_level,
        log_format=log_format,
    )
    for each in peer or []:
        split_address(each, "peer")  # before torch and NIXL are loaded

    from kvagent.doctor.show import examine

    raise typer.Exit(examine(effective.config, peer or [], as_json=as_json))


Addresses = Annotated[
    list[str], typer.Argument(help="HOST:PORT, or URL, of each sidecar's HTTP (its --http).")
]


@app.command()
def status(
    addresses: Addresses,
    as_json: Annotated[bool, typer.Option("--json", help="Print all of each /status.")] = False,
) -> None:
    """Show what running sidecars do; 1 unless every one answers and is ready."""
    from kvagent.top.show import show_status

    raise typer.Exit(0 if show_status(addresses, as_json=as_json) else 1)


@app.command()
def top(
    addresses: Addresses,
    every: Annotated[float, typer.Option(min=0.1, help="Seconds between looks.")] = 1.0,
    rounds: Annotated[int | None, typer.Option(min=1, help="Looks; default: no end.")] = None,
) -> None:
    """Show live what running sidecars do: throughput, transfers, peers, failures."""
    from kvagent.top.show import show_top

    show_top(addresses, every, rounds)


keys_app = typer.Typer(no_args_is_help=True, help="Keys for the connections between sidecars.")
app.add_typer(keys_app, name="keys")


@keys_app.command("new")
def keys_new(
    folder: Annotated[str, typer.Argument(help="Folder for them; a pair in it is not replaced.")],
    name: Annotated[
        str, typer.Option(help="Part of the public key's file name; default: this host's name.")
    ] = "",
) -> None:
    """Make a key pair, and a folder of allowed public keys with its own in it."""
    from kvagent.keys import new_keys

    new_keys(folder, name)


@app.command()
def plan(
    producer: Annotated[str, typer.Argument(help="TOML description of the producer engine.")],
    consumer: Annotated[str, typer.Argument(help="TOML description of the consumer engine.")],
    from_status: Annotated[
        bool, typer.Option("--from-status", help="The arguments are URLs of running leaders.")
    ] = False,
    tokens: Annotated[
        int | None, typer.Option(help="Tokens of the request; default: at most 4096.")
    ] = None,
    start_token: Annotated[int, typer.Option(help="The consumer has those before it.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    svg: Annotated[str | None, typer.Option(help="File to draw the mapping into.")] = None,
) -> None:
    """Show which rank reads what from whom, and in how many pieces; 1 when the pair is refused."""
    from kvagent.planner.show import show_plan

    works = show_plan(
        producer,
        consumer,
        from_status=from_status,
        num_tokens=tokens,
        start_token=start_token,
        as_json=as_json,
        svg=svg,
    )
    raise typer.Exit(0 if works else 1)


@app.command()
def chaos(
    target: Annotated[
        list[str],
        typer.Option(
            help="NAME=SOCKET, the process that listens on a unix socket, found again after a "
            "restart; or NAME=PID. Repeatable."
        ),
    ],
    minutes: Annotated[float, typer.Option(help="No fault comes later.")] = 10.0,
    every: Annotated[float, typer.Option(help="Seconds between faults, on average.")] = 10.0,
    kill: Annotated[
        float, typer.Option(help="Share of the faults that are SIGKILL, 0 to 1; else SIGSTOP.")
    ] = 0.5,
    stop_seconds: Annotated[float, typer.Option(help="From SIGSTOP to SIGCONT.")] = 3.0,
    seed: Annotated[int, typer.Option(help="Decides what happens when, and to whom.")] = 0,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the schedule and do nothing.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object; what happens goes to stderr.")
    ] = False,
) -> None:
    """Kill and stop processes of your own at random moments, to see what survives it."""
    from kvagent.chaos.show import run_drill

    code = run_drill(
        target,
        minutes=minutes,
        every=every,
        kill=kill,
        stop_seconds=stop_seconds,
        seed=seed,
        dry_run=dry_run,
        as_json=as_json,
    )
    raise typer.Exit(code)


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


class Layout(str, Enum):
    """Order of the cache's axes within a block."""

    HND = "HND"
    NHD = "NHD"


@app.command()
def engine(
    socket_template: Annotated[
        str | None,
        typer.Option(help="Path of each rank's sidecar socket, with {rank} in it; none: alone."),
    ] = None,
    engine_id: Annotated[str, typer.Option(help="Name of this engine; one of its kind.")] = "demo",
    model: Annotated[str | None, typer.Option(help="Hugging Face directory or GGUF file.")] = None,
    served_name: Annotated[str | None, typer.Option(help="What clients call the model.")] = None,
    tp: Annotated[int, typer.Option(help="Tensor-parallel ranks, a process each.")] = 1,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="0 takes a free one.")] = 8000,
    num_blocks: Annotated[int, typer.Option(help="Size of the cache.")] = 512,
    block_size: Annotated[int, typer.Option(help="Tokens per block.")] = 16,
    layout: Annotated[Layout, typer.Option(help="Heads or tokens outside.")] = Layout.HND,
    kv_dtype: Annotated[str, typer.Option(help="float32 or bfloat16.")] = "float32",
    max_batch_tokens: Annotated[int, typer.Option(help="Most tokens in one step.")] = 512,
    prefix_cache: Annotated[
        bool, typer.Option("--prefix-cache", help="Reuse blocks of equal beginnings.")
    ] = False,
    device: Annotated[str, typer.Option(help="cpu, cuda or auto.")] = "auto",
) -> None:
    """Run the demo engine: an OpenAI-compatible server for Llama-family checkpoints."""
    from kvagent.demo import config
    from kvagent.demo.server import serve_engine

    serve_engine(
        model,
        socket_template=socket_template,
        tp=tp,
        host=host,
        port=port,
        engine_id=engine_id,
        served_name=served_name,
        num_blocks=num_blocks,
        block_size=block_size,
        axes={Layout.HND: config.HND, Layout.NHD: config.NHD}[layout],
        kv_dtype=kv_dtype,
        max_batch_tokens=max_batch_tokens,
        prefix_cache=prefix_cache,
        device=device,
    )


@app.command()
def demo(
    prefill_tp: Annotated[int, typer.Option(min=1, help="Ranks of the prefill engine.")] = 3,
    decode_tp: Annotated[int, typer.Option(min=1, help="Ranks of the decode engine.")] = 1,
    model: Annotated[str | None, typer.Option(help="Hugging Face directory or GGUF file.")] = None,
    prompts: Annotated[int, typer.Option(min=1, max=32, help="Sent at once.")] = 6,
    max_tokens: Annotated[int, typer.Option(min=1, help="Most tokens of an answer.")] = 24,
    device: Annotated[str, typer.Option(help="cpu or cuda, for models and caches.")] = "cpu",
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the result as JSON, as the last line.")
    ] = False,
) -> None:
    """Show prefill on one engine and decode on another, and that the tokens are the same."""
    from kvagent.demo.show import Demo

    show = Demo(
        prefill_tp=prefill_tp,
        decode_tp=decode_tp,
        model=model,
        prompts=prompts,
        max_tokens=max_tokens,
        device=device,
    )
    raise typer.Exit(0 if show.run(as_json=as_json) else 1)


@app.command()
def bench(
    model: Annotated[
        list[str] | None, typer.Option(help="Name of a shape; repeatable; default: all.")
    ] = None,
    shapes: Annotated[str | None, typer.Option(help="TOML file with more shapes.")] = None,
    size: Annotated[int, typer.Option(min=1, help="MiB that a workload moves.")] = 256,
    tokens: Annotated[int, typer.Option(min=0, help="Of each request; 0: from --size.")] = 0,
    block_size: Annotated[
        list[int] | None, typer.Option(help="Tokens per block; repeatable; default: 16.")
    ] = None,
    producer_tp: Annotated[int, typer.Option(min=1, help="Ranks of the producer.")] = 1,
    consumer_tp: Annotated[int, typer.Option(min=1, help="Ranks of the consumer.")] = 1,
    fragmentation: Annotated[
        list[str] | None,
        typer.Option(help="contiguous, half or shuffled; repeatable; default: shuffled."),
    ] = None,
    concurrency: Annotated[
        list[int] | None, typer.Option(help="Fetches at once; repeatable; default: 1.")
    ] = None,
    transport: Annotated[str, typer.Option(help="shm or tcp.")] = "shm",
    netns: Annotated[
        bool, typer.Option("--netns", help="TCP between two network namespaces; needs root.")
    ] = False,
    peer: Annotated[
        str, typer.Option(help="URL of a `kvagent bench --serve` that plays the producer.")
    ] = "",
    serve: Annotated[
        str, typer.Option(help="HOST:PORT: play the producer for a --peer on another machine.")
    ] = "",
    mooncake: Annotated[
        bool, typer.Option("--mooncake", help="Measure Mooncake's TransferEngine too (TCP).")
    ] = False,
    rounds: Annotated[int, typer.Option(min=1, help="Of alternating measurements.")] = 5,
    targets: Annotated[
        bool, typer.Option("--targets", help="Measure what this version must reach.")
    ] = False,
    quick: Annotated[
        bool, typer.Option("--quick", help="With --targets: tiny, to see that it runs.")
    ] = False,
    json_file: Annotated[str, typer.Option("--json", help="File for the results.")] = "",
    plot: Annotated[str, typer.Option(help="PNG file; needs matplotlib.")] = "",
) -> None:
    """Measure transfers between two sidecars beside what this machine can do; 1 when a target is
    missed."""
    from kvagent.bench.run import Options, measure, serve_peer

    if serve:
        serve_peer(serve, transport)
        return
    options = Options(
        models=model or (),
        shapes_file=shapes,
        size=size,
        tokens=tokens,
        block_sizes=block_size or (16,),
        producer_tp=producer_tp,
        consumer_tp=consumer_tp,
        fragmentations=fragmentation or ("shuffled",),
        concurrencies=concurrency or (1,),
        transport=transport,
        netns=netns,
        peer=peer,
        mooncake=mooncake,
        rounds=rounds,
        targets=targets,
        quick=quick,
        json_file=json_file,
        plot_file=plot,
    )
    raise typer.Exit(0 if measure(options) else 1)


def main() -> None:
    """The console script: errors of ours are a line, not a trace."""
    try:
        app()
    except KVAgentError as error:
        print(f"kvagent: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)
