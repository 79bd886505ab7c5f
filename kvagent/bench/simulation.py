"""Many engines in simulated time: what control costs per request, and what one leader can sustain.

The core is the real one: `LeaseTable`, `FetchTable`, `Ledger`, `KVOutputAggregator` and
`TransferTopology` of every engine decide, and every message is encoded, counted and decoded by the
real codecs. What is simulated is time: a heap of events, a latency for each message, and reads that
last as long as they are said to. Sockets, event loops and kernels are not in it, so "sustains" is
what the core and the codecs leave room for.

Half of the engines offer, the other half fetch, each request between two engines drawn at random.
Some are cancelled, some tickets are never used and some reads are slow enough for renewals.
"""

from __future__ import annotations

import heapq
import itertools
import random
import secrets
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from kvagent.bench.contact import BLOCKS, RANKS, Contact, model_layout, topologies
from kvagent.core.aggregator import KVOutputAggregator
from kvagent.core.fetch import Action, Event, FetchState, FetchTable
from kvagent.core.fetch import Fetch as FetchRecord
from kvagent.core.lease import LeaseTable, ticket_digest
from kvagent.core.lease import Verdict as LeaseVerdict
from kvagent.core.ledger import Ledger, written_blocks
from kvagent.core.output import KVConnectorOutput
from kvagent.core.stats import FetchStats, ReadStats
from kvagent.wire.codec import pack_blocks, unpack_blocks
from kvagent.wire.local import LENGTH
from kvagent.wire.messages import (
    AbortPart,
    Ack,
    Cancel,
    Claim,
    Complete,
    Fetch,
    LeaseRef,
    Local,
    Offer,
    Ok,
    Part,
    PartDone,
    PartState,
    Peer,
    Release,
    Renew,
    Renewed,
    Report,
    Verdict,
    decode_question,
    local_codec,
    peer_codec,
)
from kvagent.wire.peer import HEAD

__all__ = ["Outcome", "Simulation"]

T = TypeVar("T")

LATENCY = 100e-6
"""Seconds that a message takes, on average."""
ROUTER = 2e-3
TICK = 0.25
ASK_AGAIN = 1.0
LEASE_SECONDS = 30.0
REQUEST_BLOCKS = 128
RATE = 10.0
"""Requests per second and fetching engine."""
SLOW, CANCELLED, LOST = 0.02, 0.01, 0.005
"""Shares of the requests."""

SCHEDULER = "scheduler"


@dataclass
class Outcome:
    """`cpu`: seconds by who spends them; `messages` and `bytes`: by kind of message."""

    engines: int
    requests: int
    good: int = 0
    failed: Counter[str] = field(default_factory=Counter)
    simulated: float = 0.0
    contacts: int = 0
    messages: Counter[str] = field(default_factory=Counter)
    bytes: Counter[str] = field(default_factory=Counter)
    cpu: Counter[str] = field(default_factory=Counter)

    def summary(self) -> dict[str, float]:
        """Per request; contacts are counted apart, see `contact`."""
        each = 1 / self.requests
        lender, borrower = self.cpu["lender"] * each, self.cpu["borrower"] * each
        return {
            "engines": self.engines,
            "requests": self.requests,
            "good": self.good,
            "simulated_seconds": self.simulated,
            "contacts": self.contacts,
            "messages": sum(self.messages.values()) * each,
            "bytes": sum(self.bytes.values()) * each,
            "lender_us": lender * 1e6,
            "borrower_us": borrower * 1e6,
            "follower_us": self.cpu["follower"] * each * 1e6,
            "sweep_us": self.cpu["sweep"] * 1e6 / max(1, self.engines * self.simulated),
            "offers_per_second": 1 / lender,
            "fetches_per_second": 1 / borrower,
        }


class Producer:
    """The leader of an engine that offers."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.ledger = Ledger()
        self.ledger.know(model_layout(0).groups)
        self.leases = LeaseTable(lease_seconds=LEASE_SECONDS, ledger=self.ledger)
        self.free = deque(range(BLOCKS))
        self.owned: dict[str, list[int]] = {}
        self.seq = 0


@dataclass
class Running:
    """A fetch as its leader knows it."""

    record: FetchRecord
    message: Fetch
    producer: Producer
    read_seconds: float
    part_id: str
    renew_at: float = float("inf")
    stopped: bool = False


class Consumer:
    """The leader of an engine that fetches; rank 0 is its own, the others are followers."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.ledger = Ledger()
        self.ledger.know(model_layout(0).groups)
        self.fetches = FetchTable(self.ledger)
        self.aggregator = KVOutputAggregator(RANKS, world_size=RANKS, max_age=float("inf"))
        self.topologies = topologies(name)
        self.known: set[str] = set()
        self.running: dict[str, Running] = {}
        self.parts: dict[str, Running] = {}
        self.free = deque(range(BLOCKS))
        self.owned: dict[str, list[int]] = {}
        self.seq = 0


