"""`scripts/simulate`: prints what control costs per request with ever more engines."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from kvagent.bench.contact import RANKS, Contact, signs_of_life
from kvagent.bench.simulation import Simulation

__all__ = ["grows", "simulate"]

SIZES = (10, 1000)
MESSAGES_MAY_GROW = 1.02
CPU_MAY_GROW = 1.25
"""What is left of noise."""


def simulate(sizes: list[int], requests: int, seed: int = 0, *, show: bool = True) -> Any:
    """Everything as plain data. Each time there are the most engines, and they talk within circles
    of `sizes`: with fewer engines the processor's caches would be warmer, and the same work
    cheaper. `show`: a progress bar on the terminal."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    rows = []
    console = Console(stderr=True)
    with Progress(*columns, TimeElapsedColumn(), console=console, disable=not show) as bar:
        for size in sizes:
            count = requests
            task = bar.add_task(f"circles of {size}", total=count)

            def tick(done: int, task: Any = task) -> None:
                bar.update(task, completed=done)

            everybody = Simulation(max(sizes), count, circle=size, seed=seed, tick=tick)
            outcome = everybody.run()
            kinds = {
                kind: {"per_request": sent / count, "bytes_each": outcome.bytes[kind] / sent}
                for kind, sent in outcome.messages.most_common()
            }
            row = outcome.summary()
            rows.append({**row, "circle": size, "failed": dict(outcome.failed), "kinds": kinds})
    contact = Contact().measure()
    messages, nbytes = signs_of_life()
    return {
        "ranks": RANKS,
        "sizes": rows,
        "contact": {
            "messages": sum(contact.messages.values()),
            "bytes": sum(contact.bytes.values()),
            "cpu_ms": {side: seconds * 1e3 for side, seconds in contact.seconds.items()},
        },
        "signs_of_life": {"messages_per_second": messages, "bytes_per_second": nbytes},
        "growth": grows(rows),
    }


def grows(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """From the fewest engines to the most: factors, and whether that is none."""
    first, last = rows[0], rows[-1]
    found = {key: last[key] / first[key] for key in ("messages", "bytes")}
    cpu = [row["lender_us"] + row["borrower_us"] for row in (first, last)]
    found["cpu"] = cpu[1] / cpu[0]
    flat = max(found["messages"], found["bytes"]) <= MESSAGES_MAY_GROW
    return {**found, "ok": flat and found["cpu"] <= CPU_MAY_GROW}


def _show(result: Any) -> None:
    console = Console(width=max(100, Console().width))
    engines = result["sizes"][-1]["engines"]
    table = Table(
        title=f"Control per request, {engines:,} engines of {RANKS} ranks (first contacts apart)"
    )
    table.add_column("")
    for row in result["sizes"]:
        table.add_column(f"circles of {row['circle']:,}", justify="right")
    lines: dict[str, Callable[[dict[str, Any]], str]] = {
        "requests": lambda row: f"{row['requests']:,}",
        "simulated seconds": lambda row: f"{row['simulated_seconds']:,.0f}",
        "good": lambda row: f"{row['good']:,}",
        "messages": lambda row: f"{row['messages']:.1f}",
        "KB": lambda row: f"{row['bytes'] / 1e3:.1f}",
        "CPU, producer's leader, us": lambda row: f"{row['lender_us']:.0f}",
        "CPU, consumer's leader, us": lambda row: f"{row['borrower_us']:.0f}",
        "CPU, 7 followers, us": lambda row: f"{row['follower_us']:.0f}",
        "CPU of sweeps, us per leader and second": lambda row: f"{row['sweep_us']:.0f}",
        "a leader sustains: offers/s": lambda row: f"{row['offers_per_second']:,.0f}",
        "a leader sustains: fetches/s": lambda row: f"{row['fetches_per_second']:,.0f}",
        "first contacts": lambda row: f"{row['contacts']:,}",
    }
    for name, text in lines.items():
        table.add_row(name, *(text(row) for row in result["sizes"]))
    console.print(table)
    kinds = Table(title=f"Messages, circles of {result['sizes'][-1]['circle']:,}")
    kinds.add_column("kind")
    kinds.add_column("per request", justify="right")
    kinds.add_column("bytes each", justify="right")
    for kind, each in result["sizes"][-1]["kinds"].items():
        kinds.add_row(kind, f"{each['per_request']:.3f}", f"{each['bytes_each']:.0f}")
    console.print(kinds)
    contact, life, growth = result["contact"], result["signs_of_life"], result["growth"]
    cpu = ", ".join(f"{side} {ms:.1f} ms" for side, ms in contact["cpu_ms"].items())
    console.print(
        f"First contact of two engines, once: {contact['messages']} messages, "
        f"{contact['bytes'] / 1e3:.0f} KB, CPU {cpu}.\n"
        f"Signs of life at each leader: {life['messages_per_second']} messages, "
        f"{life['bytes_per_second'] / 1e3:.1f} KB a second, whatever the traffic.\n"
        f"From {result['sizes'][0]['circle']} to {result['sizes'][-1]['circle']:,} engines that "
        "talk with each other: "
        f"messages x {growth['messages']:.3f}, bytes x {growth['bytes']:.3f}, "
        f"CPU x {growth['cpu']:.2f}. "
        + ("The cost of a request does not grow." if growth["ok"] else "The cost GROWS.")
    )


def main(
    engines: Annotated[
        list[int] | None,
        typer.Option(min=2, help="How many talk with each other; the most: how many there are."),
    ] = None,
    requests: Annotated[int, typer.Option(min=1, help="In each simulation.")] = 100_000,
    seed: Annotated[int, typer.Option(help="Decides what happens when.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Simulate many engines with the real core and the real messages: control messages, bytes and
    processor time per request. Exits with 1 when the cost grows with the number of engines."""
    result = simulate(sorted(engines or SIZES), requests, seed, show=not as_json)
    if as_json:
        print(json.dumps(result))
    else:
        _show(result)
    raise typer.Exit(0 if result["growth"]["ok"] else 1)


if __name__ == "__main__":
    typer.run(main)
