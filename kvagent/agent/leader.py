"""The leader: rank 0's sidecar, which speaks for the whole engine.

It is two halves that share the engine's ranks and the way to its scheduler: the `Lender` answers
for what the engine offers, the `Borrower` fetches what others offer.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from typing import Any

from kvagent.agent.borrower import Borrower
from kvagent.agent.identity import Identity
from kvagent.agent.lender import Lender
from kvagent.agent.outbox import Outbox
from kvagent.agent.rank import Rank
from kvagent.agent.team import Member, Team
from kvagent.config import Config
from kvagent.core.fetch import FetchState, FetchTable
from kvagent.core.lease import LeaseTable
from kvagent.core.ledger import Ledger
from kvagent.errors import AgentError, ProtocolError
from kvagent.visible.watch import Watch
from kvagent.wire.codec import unpack_blocks
from kvagent.wire.control import Control
from kvagent.wire.messages import CopyDown, Fetch, Hold, Offer, Ok

log = logging.getLogger("kvagent.leader")

COPY_AGAIN = 5.0
"""Seconds after which a follower is asked again whether its mirror is filled."""


class Leader:
    def __init__(self, config: Config, control: Control, rank: Rank, watch: Watch) -> None:
        self._config = config
        self._rank = rank
        self.team = Team(control, self._member_lost)
        self.ledger = Ledger()
        self.leases = LeaseTable(lease_seconds=config.lease_seconds, ledger=self.ledger)
        self.fetches = FetchTable(self.ledger)
        self.outbox = Outbox()
        self.lender = Lender(self.leases, self.outbox, lambda: self.team.epoch)
        self.borrower = Borrower(config, rank, self.team, self.fetches, self.outbox, watch)
        self.draining = False
        self.quiesced = False

    def set_identity(self, me: Identity | None) -> None:
        """This sidecar's own rank has a cache now, or none any more."""
        self.ledger.reset()
        self.borrower.start_afresh(me.world_size if me is not None else 0)
        self.lender.revoke_all()
        self.resume()
        self.team.set_leader(me)

    def know_blocks(self) -> None:
        """The ranks that are there now may have cache groups of their own."""
        for layout in self.team.layouts():
            self.ledger.know(layout.groups)

    def _member_lost(self, index: int, why: str) -> None:
        self.lender.revoke_all()
        self.borrower.member_lost(index, why)

    def offer(self, message: Offer, event: Any = None) -> None:
        """`event`: the one that its bytes wait for, if any."""
        if self.draining:
            self.outbox.sent(
                {message.request_id}, Counter([message.request_id])
            )  # the blocks were never ours
            return
        me = self._rank.identity
        blocks = unpack_blocks(message.blocks)
        for index, group in enumerate(blocks):
            known = [g for g in me.layout.groups if g.index == index] if me else []
            if known and group.size and int(group.max()) >= known[0].num_blocks:
                log.error(
                    "offer of request %s names block %d, the cache has %d: its fetch will fail",
                    message.request_id,
                    int(group.max()),
                    known[0].num_blocks,
                )
        mirrored = me is not None and me.mirrored
        if event is None and not mirrored:
            self.lender.offer(message)
        elif not message.deferred:
            raise ProtocolError("an offer that has to wait, of a ticket that does not say so")
        else:
            self.lender.offer(message, lambda: self._ready(message, event, mirrored))

    async def _ready(self, message: Offer, event: Any, mirrored: bool) -> None:
        """Returns when the bytes of an offer can be read by others, on every rank."""
        if event is not None:
            await self._rank.require_device().wait(event)
        if mirrored:
            await asyncio.gather(
                self._rank.copy_down(message.blocks, message.num_tokens),
                *(self._copy_down(member, message) for member in self.team.followers()),
            )

    async def _copy_down(self, member: Member, message: Offer) -> None:
        order = CopyDown(
            leader=self._rank.require_identity().incarnation,
            blocks=message.blocks,
            num_tokens=message.num_tokens,
        )
        answer = await member.client.call(order, self._config.lease_seconds, again=COPY_AGAIN)
        if not isinstance(answer, Ok):
            raise AgentError(f"rank {member.index} answered {type(answer).__name__}")

    def fetch(self, message: Fetch) -> None:
        self.borrower.fetch(message, self.draining)

    def hold(self, message: Hold) -> None:
        if not self.draining:
            self.borrower.holder.hold(message)

    def cancel(self, request_id: str) -> None:
        """Ends the request's offers and its fetch, whichever there are."""
        self.lender.cancel(request_id)
        self.borrower.cancel(request_id)

    def take_work(self) -> None:
        """A new scheduler: the drain of the one before it is over."""
        self.draining = False

    async def drain(self, timeout: float) -> tuple[str, ...]:
        """No new work; waits for what was offered and what is fetched, then fails the rest.

        Returns the requests that were failed.
        """
        self.draining = True
        until = time.monotonic() + timeout
        while (  # noqa: ASYNC110
            self.draining
            and (self.fetches or self.leases or self.lender.coming())
            and time.monotonic() < until
        ):
            await asyncio.sleep(0.02)
        if not self.draining:
            return ()  # what is open now is the next scheduler's
        left = [record.request_id for record in self.fetches]
        left += [lease.request_id for lease in self.leases.live()] + self.lender.coming()
        for request_id in left:
            self.cancel(request_id)
        return tuple(left)

    async def quiesce(self, timeout: float) -> tuple[str, ...]:
        """Until `resume`, fetches that have not begun wait and nothing new is claimed; returns
        when nothing is being read or written, or the requests that still are."""
        self.quiesced = True
        self.borrower.quiesce(True)
        self.lender.quiesce(True)
        until = time.monotonic() + timeout
        while self.quiesced and self._busy() and time.monotonic() < until:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
        return tuple(self._busy()) if self.quiesced else ()

    def resume(self) -> None:
        self.quiesced = False
        self.borrower.quiesce(False)
        self.lender.quiesce(False)

    def _busy(self) -> list[str]:
        reading = [f.request_id for f in self.fetches if f.state is not FetchState.CONNECTING]
        read = [lease.request_id for lease in self.leases.live() if lease.reading]
        return reading + read

    def tick(self) -> None:
        """A few times a second, from the agent's own clock."""
        self.lender.tick()
        self.borrower.tick()
        self.team.sweep(time.monotonic())

    async def close(self) -> None:
        await self.borrower.close()
        await self.team.close()
