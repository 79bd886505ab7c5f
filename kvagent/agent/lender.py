"""The producer's half of the leader: answers for the engine's leases.

The table in `kvagent.core.lease` decides; this file gives it the time, keeps the answers that
parked claims wait for, and passes blocks that came free on to the scheduler.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from kvagent.agent.outbox import Outbox
from kvagent.core.lease import LeaseTable
from kvagent.core.lease import Verdict as LeaseVerdict
from kvagent.errors import BlockInUseError
from kvagent.wire.messages import Claim, Complete, Offer, Release, Renew, Renewed, Verdict

log = logging.getLogger("kvagent.leader")


class Lender:
    """`epoch` says which incarnation of the engine's memory the answers are about."""

    def __init__(self, leases: LeaseTable, outbox: Outbox, epoch: Callable[[], str]) -> None:
        self._leases = leases
        self._outbox = outbox
        self._epoch = epoch
        self._parked: dict[str, asyncio.Future[LeaseVerdict]] = {}

    # ------------------------------------------------------------ the scheduler

    def offer(self, message: Offer) -> None:
        now = time.monotonic()
        try:
            self._leases.offer(
                now,
                message.transfer_id,
                message.token,
                message.request_id,
                message.blocks,
                message.num_tokens,
            )
        except BlockInUseError as error:
            log.error("offer of request %s: %s", message.request_id, error)
        answered = self._leases.answer_parked(now, message.transfer_id)
        if answered is not None:
            self._answer_parked(*answered)
        self._publish()

    def cancel(self, request_id: str) -> None:
        self._leases.cancel(time.monotonic(), request_id)
        self._publish()

    def drop_consumer(self, engine_id: str) -> None:
        self._leases.drop_consumer(time.monotonic(), engine_id)
        self._publish()

    # ------------------------------------------------------------ other engines' leaders

    async def claim(self, message: Claim) -> Verdict:
        verdict = self._leases.claim(
            time.monotonic(),
            message.transfer_id,
            message.token,
            message.fetch_id,
            message.digest,
            message.engine_id,
            message.reading,
        )
        if verdict is None:
            future = self._parked.get(message.fetch_id)
            if future is None:
                future = asyncio.get_running_loop().create_future()
                self._parked[message.fetch_id] = future
            verdict = await asyncio.shield(future)
        self._publish()  # it may have found a lease that has lapsed
        return self._verdict(verdict)

    def renew(self, message: Renew) -> Renewed:
        now = time.monotonic()
        verdicts = tuple(
            self._leases.renew(now, ref.transfer_id, ref.fetch_id).value for ref in message.leases
        )
        self._publish()
        return Renewed(verdicts=verdicts)

    def complete(self, message: Complete) -> Verdict:
        verdict = self._leases.complete(
            time.monotonic(), message.transfer_id, message.token, message.fetch_id
        )
        self._publish()
        return self._verdict(verdict)

    def released(self, message: Release) -> Verdict:
        verdict = self._leases.release(
            time.monotonic(), message.transfer_id, message.token, message.fetch_id
        )
        self._answer_parked(message.fetch_id, verdict)
        self._publish()
        return self._verdict(verdict)

    def _verdict(self, verdict: LeaseVerdict) -> Verdict:
        return Verdict(
            verdict=verdict.value,
            epoch=self._epoch(),
            lease_seconds=self._leases.lease_seconds,
        )

    def _answer_parked(self, fetch_id: str, verdict: LeaseVerdict) -> None:
        future = self._parked.pop(fetch_id, None)
        if future is not None and not future.done():
            future.set_result(verdict)

    # ------------------------------------------------------------ time and change

    def tick(self) -> None:
        for fetch_id in self._leases.sweep(time.monotonic()):
            self._answer_parked(fetch_id, LeaseVerdict.UNKNOWN)
        self._publish()

    def quiesce(self, on: bool) -> None:
        """While it is on, nothing is claimed that was not."""
        self._leases.quiesced = on

    def revoke_all(self) -> None:
        """A rank's memory is a new one: what was promised of the old one no longer holds."""
        self._leases.revoke_all(time.monotonic())
        self._publish()

    def _publish(self) -> None:
        self._outbox.sent(self._leases.take_finished(), self._leases.take_ended())
