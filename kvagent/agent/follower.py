"""A follower's tie to its leader: the sign of life, and results as soon as they are there."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from kvagent.agent.identity import Identity
from kvagent.agent.rank import Rank
from kvagent.config import split_address
from kvagent.errors import KVAgentError
from kvagent.wire.messages import JoinLeader, PartDone, PartState
from kvagent.wire.peer import PeerClient

log = logging.getLogger("kvagent.follower")

EVERY = 1.0
"""Seconds between signs of life."""


class Follower:
    """Runs from the moment the cache is registered until the engine's worker starts afresh."""

    def __init__(self, rank: Rank, me: Identity, attached: Callable[[], bool]) -> None:
        assert me.info.leader is not None
        host, port = split_address(me.info.leader, "WorkerInfo.leader")
        self._rank = rank
        self._me = me
        self._attached = attached
        self._client = PeerClient(rank.control, host, port)
        self._tasks: set[asyncio.Task[None]] = set()
        self.joined = False
        self._keep(asyncio.create_task(self._live()))

    async def _live(self) -> None:
        said = ""
        while True:
            message = JoinLeader(
                engine_id=self._me.info.engine_id,
                attached=self._attached(),
                shape=self._me.shape,
                card=self._me.card(),
            )
            try:
                await self._client.call(message, timeout=EVERY * 3, again=EVERY)
                self.joined, said = True, ""
            except KVAgentError as error:
                self.joined = False
                if str(error) != said:
                    said = str(error)
                    log.warning("leader: %s", error)
            await asyncio.sleep(EVERY)

    def part_done(self, part_id: str, state: PartState) -> None:
        """Tells the leader at once; if this is lost, the leader asks."""
        self._keep(asyncio.create_task(self._tell(part_id, state)))

    async def _tell(self, part_id: str, state: PartState) -> None:
        info = self._me.info
        message = PartDone(
            engine_id=info.engine_id,
            tp_rank=info.tp_rank,
            pp_rank=info.pp_rank,
            part_id=part_id,
            failure=state.failure,
            stats=state.stats,
        )
        try:
            await self._client.call(message, timeout=EVERY * 5)
        except KVAgentError as error:
            log.warning("leader: %s", error)

    def _keep(self, task: asyncio.Task[None]) -> None:
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._client.close()
