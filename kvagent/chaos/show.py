"""`kvagent chaos`: makes the schedule, carries it out, prints."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import msgspec

from kvagent.chaos.drill import Drill, Tally
from kvagent.chaos.schedule import Action, Plan, Strike, schedule
from kvagent.chaos.target import find_all, parse_targets

__all__ = ["run_drill"]


def run_drill(
    targets: Sequence[str],
    *,
    minutes: float,
    every: float,
    kill: float,
    stop_seconds: float,
    seed: int,
    dry_run: bool,
    as_json: bool,
) -> int:
    """`targets` are NAME=SOCKET or NAME=PID. Returns the exit code. Raises `ConfigError`, in a dry
    run after the schedule, also when one of them is not there."""
    parsed = parse_targets(targets)
    plan = Plan(
        targets=tuple(target.name for target in parsed),
        seconds=minutes * 60,
        every=every,
        kill=kill,
        stop_seconds=stop_seconds,
        seed=seed,
    )
    strikes = schedule(plan)
    if dry_run:
        if as_json:
            _print_json({"plan": plan, "strikes": strikes})
        else:
            print("\n".join(_line(strike) for strike in strikes) or "nothing would happen")
        find_all(parsed)  # the same error that would end the drill before it began
        return 0
    lines = sys.stderr if as_json else sys.stdout
    drill = Drill(parsed, strikes, lambda line: print(line, file=lines, flush=True))
    drill.run()
    tallies = list(drill.tallies.values())
    if as_json:
        _print_json(
            {
                "plan": plan,
                "interrupted": bool(drill.interrupted),
                "targets": tallies,
                "happened": drill.happened,
            }
        )
    else:
        _print_table(tallies)
    return 128 + drill.interrupted if drill.interrupted else 0


def _line(strike: Strike) -> str:
    return f"{strike.at:8.3f} s  {strike.action.value}  {strike.target}"


def _print_json(value: dict[str, Any]) -> None:
    print(msgspec.json.encode(value).decode())


def _print_table(tallies: Sequence[Tally]) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table("target", Action.KILL.value, Action.STOP.value, "missed", "back after")
    for tally in tallies:
        longest = f"at most {max(tally.returns):.1f} s" if tally.returns else ""
        if len(tally.returns) < tally.killed:
            longest = f"{len(tally.returns)} of {tally.killed} {longest}".strip()
        numbers = map(str, (tally.killed, tally.stopped, tally.missed))
        table.add_row(escape(tally.name), *numbers, longest)
    Console().print(table)
