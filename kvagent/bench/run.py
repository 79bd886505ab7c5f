"""`kvagent bench`: which workloads are run, and where their results go."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import TypeVar

import msgspec
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from kvagent.bench.measure import Bench, Far, LocalFar, Result, Tick, default_ways
from kvagent.bench.mooncake import install
from kvagent.bench.peer import RemoteFar, address_towards, serve
from kvagent.bench.plot import draw, require_matplotlib
from kvagent.bench.shapes import Fragmentation, Shape, Workload, read_shapes
from kvagent.bench.show import as_data, print_points, print_results
from kvagent.bench.targets import FULL, QUICK, Point, reach
from kvagent.bench.world import Transport, World, why_no_netns
from kvagent.demo.processes import exit_on_sigterm
from kvagent.errors import ConfigError

__all__ = ["Options", "measure", "serve_peer"]

E = TypeVar("E", bound=Enum)

BLOCK_SWEEP = (8, 16, 32, 64, 128)
CONCURRENCY_SWEEP = (1, 2, 4, 8, 16)


@dataclass(frozen=True)
class Options:
    """What the command line says. Empty `models`: all. `size`: MiB of each workload, unless
    `tokens` of each request are given."""

    models: Sequence[str] = ()
    shapes_file: str | None = None
    tokens: int = 0
    size: int = 256
    block_sizes: Sequence[int] = (16,)
    producer_tp: int = 1
    consumer_tp: int = 1
    fragmentations: Sequence[str] = ("shuffled",)
    concurrencies: Sequence[int] = (1,)
    transport: str = "shm"
    netns: bool = False
    peer: str = ""
    mooncake: bool = False
    rounds: int = 5
    targets: bool = False
    quick: bool = False
    json_file: str = ""
    plot_file: str = ""


def serve_peer(address: str, transport: str) -> None:
    """Plays the producer for another machine's benchmark, until SIGTERM or SIGINT."""
    print(f"There: kvagent bench --peer {address} --transport {transport}", flush=True)
    with exit_on_sigterm():
        serve(address, _one_of(Transport, transport, "--transport"))


def measure(options: Options) -> bool:
    """Everything; False when a target was missed."""
    shapes = _chosen(options)
    transport = _one_of(Transport, options.transport, "--transport")
    if options.netns:
        transport = Transport.tcp
    if options.plot_file:
        require_matplotlib()
    if options.quick and not options.targets:
        raise ConfigError("--quick is for --targets; elsewhere: --size and --rounds")
    if options.block_sizes and min(options.block_sizes) < 1:
        raise ConfigError("--block-size: a block has 1 token or more")
    for option, file in (("--json", options.json_file), ("--plot", options.plot_file)):
        if file and not Path(file).parent.is_dir():
            raise ConfigError(f"{option} {file}: there is no such folder")
    if options.peer and "://" not in options.peer:
        options = dataclasses.replace(options, peer=f"http://{options.peer}")
    if options.netns and (why := why_no_netns()):
        raise ConfigError(f"--netns: {why}")
    if options.mooncake and (options.peer or transport is Transport.shm):
        raise ConfigError("--mooncake reads over TCP, on this machine: --transport tcp, no --peer")
    results: list[Result] = []
    points: list[Point] = []
    sweeps: list[list[Result]] = []
    with exit_on_sigterm():
        if options.targets:
            with _progress(None) as tick:
                points += reach(QUICK if options.quick else FULL, results, tick)
        else:
            with _world(options, transport) as world:
                far: Far = RemoteFar(options.peer) if options.peer else LocalFar(world)
                bench = Bench(world, far, rounds=options.rounds)
                results += _run(bench, options, _workloads(options, shapes))
                if options.plot_file:
                    sweeps += [_run(bench, options, each) for each in _sweeps(options, shapes)]
    print_results([*results, *itertools.chain(*sweeps)])
    if points:
        print_points(points)
    if options.json_file:
        data = as_data([*results, *itertools.chain(*sweeps)], points)
        Path(options.json_file).write_bytes(msgspec.json.format(msgspec.json.encode(data)))
    if sweeps:
        draw(options.plot_file, *sweeps)
    return all(point.met is not False for point in points)


def _chosen(options: Options) -> dict[str, Shape]:
    shapes = read_shapes(options.shapes_file)
    for name in options.models:
        if name not in shapes:
            raise ConfigError(f"no model {name!r}; there are {', '.join(shapes)}")
    return {name: shapes[name] for name in options.models or shapes}


def _one_of(kind: type[E], word: str, option: str) -> E:
    try:
        return kind(word)
    except ValueError:
        known = ", ".join(each.value for each in kind)
        raise ConfigError(f"{option} {word!r}: it can be {known}") from None


def _world(options: Options, transport: Transport) -> World:
    if options.peer:
        return World(transport, host=address_towards(options.peer))
    return World(transport, netns=options.netns)


def _workload(options: Options, name: str, shape: Shape, **facts: object) -> Workload:
    block_size = facts.pop("block_size", options.block_sizes[0])
    made = msgspec.structs.replace(
        Workload(
            name=name,
            shape=shape,
            tokens=1 << 20,
            producer_tp=options.producer_tp,
            consumer_tp=options.consumer_tp,
            fragmentation=Fragmentation(options.fragmentations[0]),
            concurrency=options.concurrencies[0],
        ),
        block_size=block_size,
        tokens=options.tokens or block_size,
        **facts,
    )
    return made if options.tokens else made.resized(options.size << 20)


def _workloads(options: Options, shapes: dict[str, Shape]) -> list[Workload]:
    fragmentations = [
        _one_of(Fragmentation, word, "--fragmentation") for word in options.fragmentations
    ]
    kinds = itertools.product(options.block_sizes, fragmentations, options.concurrencies)
    facts = [
        {"block_size": block, "fragmentation": kind, "concurrency": count}
        for block, kind, count in kinds
    ]
    return [
        _workload(options, name, shape, **each) for name, shape in shapes.items() for each in facts
    ]


def _sweeps(options: Options, shapes: dict[str, Shape]) -> tuple[list[Workload], list[Workload]]:
    """Of the first model, for the picture."""
    name, shape = next(iter(shapes.items()))
    return (
        [_workload(options, name, shape, block_size=size) for size in BLOCK_SWEEP],
        [_workload(options, name, shape, concurrency=count) for count in CONCURRENCY_SWEEP],
    )


def _run(bench: Bench, options: Options, workloads: Sequence[Workload]) -> list[Result]:
    if options.peer:
        ways = ["nixl", "nixl_plain", "nixl_default", "tcp"]
    else:
        ways = default_ways(bench.world.transport)
    if options.mooncake:
        install()
        ways.append("mooncake")
    results = []
    with _progress(len(workloads) * bench.steps(ways)) as tick:
        for workload in workloads:

            def told(what: str, name: str = workload.name) -> None:
                tick(f"{name}: {what}")

            results.append(bench.run(workload, ways, told))
    return results


@contextmanager
def _progress(steps: int | None) -> Iterator[Tick]:
    """A bar on the terminal; without a number of steps it shows that something goes on."""
    columns = (SpinnerColumn(), BarColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("", total=steps)
        yield lambda what: bar.update(task, advance=1, description=what)
