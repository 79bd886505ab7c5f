"""The consumer's half of the leader: fetches, from the scheduler's message to its report.

The machine in `kvagent.core.fetch` decides; this file carries out its actions (claim, hand out
parts, complete, release) and feeds what happened back in. `KVOutputAggregator` says when every
rank is terminal.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import logging
import secrets
import time
from collections import OrderedDict
from collections.abc import Awaitable
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple

from kvagent.agent.causes import ago, cause_text
from kvagent.agent.deals import Deals
from kvagent.agent.follower import orphan_seconds
from kvagent.agent.holder import Holder
from kvagent.agent.outbox import Outbox
from kvagent.agent.peers import Session
from kvagent.agent.progress import Progress
from kvagent.agent.rank import Rank
from kvagent.agent.team import Member, Team
from kvagent.config import Config, join_address
from kvagent.core.aggregator import KVOutputAggregator
from kvagent.core.fetch import Action, Event, FetchState, FetchTable
from kvagent.core.fetch import Fetch as FetchRecord
from kvagent.core.lease import ticket_digest
from kvagent.core.ledger import written_blocks
from kvagent.core.output import KVConnectorOutput
from kvagent.core.stats import FetchStats, ReadStats
from kvagent.errors import BlockInUseError, KVAgentError, ProtocolError
from kvagent.visible.events import FetchEnd
from kvagent.visible.watch import Watch
from kvagent.wire.codec import unpack_blocks
from kvagent.wire.messages import (
    MAX_RENEWALS,
    AbortPart,
    Claim,
    Completion,
    Drop,
    Fetch,
    LeaseRef,
    Part,
    PartDone,
    PartState,
    Peer,
    ReleaseTicket,
)

log = logging.getLogger("kvagent.fetch")

CROWD = 32
"""Fetches under way, from which on the one need not hurry."""
CLAIM_AFTER = 1.0
"""Seconds of reading, or a tenth of the producer's lease, after which a fetch is claimed."""
MAX_QUIESCED = 4096
MAX_HEARD = 1024
"""Addresses of which is remembered when they last answered."""
_DOING = {
    FetchState.CONNECTING: "connecting to",
    FetchState.CLAIMING: "waiting for the bytes of",
    FetchState.READING: "reading from",
    FetchState.VALIDATING: "waiting for the verdict of",
}


_DROPPED = {FetchState.CONNECTING: Event.CONNECT_FAILED, FetchState.VALIDATING: Event.CANCEL}
"""What a peer's end is in states in which no rank can fail."""


class Ids:
    """Ids that nobody can guess, others of them known or not, and no other sidecar has: also not
    one in a process that was forked from the same one."""

    def __init__(self) -> None:
        self._secret = secrets.token_bytes(32)
        self._numbers = itertools.count()

    def new(self) -> str:
        number = next(self._numbers).to_bytes(8, "little")
        return hashlib.blake2b(number, key=self._secret, digest_size=16).hexdigest()


@dataclass(slots=True)
class RankReport:
    """What `KVOutputAggregator` takes: one worker's output."""

    kv_connector_output: KVConnectorOutput | None = None


@dataclass(slots=True)
class Running:
    """What the leader keeps beside the record of a fetch."""

    message: Fetch
    record: FetchRecord
    part_id: str
    tasks: set[asyncio.Task[None]] = field(default_factory=set)
    session: Session | None = None
    lease_seconds: float = 0.0
    """The producer's, from its answer to the claim."""
    renew_at: float = 0.0
    local_blocks: tuple[bytes, ...] = ()
    """What must not be used when it fails."""
    shares: dict[int, ReadStats] = field(default_factory=dict)
    """By rank; a rank may report twice."""
    own: Progress = field(default_factory=Progress)
    """Of this sidecar's own rank."""
    muted: bool = False
    """Nobody is there who would know the request."""
    left_until: float | None = None
    """Set when the engine started afresh: by then other ranks have stopped reading for it."""
    failed_in: str = ""
    """The state that it was in when the first thing went wrong; `quiesced`: this engine was."""
    failed_rank: int | None = None

    @property
    def address(self) -> str:
        """Of the producer's leader."""
        return join_address(self.message.host, self.message.port)

    def leave(self) -> None:
        """The session is not needed any more."""
        session, self.session = self.session, None
        if session is not None:
            session.let_go()


class Transfer(NamedTuple):
    """A fetch under way, for people; `own`: this sidecar's own rank."""

    record: FetchRecord
    message: Fetch
    own: Progress


