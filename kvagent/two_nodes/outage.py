"""The link between the nodes is cut while bytes of the cache are on their way, and comes back."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import httpx

from kvagent.demo.ask import ask
from kvagent.demo.prompts import demo_prompts
from kvagent.demo.report import Answer
from kvagent.errors import KVAgentError
from kvagent.two_nodes.namespaces import Network
from kvagent.two_nodes.report import Moment

__all__ = ["TRIES", "Drill", "Timed", "long_prompts", "peer_transport"]

TRIES = 3
"""How often prompts are sent for a moment in which a transfer is less than half done. On a busy
machine such a moment can pass between two looks."""

_LOOK_SECONDS = 0.01
_CUT_DEADLINE = 120.0
"""A bound against hangs only: until a transfer is under way."""

Timed = tuple[Answer, float]
"""An answer, and the seconds that it took."""


def long_prompts(count: int) -> list[str]:
    """Some hundred tokens each, all different."""
    return [prompt for prompt in demo_prompts(6 * count) if len(prompt) > 1000][:count]


class Drill:
    """`link` with `producer` and `consumer` on it; `status`: URL of the consumer's sidecar."""

    def __init__(
        self, link: Network, producer: str, consumer: str, status: str, client: httpx.AsyncClient
    ) -> None:
        self._link = link
        self._producer, self._consumer = producer, consumer
        self._status = status
        self._client = client
        self.at_cut = Moment(transfers=0, arrived_bytes=0, wanted_bytes=0)
        self.stalled_bytes = 0
        self.cut_seconds = 0.0

    @property
    def done(self) -> bool:
        return self.cut_seconds > 0

    async def run(
        self,
        url: str,
        prompts: list[str],
        max_tokens: int,
        *,
        megabits: float,
        seconds: float,
        say: Callable[[str], None],
    ) -> list[Timed]:
        """Sends all prompts at once, cuts the link for `seconds` when a transfer is less than half
        done, and returns the answers. Not `done` after it when no such transfer was seen."""
        self._link.limit(self._consumer, megabits)
        asked = [
            asyncio.create_task(timed(self._client, url, prompt, max_tokens)) for prompt in prompts
        ]
        try:
            await self._cut(asked, seconds, say)
            return await asyncio.gather(*asked)
        finally:
            for task in asked:
                task.cancel()
            await asyncio.gather(*asked, return_exceptions=True)
            self._link.unlimit(self._consumer)

    async def _cut(
        self, asked: list[asyncio.Task[Timed]], seconds: float, say: Callable[[str], None]
    ) -> None:
        deadline = time.monotonic() + _CUT_DEADLINE
        while not _half_done(moment := await self._look()):
            if all(task.done() for task in asked):
                return
            if time.monotonic() > deadline:
                raise KVAgentError(f"no transfer began in {_CUT_DEADLINE:g} s")
            await asyncio.sleep(_LOOK_SECONDS)
        started = time.monotonic()
        # The producer's end, so that we still see what the consumer's sidecar says.
        self._link.cut(self._producer)
        try:
            self.at_cut = await self._look()
            say(
                f"the link is cut; {self.at_cut.transfers} transfers are under way, "
                f"{self.at_cut.arrived_bytes / 1e6:.1f} of {self.at_cut.wanted_bytes / 1e6:.1f} MB "
                f"are there (looked at before: {moment.arrived_bytes / 1e6:.1f})"
            )
            await asyncio.sleep(seconds)
            self.stalled_bytes = (await self._look()).arrived_bytes - self.at_cut.arrived_bytes
        finally:
            self._link.mend(self._producer)
        self.cut_seconds = time.monotonic() - started
        say(f"the link is back after {self.cut_seconds:.1f} s")

    async def _look(self) -> Moment:
        rows = (await status(self._client, self._status))["transfers"]
        return Moment(
            transfers=len(rows),
            arrived_bytes=sum(row["bytes"] for row in rows),
            wanted_bytes=sum(row["wanted_bytes"] for row in rows),
        )


def _half_done(moment: Moment) -> bool:
    """Some bytes are there and most are not."""
    return 0 < moment.arrived_bytes < moment.wanted_bytes / 2


async def timed(client: httpx.AsyncClient, url: str, prompt: str, max_tokens: int) -> Timed:
    started = time.monotonic()
    answer = await ask(client, url, prompt, max_tokens, lambda _: None)
    return answer, time.monotonic() - started


async def status(client: httpx.AsyncClient, url: str) -> dict[str, Any]:
    """A sidecar's /status."""
    answer = await client.get(f"{url}/status", params={"cards": "0"})
    answer.raise_for_status()
    shown: dict[str, Any] = answer.json()
    return shown


async def peer_transport(client: httpx.AsyncClient, url: str) -> str:
    """What carried the bytes of all peers of a sidecar; "unknown" when it has read from none."""
    peers = (await status(client, url))["peers"]
    return "+".join(sorted({peer["transport"] for peer in peers})) or "unknown"
