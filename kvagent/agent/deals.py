"""What a consumer's leader says to a producer's: claim, renew, complete, release.

Each is a question with an answer; what follows from the answer is decided by the caller.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from functools import partial

from kvagent.agent.causes import cause_text
from kvagent.agent.peers import PeerBook, Session
from kvagent.core.lease import Verdict as LeaseVerdict
from kvagent.errors import KVAgentError
from kvagent.wire.control import Control
from kvagent.wire.messages import (
    MAX_COMPLETIONS,
    Claim,
    Complete,
    Completed,
    Completion,
    LeaseRef,
    Peer,
    Release,
    ReleaseTicket,
    Renew,
    Renewed,
    Verdict,
)
from kvagent.wire.peer import PeerClient

log = logging.getLogger("kvagent.fetch")

COMPANY_SECONDS = 0.002
"""A message costs what several fetches do, and who is one of many waits for the others anyway."""
COMING_PAUSE = 0.05
"""Seconds before asking again: one who answers at once must not keep us busy."""
MAX_STRANGERS = 64
"""Connections at once for releases to engines that we have no session with."""


Done = Callable[[str], None]


class Deals:
    def __init__(self, control: Control, peers: PeerBook, call_timeout: float) -> None:
        self._control = control
        self._peers = peers
        self._timeout = call_timeout
        self._strangers = asyncio.Semaphore(MAX_STRANGERS)
        self._completing: dict[Session, list[tuple[Completion, str, Done]]] = {}
        self._open: set[asyncio.Future[Peer]] = set()

    async def ask(self, session: Session, message: Claim, epoch: str) -> tuple[str, float]:
        """("", the producer's lease in seconds) when it said yes, else (the cause, 0). Asks again
        as long as the bytes are said to be coming.

        `epoch` is the ticket's: a producer that restarted meanwhile says nothing of this memory.
        """
        while True:
            try:
                answer = await session.client.call(message, self._timeout)
            except KVAgentError as error:
                return cause_text(error), 0.0
            if not isinstance(answer, Verdict) or answer.verdict != LeaseVerdict.COMING.value:
                break
            await asyncio.sleep(COMING_PAUSE)
        if not isinstance(answer, Verdict):
            return f"protocol: answered with {type(answer).__name__}", 0.0
        cause = _cause(session, answer.verdict, answer.epoch, epoch)
        return cause, 0.0 if cause else answer.lease_seconds

    def complete(
        self,
        session: Session,
        engine_id: str,
        completion: Completion,
        epoch: str,
        done: Done,
        *,
        crowded: bool,
    ) -> None:
        """`done` is told "" when the producer says that the lease held, else the cause.

        What is asked within one turn of the event loop is asked in one message; when it is
        `crowded`, what is asked within `COMPANY_SECONDS`. `engine_id` is ours; `epoch` as in `ask`.
        """
        asked = self._completing.setdefault(session, [])
        asked.append((completion, epoch, done))
        if len(asked) == 1:
            wait = COMPANY_SECONDS if crowded else 0.0
            asyncio.get_running_loop().call_later(wait, self._ask_of_all, session, engine_id)

    def _ask_of_all(self, session: Session, engine_id: str) -> None:
        asked = self._completing.pop(session)
        for first in range(0, len(asked), MAX_COMPLETIONS):
            batch = asked[first : first + MAX_COMPLETIONS]
            leases = tuple(completion for completion, _, _ in batch)
            message = Complete(engine_id=engine_id, leases=leases)
            answer = session.client.ask(message, self._timeout)
            self._open.add(answer)
            answer.add_done_callback(partial(self._completed, session, batch))

    def _completed(
        self,
        session: Session,
        batch: Sequence[tuple[Completion, str, Done]],
        future: asyncio.Future[Peer],
    ) -> None:
        self._open.discard(future)
        if future.cancelled():
            return
        try:
            answer = future.result()
        except KVAgentError as error:
            why = cause_text(error)
        else:
            if isinstance(answer, Completed) and len(answer.verdicts) == len(batch):
                for verdict, (_, epoch, done) in zip(answer.verdicts, batch, strict=True):
                    _tell(done, _cause(session, verdict, answer.epoch, epoch))
                return
            why = f"protocol: answered with {type(answer).__name__}"
        for _, _, done in batch:
            _tell(done, why)

    def close(self) -> None:
        for answer in list(self._open):
            answer.cancel()

    async def renew(self, session: Session, leases: Sequence[LeaseRef]) -> list[str]:
        """A cause for each lease, "" for those that are held. [] when no answer came: the next
        renewal may get through, and `Complete` decides."""
        try:
            answer = await session.client.call(Renew(leases=tuple(leases)), self._timeout)
        except KVAgentError as error:
            log.warning("renewal of %d leases: %s", len(leases), error)
            return []
        if not isinstance(answer, Renewed) or len(answer.verdicts) != len(leases):
            return []
        return [
            "" if verdict == LeaseVerdict.HELD.value else _named(verdict)
            for verdict in answer.verdicts
        ]

    async def release(self, ticket: ReleaseTicket, fetch_id: str = "") -> None:
        """Best effort: a release that is lost costs the producer one lease."""
        message = Release(transfer_id=ticket.transfer_id, token=ticket.token, fetch_id=fetch_id)
        session = self._peers.session(ticket.engine_id, ticket.host, ticket.port)
        try:
            if session is not None:
                session.hold()
                try:
                    await session.client.call(message, self._timeout)
                finally:
                    session.let_go()
                return
            async with self._strangers:
                client = PeerClient(self._control, ticket.host, ticket.port)
                try:
                    await client.call(message, self._timeout)
                finally:
                    await client.close()
        except KVAgentError as error:
            log.info("release of %s at %s: %s", ticket.transfer_id, ticket.engine_id, error)


def _tell(done: Done, cause: str) -> None:
    """What goes wrong with one fetch is not the others' in the same message."""
    try:
        done(cause)
    except Exception:
        log.exception("after the producer's word: %s", cause or "good")


def _cause(session: Session, verdict: str, epoch: str, of_ticket: str) -> str:
    """ "" when the producer said yes. One that restarted says nothing of the ticket's memory."""
    if epoch != of_ticket:
        return f"peer_restarted: engine {session.engine_id} started afresh since the ticket"
    if verdict == LeaseVerdict.HELD.value:
        return ""
    return _named(verdict)


def _named(verdict: str) -> str:
    """The cause that a refusal is. What a peer may say becomes a name in logs and metrics, so there
    are no others."""
    if verdict not in _MEANING:
        return f"protocol: the producer answered {verdict[:32]!r}"
    return f"{verdict}: {_MEANING[verdict]}"


_MEANING = {
    LeaseVerdict.UNKNOWN.value: "the producer does not know this transfer",
    LeaseVerdict.FORBIDDEN.value: "the token is not the ticket's",
    LeaseVerdict.MISMATCH.value: "the ticket's blocks or tokens are not those that were offered",
    LeaseVerdict.USED.value: "another fetch used this ticket",
    LeaseVerdict.EXPIRED.value: "the lease ran out and the blocks went back",
    LeaseVerdict.CANCELLED.value: "the producer cancelled the request",
    LeaseVerdict.RELEASED.value: "the ticket was released",
    LeaseVerdict.REFUSED.value: "the offered blocks were still being written",
    LeaseVerdict.QUIESCED.value: "the producer's engine starts no transfer for the moment",
    LeaseVerdict.REVOKED.value: "the producer's engine or scheduler is not the one that offered it",
}