class Borrower:
    def __init__(
        self,
        config: Config,
        rank: Rank,
        team: Team,
        fetches: FetchTable,
        outbox: Outbox,
        watch: Watch,
    ) -> None:
        self.config = config
        self.rank = rank
        self.team = team
        self.fetches = fetches
        self.outbox = outbox
        self.watch = watch
        self.bytes_received = 0
        self._ids = Ids()
        self._aggregator: KVOutputAggregator | None = None
        self._world_size = 0
        self._running: dict[str, Running] = {}
        self._parts: dict[str, Running] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._open = asyncio.Event()
        """Closed while the engine is quiesced: new fetches wait."""
        self._open.set()
        self._quiesced: OrderedDict[str, str] = OrderedDict()
        """Fetches of tickets that are still good, by transfer: they are claimed first next time."""
        self._heard: OrderedDict[str, float] = OrderedDict()
        """When each producer's leader last answered, by its address."""
        self._deals = Deals(rank.control, rank.peers, config.call_timeout)
        self.holder = Holder(rank, self._deals)

    # ------------------------------------------------------------ the scheduler

    def fetch(self, message: Fetch, draining: bool) -> None:
        now = self._now()
        # Malformed ones are refused here, before there is a record.
        local_blocks, _ = map(unpack_blocks, (message.local_blocks, message.remote_blocks))
        record = FetchRecord(
            fetch_id=self._id_for(message.transfer_id),
            request_id=message.request_id,
            transfer_id=message.transfer_id,
            token=message.token,
            peer=message.engine_id,
            started=now,
            deadline=now + self.config.fetch_timeout,
            deferred=message.deferred or message.transfer_id in self._quiesced,
        )
        if not self.fetches.add(record):
            self._refuse_second(message)
            return
        running = Running(message, record, self._ids.new(), local_blocks=message.local_blocks)
        self._running[record.fetch_id] = running
        self._parts[running.part_id] = running
        if draining:
            self._feed(running, Event.CONNECT_FAILED, "draining: this engine takes no new work")
            return
        missing = self.team.missing() or self.team.silent_text(self._now())
        if missing:
            self._feed(running, Event.CONNECT_FAILED, f"not_ready: {missing}")
            return
        written = written_blocks(
            self.team.layouts(), local_blocks, message.start_token, message.num_tokens
        )
        try:
            self.fetches.reserve(record, written)
        except BlockInUseError as error:
            self._feed(running, Event.CONNECT_FAILED, cause_text(error))
            return
        session = self._met(running)
        if session is not None and self._open.is_set():
            self._connected(running, session)
        else:
            self._spawn(running, self._connect(running))

    def quiesce(self, on: bool) -> None:
        """While it is on, fetches that have not begun wait."""
        if on:
            self._open.clear()
        else:
            self._open.set()

    def cancel(self, request_id: str) -> None:
        record = self.fetches.of_request(request_id)
        if record is not None:
            self._feed(self._running[record.fetch_id], Event.CANCEL, "cancelled: by the engine")

    def _id_for(self, transfer_id: str) -> str:
        """A held ticket is claimed under the id of the first fetch of it, and of no other; but one
        that is still good after `quiesced` goes on under its id."""
        held = self.holder.id_of(transfer_id) or self._quiesced.get(transfer_id, "")
        return held if held and held not in self._running else self._ids.new()

    def _take_held(self, record: FetchRecord) -> None:
        if self.holder.id_of(record.transfer_id) == record.fetch_id:
            self.holder.take(record.transfer_id)

    def _refuse_second(self, message: Fetch) -> None:
        """A scheduler fetches what one before it is still fetching. The end of the one would be
        taken for the other's, so neither may be called good."""
        record = self.fetches.of_request(message.request_id)
        assert record is not None
        running = self._running[record.fetch_id]
        running.local_blocks += message.local_blocks
        self._feed(running, Event.CANCEL, "failed: the request was being fetched already")
        if message.transfer_id != record.transfer_id:
            ticket = ReleaseTicket(
                engine_id=message.engine_id,
                host=message.host,
                port=message.port,
                transfer_id=message.transfer_id,
                token=message.token,
            )
            self.release(ticket)

    async def abandon(self, why: str) -> None:
        """Ends all fetches; returns when nothing can write into the engine's blocks any more."""
        for running in list(self._running.values()):
            self._feed(running, Event.CANCEL, f"cancelled: {why}")
        while self.fetches:  # noqa: ASYNC110  (rare, and bounded by the deadline and the fence)
            await asyncio.sleep(0.02)

    def release(self, message: ReleaseTicket) -> None:
        fetch_id = self.holder.take(message.transfer_id)
        self._background(self._deals.release(message, fetch_id))

    async def drop_peer(self, engine_id: str) -> None:
        """An engine is gone, says the router: what waits for it fails now."""
        for running in list(self._running.values()):
            if running.record.peer == engine_id:
                event = _DROPPED.get(running.record.state, Event.RANK_FAILED)
                self._feed(running, event, f"peer_dropped: engine {engine_id} is gone")
                # What hangs is fenced off soon: nothing will come of waiting until the deadline.
                running.record.deadline = min(running.record.deadline, self._now())
        self.holder.drop(engine_id)
        await self.rank.peers.drop(engine_id)
        for member in self.team.followers():
            self._background(self._tell(member, Drop(engine_id=engine_id)))

    # ------------------------------------------------------------ ranks

    def part_done(self, message: PartDone) -> None:
        """A follower's share of a fetch is terminal."""
        me = self.rank.require_identity()
        index = message.pp_rank * me.info.tp_size + message.tp_rank
        if message.engine_id != me.info.engine_id or not 0 < index < me.world_size:
            raise ProtocolError(f"rank {index} of {message.engine_id!r} is no follower here")
        state = PartState(done=True, failure=message.failure, stats=message.stats)
        self._rank_done(message.part_id, index, state)

    def start_afresh(self, world_size: int) -> None:
        """The engine is another one (or none: 0): nothing of the old one is fetched any more."""
        others = self._world_size > 1
        until = self._now() + (orphan_seconds(self.config.fence_seconds) if others else 0.0)
        self.holder.release_all()
        for running in list(self._running.values()):
            if running.left_until is None:
                running.left_until = until
            self._feed(running, Event.CANCEL, "reset: the engine started afresh")
            running.leave()  # nothing more is said of it to the producer
        if not others:
            self._end_left()
        self._aggregator, self._world_size = None, world_size
        if world_size:
            self._aggregator = KVOutputAggregator(
                world_size, world_size=world_size, max_age=float("inf")
            )

    def mute(self) -> None:
        """What is still open was fetched by a scheduler that is gone with its engine: its requests
        mean nothing to the next one."""
        for running in self._running.values():
            running.muted = True

    def _end_left(self) -> None:
        """Reports fetches of an engine that is no more, once no rank writes for them: our own is
        asked, and other ranks have stopped when they have all joined anew, or after a while."""
        joined = self._aggregator is not None and self.team.complete
        for running in list(self._running.values()):
            if running.left_until is None or running.record.terminal:
                continue
            others_stopped = joined or self._now() >= running.left_until
            if others_stopped and self.rank.abort_part(running.part_id).done:
                self._feed(running, Event.RANKS_DONE)

    def member_lost(self, index: int, why: str) -> None:
        """A rank's sidecar is dead or a new one; its fabric cannot write any more."""
        for running in list(self._running.values()):
            if running.record.state in (FetchState.READING, FetchState.DRAINING):
                state = PartState(done=True, failure=f"rank_lost: rank {index} {why}")
                self._rank_done(running.part_id, index, state)

    # ------------------------------------------------------------ time

    def tick(self) -> None:
        now = self._now()
        for record in self.fetches.overdue(now):
            running = self._running[record.fetch_id]
            timeout = self.config.fetch_timeout
            self._feed(running, Event.DEADLINE, f"timed_out: not done after {timeout:g} s")
            fence_at = record.deadline + self.config.fence_seconds
            if not record.terminal and not record.fenced and now >= fence_at:
                record.fenced = True
                self._background(self._fence(running))
        self._end_left()
        for running in list(self._running.values()):
            session, record = running.session, running.record
            if session is not None and record.state is FetchState.READING and not record.claimed:
                lasts = min(CLAIM_AFTER, session.welcome.lease_seconds / 10)
                if now - record.reading_since >= lasts:
                    self._feed(running, Event.LASTS)
        self._renew_due(now)
        self.holder.tick()

    def _renew_due(self, now: float) -> None:
        """Batched: what is due at a peer takes everything else that is held there with it."""
        held: dict[Session, list[Running]] = {}
        due: set[Session] = set()
        for running in self._running.values():
            if running.session is not None and running.record.claim_held:
                held.setdefault(running.session, []).append(running)
                if now >= running.renew_at:
                    due.add(running.session)
        for session in due:
            for first in range(0, len(held[session]), MAX_RENEWALS):
                batch = held[session][first : first + MAX_RENEWALS]
                for running in batch:
                    running.renew_at = now + running.lease_seconds / 3
                self._background(self._renew(session, batch))

    async def _renew(self, session: Session, batch: list[Running]) -> None:
        refs = [LeaseRef(r.record.transfer_id, r.record.fetch_id) for r in batch]
        for running, cause in zip(batch, await self._deals.renew(session, refs), strict=False):
            self._hear(running)
            if cause:
                self._feed(running, Event.LEASE_LOST, cause)

    # ------------------------------------------------------------ carrying out

    def _feed(self, running: Running, event: Event, cause: str = "") -> None:
        record = running.record
        before = record.state
        if not record.cause and cause.startswith(("peer_gone:", "timed_out:")):
            cause = f"{cause}; {self._whereabouts(running)}"
        actions = self.fetches.feed(record, event, self._now(), cause)
        if record.cause and not running.failed_in:
            waited = before is FetchState.CONNECTING and not self._open.is_set()
            running.failed_in = "quiesced" if waited else before.value
        for action in actions:
            self._act(running, action)

    def _whereabouts(self, running: Running) -> str:
        """How far it got with whom, for people."""
        state = running.record.state
        if state is FetchState.CONNECTING and not self._open.is_set():
            return "this engine is quiesced, and starts nothing until resume()"
        heard = self._heard.get(running.address)
        doing = (
            f"{_DOING.get(state, state.value)} engine {running.record.peer} at {running.address}, "
            f"which {ago(None if heard is None else self._now() - heard)}"
        )
        own = running.own
        if state is not FetchState.READING or not own.total:
            return doing
        came = f"{doing}; {min(own.done, own.total)} of {own.total} bytes came"
        if self._world_size == 1:
            return came
        late = sorted(set(range(self._world_size)) - running.shares.keys())
        return f"{came} to rank 0; not done here: rank {', '.join(map(str, late))}"

    def _hear(self, running: Running) -> None:
        """The producer's leader has answered."""
        self._heard[running.address] = self._now()
        self._heard.move_to_end(running.address)
        if len(self._heard) > MAX_HEARD:
            self._heard.popitem(last=False)

    def _act(self, running: Running, action: Action) -> None:
        record, message = running.record, running.message
        match action:
            case Action.CLAIM:
                self._spawn(running, self._claim(running))
            case Action.START_READS:
                self._start_reads(running)
            case Action.STOP_READS:
                self.rank.abort_part(running.part_id)
                for member in self.team.followers():
                    self._background(self._tell(member, AbortPart(part_id=running.part_id)))
            case Action.COMPLETE:
                self._complete(running)
            case Action.RELEASE:
                ticket = ReleaseTicket(
                    engine_id=message.engine_id,
                    host=message.host,
                    port=message.port,
                    transfer_id=record.transfer_id,
                    token=record.token,
                )
                self._background(self._deals.release(ticket, record.fetch_id))
            case Action.REPORT:
                self._report(running)

    async def _connect(self, running: Running) -> None:
        message = running.message
        try:
            while True:
                await self._open.wait()
                peer = (message.engine_id, message.host, message.port)
                known = self._met(running)
                session = await self.rank.peers.greet(*peer, message.epoch)
                if session is not known:
                    self._hear(running)
                if self._open.is_set():
                    break  # nothing is awaited from here until it has begun
        except KVAgentError as error:
            self._feed(running, Event.CONNECT_FAILED, cause_text(error))
            return
        except Exception as error:
            log.exception("fetch %s", running.record.fetch_id)
            self._feed(running, Event.CONNECT_FAILED, f"internal: {error}")
            return
        if session.epoch != message.epoch:
            cause = f"peer_restarted: engine {message.engine_id} started afresh since the ticket"
            self._feed(running, Event.CONNECT_FAILED, cause)
            return
        missing = self.team.missing() or self.team.silent_text(self._now())
        if missing:  # lost since the fetch came: its share would never be read
            self._feed(running, Event.CONNECT_FAILED, f"not_ready: {missing}")
            return
        self._connected(running, session)

    def _met(self, running: Running) -> Session | None:
        message = running.message
        return self.rank.peers.met(message.engine_id, message.host, message.port, message.epoch)

    def _connected(self, running: Running, session: Session) -> None:
        session.hold()
        running.session = session
        self._feed(running, Event.CONNECTED)

    async def _claim(self, running: Running) -> None:
        record = running.record
        if running.session is None:  # the engine started afresh before this began
            return
        claim = Claim(
            transfer_id=record.transfer_id,
            token=record.token,
            fetch_id=record.fetch_id,
            engine_id=self.rank.require_identity().info.engine_id,
            digest=self._digest(running),
            begun=record.state is not FetchState.CLAIMING,
        )
        cause, lease = await self._deals.ask(running.session, claim, running.message.epoch)
        if not cause.startswith("peer_gone:"):
            self._hear(running)
        if cause:
            self._feed(running, Event.CLAIM_REFUSED, cause)
        else:
            running.lease_seconds = lease
            running.renew_at = self._now() + lease / 3
            self._take_held(record)  # the fetch renews it from here
            missing = self.team.missing() if record.state is FetchState.CLAIMING else ""
            if missing:  # nobody would report for that rank
                self._feed(running, Event.RANK_FAILED, f"not_ready: {missing}")
            else:
                self._feed(running, Event.CLAIM_HELD)

    def _complete(self, running: Running) -> None:
        record, session = running.record, running.session
        if session is None:
            return
        completion = Completion(
            record.transfer_id, record.token, record.fetch_id, self._digest(running)
        )

        def done(cause: str) -> None:
            if not cause.startswith("peer_gone:"):
                self._hear(running)
            if cause.startswith("unknown:"):
                self._feed(running, Event.COMPLETE_UNKNOWN, cause)
            elif cause:
                self._feed(running, Event.COMPLETE_REFUSED, cause)
            else:
                self._feed(running, Event.COMPLETE_HELD)

        me = self.rank.require_identity().info.engine_id
        crowded = len(self._running) >= CROWD
        self._deals.complete(session, me, completion, running.message.epoch, done, crowded=crowded)

    def _digest(self, running: Running) -> bytes:
        message = running.message
        return ticket_digest(message.remote_blocks, message.num_tokens, message.deferred)

    def _start_reads(self, running: Running) -> None:
        message = running.message
        part = Part(
            part_id=running.part_id,
            leader=self.rank.require_identity().incarnation,
            engine_id=message.engine_id,
            host=message.host,
            port=message.port,
            epoch=message.epoch,
            num_tokens=message.num_tokens,
            remote_blocks=message.remote_blocks,
            local_blocks=message.local_blocks,
            start_token=message.start_token,
        )
        state = self.rank.start_part(part, lambda part_id, end: self._rank_done(part_id, 0, end))
        if state.done:  # refused: it will not be heard of again
            self._rank_done(part.part_id, 0, state)
        running.own = self.rank.counts.of(part.part_id) or running.own
        for member in self.team.followers():
            self._spawn(running, self._follow(running, member, part))

    async def _follow(self, running: Running, member: Member, part: Part) -> None:
        """Asks a follower until its part is done; its `PartDone` usually comes first."""
        incarnation = member.card.incarnation
        while not running.record.ranks_done:
            try:
                answer = await member.client.call(part, self.config.call_timeout)
            except KVAgentError as error:
                if member.card.incarnation != incarnation or member.lost:
                    return  # `_member_lost` has spoken for it
                log.warning("rank %d: %s", member.index, error)
                self._feed(running, Event.RANK_FAILED, f"rank_silent: rank {member.index}")
                if await member.client.is_dead():  # with it died its reads
                    failure = f"rank_lost: the sidecar of rank {member.index} is dead"
                    state = PartState(done=True, failure=failure)
                    self._rank_done(part.part_id, member.index, state)
                    return
            else:
                if isinstance(answer, PartState) and answer.done:
                    self._rank_done(part.part_id, member.index, answer)
                    return
            await asyncio.sleep(1.0)

    def _rank_done(self, part_id: str, index: int, state: PartState) -> None:
        """One rank is terminal; the aggregator says when all are."""
        running = self._parts.get(part_id)
        if running is None or running.record.ranks_done:
            return
        if running.left_until is not None:
            self._end_left()
            return
        if state.failure:
            if not running.record.cause:
                running.failed_rank = index
            self._feed(running, Event.RANK_FAILED, state.failure)
        output = KVConnectorOutput(finished_recving={part_id})
        if state.failure:
            output.failed_recving = {part_id: state.failure}
        if state.stats is not None:
            running.shares.setdefault(index, state.stats)
        assert self._aggregator is not None  # or it was left behind
        reports = [RankReport() for _ in range(self._world_size)]
        reports[index].kv_connector_output = output
        combined = self._aggregator.aggregate(reports)
        if combined is None or combined.kv_connector_output is None:
            return
        done = combined.kv_connector_output
        if part_id in (done.finished_recving or ()):
            self._feed(running, Event.RANKS_DONE, done.failed_recving.get(part_id, ""))

    def _report(self, running: Running) -> None:
        record, now = running.record, self._now()
        del self._running[record.fetch_id]
        del self._parts[running.part_id]
        self.fetches.remove(record)
        self._take_held(record)
        self._remember_quiesced(record)
        if self._aggregator is not None:
            self._aggregator.forget(running.part_id)
        current = asyncio.current_task()
        for task in running.tasks:
            if task is not current:
                task.cancel()
        running.leave()
        stats = None
        if not record.cause:
            total = ReadStats()
            for share in running.shares.values():
                total = total.merge(share)
            stats = FetchStats(
                bytes=total.nbytes,
                descriptors=total.descriptors,
                staged=total.staged,
                seconds=now - record.started,
                wait=record.reading_since - record.started + total.wait,
                post=total.post,
                wire=total.wire,
                validate=now - record.validating_since,
            )
            self.bytes_received += stats.bytes
        blocks: set[int] = set()
        if record.cause:
            for group in unpack_blocks(running.local_blocks):
                blocks |= set(group.tolist())
        if not running.muted:
            self.outbox.received(record.request_id, record.cause, stats, blocks)
        # After the report, which somebody waits for.
        end = self._end_of(running, stats, now)
        asyncio.get_running_loop().call_soon(self.watch.fetch_ended, end)

    def _remember_quiesced(self, record: FetchRecord) -> None:
        """A ticket that is still good: what is read of it before its claim is granted may be of the
        time in which the producer was quiesced."""
        self._quiesced.pop(record.transfer_id, None)
        if record.cause.startswith("quiesced:"):
            self._quiesced[record.transfer_id] = record.fetch_id
            if len(self._quiesced) > MAX_QUIESCED:
                self._quiesced.popitem(last=False)

    def _end_of(self, running: Running, stats: FetchStats | None, now: float) -> FetchEnd:
        record, message = running.record, running.message
        return FetchEnd(
            request_id=record.request_id,
            transfer_id=record.transfer_id,
            fetch_id=record.fetch_id,
            peer=record.peer,
            address=running.address,
            num_tokens=message.num_tokens - message.start_token,
            seconds=now - record.started,
            cause=record.cause,
            stage=running.failed_in,
            rank=running.failed_rank,
            nbytes=stats.bytes if stats is not None else running.own.done,
            wanted=stats.bytes if stats is not None else running.own.total,
            stats=stats,
            traceparent=message.traceparent,
        )

    def transfers(self, limit: int) -> list[Transfer]:
        """Those under way, the oldest first."""
        return [
            Transfer(running.record, running.message, running.own)
            for running in islice(self._running.values(), limit)
        ]

    async def _fence(self, running: Running) -> None:
        part_id = running.part_id
        for member in self.team.followers():
            self._background(self._tell(member, AbortPart(part_id=part_id, fence=True)))
        if not self.rank.abort_part(part_id).done:
            await self.rank.fence(part_id)

    async def _tell(self, member: Member, message: AbortPart | Drop) -> None:
        try:
            answer: Peer = await member.client.call(message, self.config.call_timeout)
        except KVAgentError as error:
            log.warning("rank %d: %s", member.index, error)
            return
        if isinstance(message, AbortPart) and isinstance(answer, PartState) and answer.done:
            self._rank_done(message.part_id, member.index, answer)

    # ------------------------------------------------------------ inside

    def _now(self) -> float:
        return time.monotonic()

    def _spawn(self, running: Running, work: Awaitable[None]) -> None:
        """A task that ends with the fetch."""
        task = asyncio.ensure_future(work)
        running.tasks.add(task)
        task.add_done_callback(running.tasks.discard)
        self._keep(task)

    def _background(self, work: Awaitable[None]) -> None:
        self._keep(asyncio.ensure_future(work))

    def _keep(self, task: asyncio.Task[None]) -> None:
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        await self.holder.close()
        self._deals.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
