"""Tickets that wait: claimed and renewed before anything is read.

A request may wait in its scheduler's queue for longer than a lease. `hold` claims its ticket at
once, under the id of the fetch that is to come, and renews the lease from the sidecar's clock.
Nothing is decided here: a ticket that could not be claimed, or whose lease was lost, is only no
longer renewed, and the fetch is told why.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from dataclasses import dataclass, field

from kvagent.agent.deals import Deals
from kvagent.agent.peers import Session
from kvagent.agent.rank import Rank
from kvagent.core.lease import ticket_digest
from kvagent.errors import KVAgentError
from kvagent.wire.messages import MAX_RENEWALS, Claim, Hold, LeaseRef, ReleaseTicket


@dataclass(slots=True)
class Held:
    message: Hold
    fetch_id: str = field(default_factory=lambda: uuid.uuid4().hex)
    task: asyncio.Task[None] | None = None
    session: Session | None = None
    """Held for the renewals; None: not claimed, or not any more."""
    lease_seconds: float = 0.0
    """The producer's, from its answer to the claim; 0 before."""
    renew_at: float = 0.0
    renewed_at: float = 0.0


class Holder:
    def __init__(self, rank: Rank, deals: Deals) -> None:
        self._rank = rank
        self._deals = deals
        self._held: dict[str, Held] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def hold(self, message: Hold) -> None:
        """A second one of the same transfer changes nothing."""
        if message.transfer_id in self._held:
            return
        held = self._held[message.transfer_id] = Held(message)
        held.task = asyncio.create_task(self._claim(held))
        self._keep(held.task)

    def id_of(self, transfer_id: str) -> str:
        """The id of the fetch that a ticket is held for; "" when it is not held."""
        held = self._held.get(transfer_id)
        return "" if held is None else held.fetch_id

    def drop(self, engine_id: str) -> None:
        """That engine is gone: its tickets are not renewed any more."""
        for held in self._held.values():
            if held.message.engine_id == engine_id:
                self._let_go(held)

    def take(self, transfer_id: str) -> str:
        """The id under which this transfer may be claimed already, for the fetch that goes on
        with it or the release that ends it; "" when it was not held."""
        held = self._held.pop(transfer_id, None)
        if held is None:
            return ""
        if held.task is not None:
            held.task.cancel()
        self._let_go(held)
        return held.fetch_id

    def release_all(self) -> None:
        """The scheduler whose requests they were is gone."""
        for held in list(self._held.values()):
            message = held.message
            ticket = ReleaseTicket(
                engine_id=message.engine_id,
                host=message.host,
                port=message.port,
                transfer_id=message.transfer_id,
                token=message.token,
            )
            fetch_id = self.take(message.transfer_id)
            self._keep(asyncio.create_task(self._deals.release(ticket, fetch_id)))

    def tick(self) -> None:
        """Renews what is due, and with it everything else that is held at the same peer."""
        now = time.monotonic()
        sessions: dict[Session, list[Held]] = {}
        for held in self._held.values():
            if held.session is not None and held.lease_seconds:
                sessions.setdefault(held.session, []).append(held)
        for session, all_held in sessions.items():
            if any(now >= held.renew_at for held in all_held):
                for first in range(0, len(all_held), MAX_RENEWALS):
                    batch = all_held[first : first + MAX_RENEWALS]
                    for held in batch:
                        held.renew_at = now + held.lease_seconds / 3
                    self._keep(asyncio.create_task(self._renew(session, batch)))

    async def close(self) -> None:
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _claim(self, held: Held) -> None:
        message, me = held.message, self._rank.identity
        if me is None:
            return
        try:
            session = await self._rank.peers.greet(
                message.engine_id, message.host, message.port, message.epoch
            )
        except KVAgentError:
            return
        claim = Claim(
            transfer_id=message.transfer_id,
            token=message.token,
            fetch_id=held.fetch_id,
            engine_id=me.info.engine_id,
            digest=ticket_digest(message.remote_blocks, message.num_tokens, message.deferred),
            reading=False,
            begun=False,
        )
        session.hold()
        held.session = session
        cause, lease = await self._deals.ask(session, claim, message.epoch)
        if cause:
            self._let_go(held)
        held.lease_seconds = lease
        held.renewed_at = time.monotonic()
        held.renew_at = held.renewed_at + lease / 3

    async def _renew(self, session: Session, batch: list[Held]) -> None:
        refs = [LeaseRef(held.message.transfer_id, held.fetch_id) for held in batch]
        causes = await self._deals.renew(session, refs)
        now = time.monotonic()
        for held, cause in zip(batch, causes, strict=False):
            if cause:
                self._let_go(held)
            else:
                held.renewed_at = now
        for held in batch:
            if now > held.renewed_at + held.lease_seconds:  # it has lapsed, whatever comes
                self._let_go(held)

    def _let_go(self, held: Held) -> None:
        session, held.session = held.session, None
        if session is not None:
            session.let_go()

    def _keep(self, task: asyncio.Task[None]) -> None:
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
