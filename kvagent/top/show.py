"""The two commands: once, or again and again."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import httpx
import msgspec
from rich.console import Console
from rich.live import Live
from rich.text import Text

from kvagent.top.ask import Answer, Lost, ask_all
from kvagent.top.render import overview, screen

__all__ = ["show_status", "show_top"]

WIDTH = 160
"""Columns where nobody's terminal says how many there are."""


def show_status(addresses: Sequence[str], *, as_json: bool) -> bool:
    """Print one row for each sidecar; whether all of them answer and are ready."""

    async def ask() -> list[Answer | Lost]:
        async with _client() as client:
            return await ask_all(client, addresses)

    answers = asyncio.run(ask())
    if as_json:
        found = [
            {"address": a.address, "status": a.raw}
            if isinstance(a, Answer)
            else {"address": a.address, "error": a.why}
            for a in answers
        ]
        print(msgspec.json.encode(found).decode())
    else:
        console = _console()
        console.print(overview(answers, console.width))
    return all(isinstance(answer, Answer) and answer.report.ready for answer in answers)


def show_top(addresses: Sequence[str], every: float, rounds: int | None = None) -> None:
    """Show all of them until interrupted, or for so many rounds, `every` seconds each."""
    asyncio.run(_top(addresses, every, rounds))


async def _top(addresses: Sequence[str], every: float, rounds: int | None) -> None:
    console = _console()
    first = Text("asking …", "dim")
    done = 0
    with Live(first, console=console, screen=console.is_terminal, auto_refresh=False) as live:
        async with _client() as client:
            while rounds is None or done < rounds:
                if done:
                    await asyncio.sleep(every)
                answers = await ask_all(client, addresses)
                live.update(screen(answers, console), refresh=True)
                done += 1


def _client() -> httpx.AsyncClient:
    return httpx.AsyncClient(trust_env=False)


def _console() -> Console:
    console = Console(highlight=False, markup=False)
    if not console.is_terminal:
        console.width = WIDTH
    return console
