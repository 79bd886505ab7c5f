"""A follower's tie to its leader: the sign of life, and results as soon as they are there."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from kvagent.agent.identity import Identity
from kvagent.agent.rank import Rank
from kvagent.config import split_address
from kvagent.errors import KVAgentError
from kvagent.wire.messages import JoinLeader, Part, PartDone, PartState, Welcomed
from kvagent.wire.peer import PeerClient

log = logging.getLogger("kvagent.follower")

EVERY = 1.0
"""Seconds between signs of life."""
PATIENCE = 2
"""Calls in a row without an answer after which the leader is taken for dead: what is read for it
ends. Calls and not seconds, since it may be we who stood still."""
STALE = 8.0
"""Seconds after the leader's last answer in which parts of it are begun."""


def orphan_seconds(fence_seconds: float) -> float:
    """How long after its leader's death a follower may write, at the most: until it has noticed,
    what it posted has ended or is fenced off, and before that others had their time to finish."""
    return silence_seconds() + 2 * fence_seconds


def silence_seconds() -> float:
    """After so long without an answer of the leader nothing more is posted for it."""
    return (PATIENCE + 1) * EVERY * 4


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
        self._leader = ""
        self._heard = 0.0
        self._said = ""
        self._closed = False
        self._unanswered = 0
        self._ending: asyncio.Task[None] | None = None
        self._keep(asyncio.create_task(self._live()))

    async def _live(self) -> None:
        while not self._closed:
            try:
                await self._speak()
            except KVAgentError as error:
                self.joined = False
                if str(error) != self._said:
                    self._said = str(error)
                    log.warning("leader: %s", error)
                self._unanswered += 1
                if self._unanswered >= PATIENCE or await self._client.is_dead():
                    self._leader = ""
                    self._end_parts("", "the leader is gone")
            except Exception:  # nobody else ends what is read for a leader that is gone
                log.exception("the sign of life failed")
            await asyncio.sleep(EVERY)

    async def _speak(self) -> None:
        """One sign of life, or two: a leader that is new to us waits to hear that we follow it."""
        while True:
            message = JoinLeader(
                engine_id=self._me.info.engine_id,
                attached=self._attached(),
                said_at=time.monotonic_ns(),
                leader=self._leader,
                reading_for=tuple(self._rank.reading_for()),
                shape=self._me.shape,
                card=self._me.card(),
            )
            answer = await self._client.call(message, timeout=EVERY * 3, again=EVERY)
            self.joined, self._said, self._unanswered = True, "", 0
            if not isinstance(answer, Welcomed):
                return
            self._heard, before = time.monotonic(), self._leader
            self._leader = answer.leader
            self._end_parts(answer.leader, "the leader started afresh")
            if before == answer.leader:
                return

    def _end_parts(self, but_of: str, why: str) -> None:
        """Nobody waits for them any more, and a new leader may not go on before they have ended."""
        over = self._ending is None or self._ending.done()
        if over and self._rank.reading_for() - {but_of}:
            log.warning("%s: what is read for it ends", why)
            self._ending = asyncio.create_task(self._rank.end_parts(but_of, why))
            self._keep(self._ending)

    def follows(self, leader: str) -> bool:
        """Whether a leader's incarnation is the one that we follow."""
        return leader == self._leader

    def start_part(self, part: Part) -> PartState:
        """See `Rank.start_part`. Only for the leader that we follow: one before it may have died,
        and its engine been told that nothing reads any more."""
        if part.leader != self._leader:
            return PartState(done=True, failure="rank_lost: this rank follows another leader")
        if time.monotonic() - self._heard > STALE:
            return PartState(done=False)  # we stood still; it asks again, if it is there
        return self._rank.start_part(part, self.part_done, self._expired)

    def _expired(self) -> str:
        """The fabric asks before it posts: we may have stood still, and the leader be dead."""
        silent = time.monotonic() - self._heard > silence_seconds()
        return "the leader was silent for too long" if silent else ""

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
        self._closed = True  # a cancellation can be swallowed, by `wait_for` before Python 3.12
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._client.close()
