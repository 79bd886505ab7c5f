"""Many engines in simulated time: what control costs per request, and what one leader can sustain.

The core is the real one: `LeaseTable`, `FetchTable`, `Ledger`, `KVOutputAggregator` and
`TransferTopology` of every engine decide, and every message is encoded, counted and decoded by the
real codecs. What is simulated is time: a heap of events, a latency for each message, and reads that
last as long as they are said to. Sockets, event loops and kernels are not in it, so "sustains" is
what the core and the codecs leave room for.

Half of the engines offer, the other half fetch, each request between two engines drawn at random.
Some are cancelled, some tickets are never used and some reads are slow enough for a claim and for
renewals; the others only complete.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from functools import partial

from kvagent.bench.clockwork import LATENCY, SCHEDULER, Clockwork, Outcome
from kvagent.bench.contact import RANKS, Contact, model_layout
from kvagent.bench.players import (
    LEASE_SECONDS,
    REQUEST_BLOCKS,
    Consumer,
    Nature,
    Producer,
    Running,
    aggregate,
    forget,
    give_back,
    take,
)
from kvagent.core.fetch import Action, Event, FetchState
from kvagent.core.fetch import Fetch as FetchRecord
from kvagent.core.lease import LeaseTable, ticket_digest
from kvagent.core.lease import Verdict as LeaseVerdict
from kvagent.core.ledger import written_blocks
from kvagent.core.output import KVConnectorOutput
from kvagent.core.stats import FetchStats, ReadStats
from kvagent.wire.codec import pack_blocks, unpack_blocks
from kvagent.wire.messages import (
    AbortPart,
    Ack,
    Cancel,
    Claim,
    Complete,
    Completed,
    Completion,
    Fetch,
    LeaseRef,
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
)

__all__ = ["Simulation"]

ROUTER = 2e-3
"""Seconds that a ticket is on its way."""
TICK = 0.25
CLAIM_AFTER = 1.0
"""As in `kvagent.agent.borrower`; the leases here are long."""
ASK_AGAIN = 1.0
RATE = 10.0
"""Requests per second and fetching engine."""


class Simulation(Clockwork):
    """`run()` once."""

    def __init__(
        self,
        engines: int,
        requests: int,
        *,
        circle: int = 0,
        seed: int = 0,
        tick: Callable[[int], None] = lambda _: None,
    ) -> None:
        """Engines talk within circles of so many, 0: with all. `tick` is told now and then how many
        requests have ended."""
        super().__init__(Outcome(engines, requests), seed)
        self._seed = seed
        self._tick = tick
        self._producers = [Producer(f"prefill-{i}") for i in range(max(1, engines // 2))]
        self._consumers = [Consumer(f"decode-{i}") for i in range(max(1, engines - engines // 2))]
        self._half = max(1, (circle or engines) // 2)
        self._contact = Contact()
        self._ended = 0
        self._lost: set[str] = set()
        self._completing: dict[tuple[str, str], list[Running]] = {}
        """By consumer and producer: what one message will ask for."""

    def run(self) -> Outcome:
        self.at(0.0, partial(self._arrive, 0))
        self.at(TICK, self._sweep)
        return super().run()

    # ------------------------------------------------------------ a request, at the schedulers

    def _arrive(self, number: int) -> None:
        if number + 1 < self.outcome.requests:
            gap = self.random.expovariate(RATE * len(self._consumers))
            self.at(gap, partial(self._arrive, number + 1))
        self._start(number)

    def _start(self, number: int) -> None:
        there = self.random.randrange(len(self._consumers))
        here = there // self._half * self._half + self.random.randrange(self._half)
        consumer = self._consumers[there]
        producer = self._producers[min(here, len(self._producers) - 1)]
        if min(len(producer.free), len(consumer.free)) < REQUEST_BLOCKS:
            self.at(0.1, partial(self._start, number))  # it waits for room, as in a scheduler
            return
        request_id, nature = f"request-{number}", Nature(number, self._seed)
        blocks = take(producer, request_id)
        transfer_id, token = f"{self.random.getrandbits(128):032x}", secrets.token_bytes(16)
        offer = Offer(
            request_id=request_id,
            transfer_id=transfer_id,
            token=token,
            blocks=self.spend(SCHEDULER, pack_blocks, blocks),
            num_tokens=REQUEST_BLOCKS * 16,
        )
        self._lend(producer, offer)
        if nature.lost:
            self._lost.add(request_id)  # its lease runs out
            return
        local = take(consumer, request_id)
        self.at(ROUTER, partial(self._fetch, producer, consumer, offer, local, nature))

    def _lend(self, producer: Producer, offer: Offer) -> None:
        message = self.local("lender", offer, up=True)
        assert isinstance(message, Offer)

        def lend() -> None:
            producer.leases.offer(
                self.now,
                message.transfer_id,
                message.token,
                message.request_id,
                message.blocks,
                message.num_tokens,
            )

        self.spend("lender", lend)

    def _fetch(
        self,
        producer: Producer,
        consumer: Consumer,
        offer: Offer,
        blocks: list[int],
        nature: Nature,
    ) -> None:
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
            local_blocks=self.spend(SCHEDULER, pack_blocks, blocks),
        )
        message = self.local("borrower", fetch, up=True)
        assert isinstance(message, Fetch)
        reserve = self._reserve
        running = self.spend("borrower", reserve, producer, consumer, message, nature)
        if nature.cancel_after is not None:
            self.at(nature.cancel_after, partial(self._cancel, consumer, running))
        if producer.name in consumer.known:
            self._feed(consumer, running, Event.CONNECTED)
        else:
            consumer.known.add(producer.name)
            self.outcome.contacts += 1
            self.spend("contact", self._contact.meet, consumer.topologies, producer.name)
            self.at(4 * LATENCY, partial(self._feed, consumer, running, Event.CONNECTED))

    def _reserve(
        self, producer: Producer, consumer: Consumer, message: Fetch, nature: Nature
    ) -> Running:
        number = next(self.numbers)
        record = FetchRecord(
            fetch_id=f"{number:032x}",
            request_id=message.request_id,
            transfer_id=message.transfer_id,
            token=message.token,
            peer=message.engine_id,
            started=self.now,
            deadline=self.now + 60.0,
        )
        running = Running(
            record,
            message,
            producer,
            nature.reads,
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
            self.local("borrower", Cancel(request_id=running.record.request_id), up=True)
            self._feed(consumer, running, Event.CANCEL, "cancelled: by the engine")

    # ------------------------------------------------------------ a fetch, at its leader

    def _feed(self, consumer: Consumer, running: Running, event: Event, cause: str = "") -> None:
        feed = consumer.fetches.feed
        for action in self.spend("borrower", feed, running.record, event, self.now, cause):
            self._act(consumer, running, action)

    def _act(self, consumer: Consumer, running: Running, action: Action) -> None:
        record, leases = running.record, running.producer.leases
        match action:
            case Action.CLAIM:
                self._claim(consumer, running)
            case Action.START_READS:
                self._start_reads(consumer, running)
            case Action.STOP_READS:
                running.stopped = True
                for _ in range(1, RANKS):
                    stop = AbortPart(part_id=running.part_id)
                    self.ask("borrower", "follower", stop, _going_on, lambda _: None)
            case Action.COMPLETE:
                key = (consumer.name, running.producer.name)
                asked = self._completing.setdefault(key, [])
                asked.append(running)
                if len(asked) == 1:  # what ends at the same time goes with it
                    self.at(0.0, partial(self._complete, consumer, running.producer))
            case Action.RELEASE:
                release = Release(
                    transfer_id=record.transfer_id, token=record.token, fetch_id=record.fetch_id
                )

                def released(message: Release) -> Peer:
                    verdict = self.spend(
                        "lender",
                        leases.release,
                        self.now,
                        message.transfer_id,
                        message.token,
                        message.fetch_id,
                    )
                    self._publish(running.producer)
                    return _verdict(verdict)

                self.ask("borrower", "lender", release, released, lambda _: None)
            case Action.REPORT:
                self._report(consumer, running)

    def _digest(self, running: Running) -> bytes:
        message = running.message
        return self.spend("borrower", ticket_digest, message.remote_blocks, message.num_tokens)

    def _claim(self, consumer: Consumer, running: Running) -> None:
        record, leases = running.record, running.producer.leases
        claim = Claim(
            transfer_id=record.transfer_id,
            token=record.token,
            fetch_id=record.fetch_id,
            engine_id=consumer.name,
            digest=self._digest(running),
        )

        def handle(message: Claim) -> Peer:
            verdict: LeaseVerdict | None = self.spend(
                "lender",
                leases.claim,
                self.now,
                message.transfer_id,
                message.token,
                message.fetch_id,
                message.digest,
                message.engine_id,
            )
            assert verdict is not None  # offers come first here
            return _verdict(verdict)

        def then(answer: Verdict) -> None:
            if answer.verdict == LeaseVerdict.HELD.value:
                running.renew_at = self.now + answer.lease_seconds / 3
                self._feed(consumer, running, Event.CLAIM_HELD)
            else:
                cause = f"{answer.verdict}: said the producer"
                self._feed(consumer, running, Event.CLAIM_REFUSED, cause)

        self.ask("borrower", "lender", claim, handle, then)

    def _complete(self, consumer: Consumer, producer: Producer) -> None:
        batch = self._completing.pop((consumer.name, producer.name))
        complete = Complete(
            engine_id=consumer.name,
            leases=tuple(
                Completion(
                    running.record.transfer_id,
                    running.record.token,
                    running.record.fetch_id,
                    self._digest(running),
                )
                for running in batch
            ),
        )

        def handle(message: Complete) -> Peer:
            verdicts = tuple(
                self.spend(
                    "lender",
                    producer.leases.complete,
                    self.now,
                    each.transfer_id,
                    each.token,
                    each.fetch_id,
                    each.digest,
                    message.engine_id,
                ).value
                for each in message.leases
            )
            self._publish(producer)
            return Completed(epoch="0123456789abcdef.1", verdicts=verdicts)

        def then(answer: Completed) -> None:
            for running, verdict in zip(batch, answer.verdicts, strict=True):
                if verdict == LeaseVerdict.HELD.value:
                    self._feed(consumer, running, Event.COMPLETE_HELD)
                else:
                    cause = f"{verdict}: said the producer"
                    self._feed(consumer, running, Event.COMPLETE_REFUSED, cause)

        self.ask("borrower", "lender", complete, handle, then)

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
            self.at(running.reads[rank], partial(self._read, consumer, running, rank))
            if rank:
                self._hand_out(running, part)

    def _hand_out(self, running: Running, part: Part) -> None:
        """To a follower; asked again every second until all ranks are done."""
        if not running.record.ranks_done:
            self.ask("borrower", "follower", part, _going_on, lambda _: None)
            self.at(ASK_AGAIN, partial(self._hand_out, running, part))

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

        self.ask("follower", "borrower", done, handle, lambda _: None)

    def _rank_done(self, consumer: Consumer, running: Running, rank: int, failure: str) -> None:
        if running.record.ranks_done:
            return
        if failure:
            self._feed(consumer, running, Event.RANK_FAILED, failure)
        done = self.spend("borrower", aggregate, consumer, running.part_id, rank, failure)
        if done is not None and running.part_id in (done.finished_recving or ()):
            cause = done.failed_recving.get(running.part_id, "")
            self._feed(consumer, running, Event.RANKS_DONE, cause)

    def _report(self, consumer: Consumer, running: Running) -> None:
        record = running.record
        self.spend("borrower", forget, consumer, running)
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
                seconds=self.now - record.started,
                wait=0.0,
                post=0.0,
                wire=max(running.reads),
                validate=0.0,
            )
            output.kv_connector_stats = {"fetches": {record.request_id: stats}}
        self._deliver(consumer, "borrower", output)
        give_back(consumer, record.request_id)
        self._end()

    # ------------------------------------------------------------ reports

    def _publish(self, producer: Producer) -> None:
        """What was offered and is free again goes to the producer's scheduler."""
        finished = self.spend("lender", producer.leases.take_finished)
        if finished:
            self._deliver(producer, "lender", KVConnectorOutput(finished_sending=finished))
            for request_id in finished:
                give_back(producer, request_id)
                if request_id in self._lost:
                    self._lost.discard(request_id)
                    self.outcome.failed["never fetched"] += 1
                    self._end()

    def _deliver(self, engine: Producer | Consumer, leader: str, output: KVConnectorOutput) -> None:
        engine.seq += 1
        self.local(leader, Report(seq=engine.seq, output=output), up=False)
        self.local(leader, Ack(seq=engine.seq), up=True)

    def _end(self) -> None:
        self._ended += 1
        if self._ended % 500 == 0 or self._ended == self.outcome.requests:
            self._tick(self._ended)

    # ------------------------------------------------------------ time

    def _sweep(self) -> None:
        """Every leader looks for what ran out, and renews."""
        for producer in self._producers:
            self.spend("sweep", producer.leases.sweep, self.now)
            self._publish(producer)
        for consumer in self._consumers:
            self.spend("sweep", consumer.fetches.overdue, self.now)
            for running in self.spend("sweep", self._lasting, consumer):
                self._feed(consumer, running, Event.LASTS)
            self._renew(consumer)
        if self._ended < self.outcome.requests:
            self.at(TICK, self._sweep)

    def _lasting(self, consumer: Consumer) -> list[Running]:
        """What has been read for so long that it has to be claimed."""
        return [
            running
            for running in consumer.running.values()
            if running.record.state is FetchState.READING
            and not running.record.claimed
            and self.now - running.record.reading_since >= CLAIM_AFTER
        ]

    def _renew(self, consumer: Consumer) -> None:
        held: dict[str, list[Running]] = {}
        due: dict[str, Producer] = {}
        for running in consumer.running.values():
            if running.record.claim_held:
                held.setdefault(running.producer.name, []).append(running)
                if self.now >= running.renew_at:
                    due[running.producer.name] = running.producer
        for name, producer in due.items():
            refs = []
            for running in held[name]:
                running.renew_at = self.now + LEASE_SECONDS / 3
                refs.append(LeaseRef(running.record.transfer_id, running.record.fetch_id))

            def renewed(message: Renew, leases: LeaseTable = producer.leases) -> Peer:
                return Renewed(
                    verdicts=tuple(
                        self.spend(
                            "lender", leases.renew, self.now, ref.transfer_id, ref.fetch_id
                        ).value
                        for ref in message.leases
                    )
                )

            question = Renew(leases=tuple(refs))
            self.ask("borrower", "lender", question, renewed, lambda _: None)


def _going_on(_: Peer) -> Peer:
    return PartState(done=False)


def _verdict(verdict: LeaseVerdict) -> Verdict:
    return Verdict(verdict=verdict.value, epoch="0123456789abcdef.1", lease_seconds=LEASE_SECONDS)