@dataclass(slots=True)
class RankReport:
    kv_connector_output: KVConnectorOutput | None = None


class Simulation:
    """`run()` once."""

    def __init__(
        self,
        engines: int,
        requests: int,
        *,
        seed: int = 0,
        tick: Callable[[int], None] = lambda _: None,
    ) -> None:
        """`tick` is told now and then how many requests have ended."""
        self.outcome = Outcome(engines, requests)
        self._random = random.Random(seed)
        self._tick = tick
        self._now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._producers = [Producer(f"prefill-{i}") for i in range(max(1, engines // 2))]
        self._consumers = [Consumer(f"decode-{i}") for i in range(max(1, engines - engines // 2))]
        self._contact = Contact()
        self._ended = 0
        self._lost: set[str] = set()

    def run(self) -> Outcome:
        self._at(0.0, partial(self._arrive, 0))
        self._at(TICK, self._sweep)
        while self._events:
            self._now, _, event = heapq.heappop(self._events)
            event()
        self.outcome.simulated = self._now
        return self.outcome

    # ------------------------------------------------------------ the machinery

    def _at(self, delay: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self._now + delay, next(self._numbers), event))

    def _spend(self, who: str, call: Callable[..., T], *arguments: Any) -> T:
        """Calls it; the time is on `who`."""
        begin = time.perf_counter()
        result = call(*arguments)
        self.outcome.cpu[who] += time.perf_counter() - begin
        return result

    def _count(self, message: Any, nbytes: int) -> None:
        kind = str(message.__struct_config__.tag)
        self.outcome.messages[kind] += 1
        self.outcome.bytes[kind] += nbytes

    def _send(
        self, sender: str, receiver: str, message: Peer, then: Callable[[Any], None], ask: bool
    ) -> None:
        """A message between sidecars; `then` gets what the receiver decodes."""
        data = self._spend(sender, peer_codec.encode, message)
        self._count(message, len(data) + HEAD.size)
        decode = decode_question if ask else peer_codec.decode

        def arrive() -> None:
            then(self._spend(receiver, decode, data))

        self._at(self._random.expovariate(1 / LATENCY), arrive)

    def _ask(
        self,
        sender: str,
        receiver: str,
        question: Peer,
        handle: Callable[[Any], Peer],
        then: Callable[[Any], None],
    ) -> None:
        """A call: `handle` answers at the receiver, `then` gets the answer."""

        def answer(message: Any) -> None:
            self._send(receiver, sender, handle(message), then, ask=False)

        self._send(sender, receiver, question, answer, ask=True)

    def _local(self, leader: str, message: Local, *, up: bool) -> Local:
        """Between a scheduler and its leader, over the unix socket; `up` is to the leader."""
        sender, receiver = (SCHEDULER, leader) if up else (leader, SCHEDULER)
        data = self._spend(sender, local_codec.encode, message)
        self._count(message, len(data) + LENGTH.size)
        return self._spend(receiver, local_codec.decode, data)

    # ------------------------------------------------------------ a request, at the schedulers

    def _arrive(self, number: int) -> None:
        if number + 1 < self.outcome.requests:
            gap = self._random.expovariate(RATE * len(self._consumers))
            self._at(gap, partial(self._arrive, number + 1))
        self._start(number)

    def _start(self, number: int) -> None:
        producer, consumer = (
            self._random.choice(self._producers),
            self._random.choice(self._consumers),
        )
        if min(len(producer.free), len(consumer.free)) < REQUEST_BLOCKS:
            self._at(0.1, partial(self._start, number))  # it waits for room, as in a scheduler
            return
        request_id = f"request-{number}"
        blocks = _take(producer, request_id)
        transfer_id, token = f"{self._random.getrandbits(128):032x}", secrets.token_bytes(16)
        offer = Offer(
            request_id=request_id,
            transfer_id=transfer_id,
            token=token,
            blocks=self._spend(SCHEDULER, pack_blocks, blocks),
            num_tokens=REQUEST_BLOCKS * 16,
        )
        self._lend(producer, offer)
        if self._random.random() < LOST:
            self._lost.add(request_id)  # its lease runs out
            return
        self._at(ROUTER, partial(self._fetch, producer, consumer, offer))

    def _lend(self, producer: Producer, offer: Offer) -> None:
        message = self._local("lender", offer, up=True)
        assert isinstance(message, Offer)

        def lend() -> None:
            producer.leases.offer(
                self._now,
                message.transfer_id,
                message.token,
                message.request_id,
                message.blocks,
                message.num_tokens,
            )

        self._spend("lender", lend)

    def _fetch(self, producer: Producer, consumer: Consumer, offer: Offer) -> None:
        blocks = _take(consumer, offer.request_id)
        fetch = Fetch(
            request_id=offer.request_id,
            engine_id=producer.name,
            host="10.0.0.1",
            port=7100,
            epoch="0123456789abcdef.1",
            transfer_id=offer.transfer_id,
            token=offer.token,
            num_tokens=offer.num_tokens,
            remote_blocks=offer.blocks,
            local_blocks=self._spend(SCHEDULER, pack_blocks, blocks),
        )
        message = self._local("borrower", fetch, up=True)
        assert isinstance(message, Fetch)
        running = self._spend("borrower", self._reserve, producer, consumer, message)
        if self._random.random() < CANCELLED:
            self._at(self._random.uniform(0, 0.3), partial(self._cancel, consumer, running))
        if producer.name in consumer.known:
            self._feed(consumer, running, Event.CONNECTED)
        else:
            consumer.known.add(producer.name)
            self.outcome.contacts += 1
            self._spend("contact", self._contact.meet, consumer.topologies, producer.name)
            self._at(4 * LATENCY, partial(self._feed, consumer, running, Event.CONNECTED))

    def _reserve(self, producer: Producer, consumer: Consumer, message: Fetch) -> Running:
        slow = self._random.random() < SLOW
        number = next(self._numbers)
        record = FetchRecord(
            fetch_id=f"{number:032x}",
            request_id=message.request_id,
            transfer_id=message.transfer_id,
            token=message.token,
            peer=message.engine_id,
            started=self._now,
            deadline=self._now + 60.0,
        )
        running = Running(
            record,
            message,
            producer,
            self._random.uniform(10, 25) if slow else self._random.uniform(0.02, 0.5),
            f"{number:031x}p",
        )
        assert consumer.fetches.add(record)
        tables = unpack_blocks(message.local_blocks)
        layouts = [model_layout(rank) for rank in range(RANKS)]
        written = written_blocks(layouts, tables, message.start_token, message.num_tokens)
        consumer.fetches.reserve(record, written)
        consumer.running[record.fetch_id] = running
        consumer.parts[running.part_id] = running
        return running

    def _cancel(self, consumer: Consumer, running: Running) -> None:
        if not running.record.terminal:
            self._local("borrower", Cancel(request_id=running.record.request_id), up=True)
            self._feed(consumer, running, Event.CANCEL, "cancelled: by the engine")

    # ------------------------------------------------------------ a fetch, at its leader

    def _feed(self, consumer: Consumer, running: Running, event: Event, cause: str = "") -> None:
        feed = consumer.fetches.feed
        for action in self._spend("borrower", feed, running.record, event, self._now, cause):
            self._act(consumer, running, action)

    def _act(self, consumer: Consumer, running: Running, action: Action) -> None:
        record, leases = running.record, running.producer.leases
        match action:
            case Action.CLAIM:
                digest = self._spend(
                    "borrower",
                    ticket_digest,
                    running.message.remote_blocks,
                    running.message.num_tokens,
                )
                claim = Claim(
                    transfer_id=record.transfer_id,
                    token=record.token,
                    fetch_id=record.fetch_id,
                    engine_id=consumer.name,
                    digest=digest,
                )
                self._question(consumer, running, claim, Event.CLAIM_HELD, Event.CLAIM_REFUSED)
            case Action.START_READS:
                self._start_reads(consumer, running)
            case Action.STOP_READS:
                running.stopped = True
                for _ in range(1, RANKS):
                    stop = AbortPart(part_id=running.part_id)
                    self._ask("borrower", "follower", stop, _going_on, lambda _: None)
            case Action.COMPLETE:
                complete = Complete(
                    transfer_id=record.transfer_id, token=record.token, fetch_id=record.fetch_id
                )
                self._question(
                    consumer, running, complete, Event.COMPLETE_HELD, Event.COMPLETE_REFUSED
                )
            case Action.RELEASE:
                release = Release(
                    transfer_id=record.transfer_id, token=record.token, fetch_id=record.fetch_id
                )

                def released(message: Release) -> Peer:
                    verdict = self._spend(
                        "lender",
                        leases.release,
                        self._now,
                        message.transfer_id,
                        message.token,
                        message.fetch_id,
                    )
                    self._publish(running.producer)
                    return _verdict(verdict)

                self._ask("borrower", "lender", release, released, lambda _: None)
            case Action.REPORT:
                self._report(consumer, running)

    def _question(
        self,
        consumer: Consumer,
        running: Running,
        question: Claim | Complete,
        held: Event,
        refused: Event,
    ) -> None:
        leases = running.producer.leases

        def handle(message: Claim | Complete) -> Peer:
            verdict: LeaseVerdict | None
            if isinstance(message, Claim):
                verdict = self._spend(
                    "lender",
                    leases.claim,
                    self._now,
                    message.transfer_id,
                    message.token,
                    message.fetch_id,
                    message.digest,
                    message.engine_id,
                )
            else:
                verdict = self._spend(
                    "lender",
                    leases.complete,
                    self._now,
                    message.transfer_id,
                    message.token,
                    message.fetch_id,
                )
                self._publish(running.producer)
            assert verdict is not None  # offers come first here
            return _verdict(verdict)

        def then(answer: Verdict) -> None:
            if answer.verdict == LeaseVerdict.HELD.value:
                running.renew_at = self._now + answer.lease_seconds / 3
                self._feed(consumer, running, held)
            else:
                self._feed(consumer, running, refused, f"{answer.verdict}: said the producer")

        self._ask("borrower", "lender", question, handle, then)

    def _start_reads(self, consumer: Consumer, running: Running) -> None:
        message = running.message
        part = Part(
            part_id=running.part_id,
            leader="0123456789abcdef0123456789abcdef",
            engine_id=message.engine_id,
            host=message.host,
            port=message.port,
            epoch=message.epoch,
            num_tokens=message.num_tokens,
            remote_blocks=message.remote_blocks,
            local_blocks=message.local_blocks,
            start_token=message.start_token,
        )
        for rank in range(RANKS):
            seconds = running.read_seconds * self._random.uniform(0.8, 1.2)
            self._at(seconds, partial(self._read, consumer, running, rank))
            if rank:
                self._hand_out(running, part)

    def _hand_out(self, running: Running, part: Part) -> None:
        """To a follower; asked again every second until all ranks are done."""
        if not running.record.ranks_done:
            self._ask("borrower", "follower", part, _going_on, lambda _: None)
            self._at(ASK_AGAIN, partial(self._hand_out, running, part))

    def _read(self, consumer: Consumer, running: Running, rank: int) -> None:
        """A rank has read its share, or as much as it did before it was stopped."""
        failure = "cancelled" if running.stopped else ""
        stats = None if failure else ReadStats(nbytes=1 << 22, descriptors=512, wire=0.1)
        if rank == 0:
            self._rank_done(consumer, running, rank, failure)
            return
        done = PartDone(
            engine_id=consumer.name,
            tp_rank=rank,
            pp_rank=0,
            part_id=running.part_id,
            failure=failure,
            stats=stats,
        )

        def handle(message: PartDone) -> Peer:
            self._rank_done(consumer, running, message.tp_rank, message.failure)
            return Ok()

        self._ask("follower", "borrower", done, handle, lambda _: None)

    def _rank_done(self, consumer: Consumer, running: Running, rank: int, failure: str) -> None:
        if running.record.ranks_done:
            return
        if failure:
            self._feed(consumer, running, Event.RANK_FAILED, failure)
        done = self._spend("borrower", _aggregate, consumer, running.part_id, rank, failure)
        if done is not None and running.part_id in (done.finished_recving or ()):
            cause = done.failed_recving.get(running.part_id, "")
            self._feed(consumer, running, Event.RANKS_DONE, cause)

    def _report(self, consumer: Consumer, running: Running) -> None:
        record = running.record
        self._spend("borrower", _forget, consumer, running)
        self.outcome.good += record.state is FetchState.DONE
        if record.cause:
            self.outcome.failed[record.cause.split(":")[0]] += 1
        output = KVConnectorOutput(finished_recving={record.request_id})
        if record.cause:
            output.failed_recving = {record.request_id: record.cause}
        else:
            stats = FetchStats(
                bytes=RANKS << 22,
                descriptors=512 * RANKS,
                staged=0,
                seconds=self._now - record.started,
                wait=0.0,
                post=0.0,
                wire=running.read_seconds,
                validate=0.0,
            )
            output.kv_connector_stats = {"fetches": {record.request_id: stats}}
        self._deliver(consumer, "borrower", output)
        _give_back(consumer, record.request_id)
        self._end()

    # ------------------------------------------------------------ reports

    def _publish(self, producer: Producer) -> None:
        """What was offered and is free again goes to the producer's scheduler."""
        finished = self._spend("lender", producer.leases.take_finished)
        if finished:
            self._deliver(producer, "lender", KVConnectorOutput(finished_sending=finished))
            for request_id in finished:
                _give_back(producer, request_id)
                if request_id in self._lost:
                    self._lost.discard(request_id)
                    self.outcome.failed["never fetched"] += 1
                    self._end()

    def _deliver(self, engine: Producer | Consumer, leader: str, output: KVConnectorOutput) -> None:
        engine.seq += 1
        self._local(leader, Report(seq=engine.seq, output=output), up=False)
        self._local(leader, Ack(seq=engine.seq), up=True)

    def _end(self) -> None:
        self._ended += 1
        if self._ended % 500 == 0 or self._ended == self.outcome.requests:
            self._tick(self._ended)

    # ------------------------------------------------------------ time

    def _sweep(self) -> None:
        """Every leader looks for what ran out, and renews."""
        for producer in self._producers:
            self._spend("sweep", producer.leases.sweep, self._now)
            self._publish(producer)
        for consumer in self._consumers:
            self._spend("sweep", consumer.fetches.overdue, self._now)
            self._renew(consumer)
        if self._ended < self.outcome.requests:
            self._at(TICK, self._sweep)

    def _renew(self, consumer: Consumer) -> None:
        held: dict[str, list[Running]] = {}
        due: dict[str, Producer] = {}
        for running in consumer.running.values():
            if running.record.claim_held:
                held.setdefault(running.producer.name, []).append(running)
                if self._now >= running.renew_at:
                    due[running.producer.name] = running.producer
        for name, producer in due.items():
            refs = []
            for running in held[name]:
                running.renew_at = self._now + LEASE_SECONDS / 3
                refs.append(LeaseRef(running.record.transfer_id, running.record.fetch_id))

            def renewed(message: Renew, leases: LeaseTable = producer.leases) -> Peer:
                return Renewed(
                    verdicts=tuple(
                        self._spend(
                            "lender", leases.renew, self._now, ref.transfer_id, ref.fetch_id
                        ).value
                        for ref in message.leases
                    )
                )

            question = Renew(leases=tuple(refs))
            self._ask("borrower", "lender", question, renewed, lambda _: None)


def _take(engine: Producer | Consumer, request_id: str) -> list[int]:
    blocks = [engine.free.popleft() for _ in range(REQUEST_BLOCKS)]
    engine.owned[request_id] = blocks
    return blocks


def _give_back(engine: Producer | Consumer, request_id: str) -> None:
    engine.free.extend(engine.owned.pop(request_id))


def _going_on(_: Peer) -> Peer:
    return PartState(done=False)


def _verdict(verdict: LeaseVerdict) -> Verdict:
    return Verdict(verdict=verdict.value, epoch="0123456789abcdef.1", lease_seconds=LEASE_SECONDS)


def _aggregate(
    consumer: Consumer, part_id: str, rank: int, failure: str
) -> KVConnectorOutput | None:
    output = KVConnectorOutput(finished_recving={part_id})
    if failure:
        output.failed_recving = {part_id: failure}
    reports = [RankReport() for _ in range(RANKS)]
    reports[rank].kv_connector_output = output
    combined = consumer.aggregator.aggregate(reports)
    return None if combined is None else combined.kv_connector_output


def _forget(consumer: Consumer, running: Running) -> None:
    consumer.fetches.remove(running.record)
    consumer.aggregator.forget(running.part_id)
    del consumer.running[running.record.fetch_id]
    del consumer.parts[running.part_id]
