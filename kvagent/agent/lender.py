"""The producer's half of the leader: answers for the engine's leases.

The table in `kvagent.core.lease` decides; this file gives it the time, keeps the answers that
parked claims wait for, and passes blocks that came free on to the scheduler.

An offer whose bytes are not where peers read them yet (an event has to pass, a mirror has to be
filled) is kept here until they are, and is no lease before: nobody can claim it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Coroutine
from typing import Any

from kvagent.agent.causes import cause_text
from kvagent.agent.outbox import Outbox
from kvagent.core.lease import LeaseTable
from kvagent.core.lease import Verdict as LeaseVerdict
from kvagent.errors import BlockInUseError, KVAgentError
from kvagent.wire.messages import (
    Claim,
    Complete,
    Completed,
    Offer,
    Release,
    Renew,
    Renewed,
    Verdict,
)

log = logging.getLogger("kvagent.leader")

Ready = Callable[[], Coroutine[Any, Any, None]]


class Lender:
    """`epoch` says which incarnation of the engine's memory the answers are about."""

    def __init__(self, leases: LeaseTable, outbox: Outbox, epoch: Callable[[], str]) -> None:
        self._leases = leases
        self._outbox = outbox
        self._epoch = epoch
        self._parked: dict[str, asyncio.Future[LeaseVerdict]] = {}
        self._coming: dict[str, tuple[Offer, asyncio.Task[None]]] = {}
        """Offers that are not ready, by transfer."""

    # ------------------------------------------------------------ the scheduler

    def offer(self, message: Offer, ready: Ready | None = None) -> None:
        """`ready` returns when the bytes are there; None: they are."""
        if ready is None:
            self._lend(message)
        elif message.transfer_id not in self._coming:
            task = asyncio.create_task(self._await(message, ready))
            self._coming[message.transfer_id] = message, task

    async def _await(self, message: Offer, ready: Ready) -> None:
        why = ""
        try:
            await asyncio.wait_for(ready(), self._leases.lease_seconds)
        except asyncio.TimeoutError:
            why = f"the bytes were not there after {self._leases.lease_seconds:g} s"
        except KVAgentError as error:
            why = cause_text(error)
        except Exception as error:
            log.exception("offer of request %s", message.request_id)
            why = f"internal: {error}"
        if self._coming.pop(message.transfer_id, None) is None:
            return
        if why:
            log.error("offer of request %s ends: %s", message.request_id, why)
            self._end_coming(message)
        else:
            self._lend(message)

    def coming(self) -> list[str]:
        """The requests of offers that are not ready."""
        return [message.request_id for message, _ in self._coming.values()]

    def _drop_coming(self, request_id: str | None = None) -> None:
        """Of one request, or all."""
        for transfer_id, (message, task) in list(self._coming.items()):
            if request_id in (None, message.request_id):
                del self._coming[transfer_id]
                task.cancel()
                self._end_coming(message)

    def _end_coming(self, message: Offer) -> None:
        self._outbox.sent({message.request_id}, Counter([message.request_id]))

    def _lend(self, message: Offer) -> None:
        now = time.monotonic()
        try:
            self._leases.offer(
                now,
                message.transfer_id,
                message.token,
                message.request_id,
                message.blocks,
                message.num_tokens,
                message.deferred,
            )
        except BlockInUseError as error:
            log.error("offer of request %s: %s", message.request_id, error)
        answered = self._leases.answer_parked(now, message.transfer_id)
        if answered is not None:
            self._answer_parked(*answered)
        self._publish()

    def cancel(self, request_id: str) -> None:
        self._drop_coming(request_id)
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
            message.begun,
        )
        if verdict is None:
            future = self._parked.get(message.fetch_id)
            if future is None:
                future = asyncio.get_running_loop().create_future()
                self._parked[message.fetch_id] = future
            await asyncio.wait({future}, timeout=self._leases.park_seconds)
            if not future.done() and message.transfer_id in self._coming:
                return self._verdict(LeaseVerdict.COMING)  # so that it knows that we live
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

    def complete(self, message: Complete) -> Completed:
        now = time.monotonic()
        verdicts = tuple(
            self._leases.complete(
                now, each.transfer_id, each.token, each.fetch_id, each.digest, message.engine_id
            ).value
            for each in message.leases
        )
        self._publish()
        return Completed(epoch=self._epoch(), verdicts=verdicts)

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
        for fetch_id in self._leases.sweep(time.monotonic(), self._coming):
            self._answer_parked(fetch_id, LeaseVerdict.UNKNOWN)
        self._publish()

    def quiesce(self, on: bool) -> None:
        """While it is on, nothing is claimed that was not."""
        self._leases.quiesced = on

    def revoke_all(self) -> None:
        """A rank's memory is a new one: what was promised of the old one no longer holds."""
        self._drop_coming()
        self._leases.revoke_all(time.monotonic())
        self._publish()

    def _publish(self) -> None:
        self._outbox.sent(self._leases.take_finished(), self._leases.take_ended())
