"""A producer's and a consumer's tables, and between them a network that loses, repeats, reorders.

Both engines use their blocks for something else the moment they are told that they may, so what a
fetch read tells whether that was too early: a block's content is a number that changes with every
use. Time is simulated. The two halves stand in for `kvagent.agent.lender` and `borrower`.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from steps import Step

from kvagent.core.aggregator import KVOutputAggregator
from kvagent.core.fetch import Action, Event, Fetch, FetchState, FetchTable
from kvagent.core.lease import LeaseTable, Verdict, ticket_digest
from kvagent.core.ledger import Ledger
from kvagent.core.output import KVConnectorOutput
from kvagent.core.regions import CacheGroup

LEASE, TIMEOUT, FENCE, PARK = 6.0, 12.0, 4.0, 2.0
CALL, AGAIN, TICK = 3.0, 1.0, 0.5
LASTS = 0.6
"""Seconds of reading after which a fetch is claimed."""
SLOWEST = 3.0
"""Seconds after which a message is lost for good."""

FETCH_BOUND = TIMEOUT + FENCE + TICK
LEASE_BOUND = LEASE + FETCH_BOUND + SLOWEST + LEASE + TICK
"""Claimed with its last breath, renewed as long as there is a fetch, and one lease more."""

BLOCKS = 8
RANKS = 2
PAUSES = (
    *("", "reads", "producer", "consumer", "network", "cancel", "revoke", "drop", "restart"),
    *("quiesce", "rival", "wrong"),
)
"""What stands still, or happens, in the middle of a transfer; `rival`: another fetch of the same
ticket; `wrong`: its ticket was changed."""

KINDS = ("", "", "late", "deferred")
"""Of tickets; `late`: its offer comes after the fetch."""

LENGTHS = (AGAIN, LEASE, LEASE + 1.0, TIMEOUT)
"""Of the pause."""

rarely = st.integers(0, 5).map(lambda number: number == 5)

GROUP = CacheGroup(index=0, block_size=4, num_blocks=BLOCKS)


@dataclass(frozen=True)
class Ticket:
    transfer: str
    request: str
    epoch: int
    blocks: tuple[int, ...]
    content: list[int]
    """What must be read; of a deferred one it is there when its offer comes, and not before."""
    deferred: bool = False
    wrong: bool = False
    """Somebody has changed it."""

    @property
    def packed(self) -> tuple[bytes, ...]:
        return (np.array(self.blocks, "<i4").tobytes(),)

    @property
    def digest(self) -> bytes:
        return ticket_digest(self.packed, 1, self.deferred)


@dataclass(eq=False)
class Call:
    """A question of the consumer; sent again until it is answered or its time is up."""

    kind: str
    ticket: Ticket
    fetches: list[Running]
    """Several: to renew or to complete."""
    fetch_id: str
    until: float
    again_at: float
    over: bool = False


@dataclass
class Message:
    call: Call
    sent: float
    answer: tuple[int, list[Verdict]] | None = None
    """The epoch and the verdicts; None: this is the question."""


@dataclass
class Share:
    """What one rank reads: its half of every block."""

    todo: list[int]
    current: tuple[int, int] | None = None
    """Which block is being read, and what was in it when that began."""
    done: bool = False


@dataclass(eq=False)
class Running:
    record: Fetch
    ticket: Ticket
    blocks: list[int]
    shares: list[Share]
    renew_at: float = 0.0
    stopped: bool = False
    overtook: bool = False
    """Its end came before its offer."""


@dataclass
class Producer:
    """The lender, and an engine that fills blocks anew as soon as it may."""

    now: float = 1.0
    epoch: int = 0
    version: int = 0
    content: list[int] = field(default_factory=lambda: [0] * BLOCKS)

    def __post_init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        self.epoch += 1
        self.ledger = Ledger()
        self.ledger.know([GROUP])
        self.leases = LeaseTable(
            lease_seconds=LEASE,
            ledger=self.ledger,
            park_seconds=PARK,
            tombstone_seconds=4 * LEASE,
            max_parked=3,
            max_tombstones=6,
        )
        self.requests: dict[str, tuple[tuple[int, ...], float]] = {}
        """What the engine keeps for its requests, and since when (their offer came)."""
        self.to_offer: list[Ticket] = []
        self.parked: dict[str, list[Call]] = {}
        self.told: Counter[str] = Counter()
        self.refill(range(BLOCKS))

    def refill(self, blocks: range | set[int]) -> None:
        for block in blocks:
            self.version += 1
            self.content[block] = self.version

    def users(self, block: int) -> int:
        return sum(block in blocks for blocks, _ in self.requests.values())

    def in_use(self) -> set[int]:
        return {block for blocks, _ in self.requests.values() for block in blocks}

    def tell(self) -> None:
        """The engine is told which requests are finished."""
        for request in self.leases.take_finished():
            self.told[request] += 1
            assert self.told[request] == 1
            blocks, _ = self.requests.pop(request)
            self.refill(set(blocks) - self.in_use())

    def offer(self, ticket: Ticket) -> list[Message]:
        token = ticket.transfer.encode()
        self.requests[ticket.request] = (ticket.blocks, self.now)
        if ticket.deferred:
            self.refill({block for block in ticket.blocks if self.users(block) == 1})
            ticket.content[:] = [self.content[block] for block in ticket.blocks]
        offer = (ticket.transfer, token, ticket.request, ticket.packed, 1, ticket.deferred)
        self.leases.offer(self.now, *offer)
        answered = self.leases.answer_parked(self.now, ticket.transfer)
        messages = self.unpark(*answered) if answered else []
        self.tell()
        return messages

    def unpark(self, fetch_id: str, verdict: Verdict) -> list[Message]:
        return [self.answer(call, [verdict]) for call in self.parked.pop(fetch_id, [])]

    def answer(self, call: Call, verdicts: list[Verdict]) -> Message:
        return Message(call, self.now, (self.epoch, verdicts))

    def ask(self, call: Call) -> list[Message]:
        """Answers that now go out."""
        transfer, token = call.ticket.transfer, call.ticket.transfer.encode()
        if call.kind == "claim":
            verdict = self.leases.claim(
                self.now, transfer, token, call.fetch_id, call.ticket.digest, "consumer"
            )
            if verdict is None:
                self.parked.setdefault(call.fetch_id, []).append(call)
                return []
            return [self.answer(call, [verdict])]
        if call.kind == "renew":
            ids = [(one.ticket.transfer, one.record.fetch_id) for one in call.fetches]
            return [self.answer(call, [self.leases.renew(self.now, *pair) for pair in ids])]
        if call.kind == "complete":
            verdicts = [
                self.leases.complete(
                    self.now,
                    one.ticket.transfer,
                    one.record.token,
                    one.record.fetch_id,
                    one.ticket.digest,
                    "consumer",
                )
                for one in call.fetches
            ]
            messages = [self.answer(call, verdicts)]
        else:
            verdict = self.leases.release(self.now, transfer, token, call.fetch_id)
            messages = [self.answer(call, [verdict]), *self.unpark(call.fetch_id, verdict)]
        self.tell()
        return messages

    def tick(self) -> list[Message]:
        messages = []
        for fetch_id in self.leases.sweep(self.now):
            messages += self.unpark(fetch_id, Verdict.UNKNOWN)
        self.tell()
        return messages


class TransferMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.now = 1.0
        self.numbers = 0
        self.producer = Producer()
        self.network: list[Message] = []
        self.cut = False
        self.stalled = False
        """Once an agent stood still for a while nothing need be done in time any more."""
        self.tickets: list[Ticket] = []
        # The consumer: the borrower, and an engine that uses its blocks as soon as it may.
        self.ledger = Ledger()
        self.ledger.know([GROUP])
        self.fetches = FetchTable(self.ledger)
        self.aggregator = KVOutputAggregator(RANKS, world_size=RANKS)
        self.running: list[Running] = []
        self.calls: list[Call] = []
        self.completing: list[Running] = []
        """To be asked for in one message."""
        self.asked: Counter[str] = Counter()
        self.good: set[tuple[bool, bool, bool]] = set()
        """How fetches came to a good end: deferred, claimed, its offer came last."""
        self.owner: dict[int, Running] = {}
        self.local: dict[tuple[int, int], tuple[int, int]] = {}
        """By block and rank: what was read, at its begin and at its end."""
        self.reports: Counter[str] = Counter()
        self.started: set[str] = set()

    # ------------------------------------------------------------ the producer's engine

    @rule(
        count=st.integers(1, 3),
        share=st.booleans(),
        offered=st.booleans(),
        fetched=st.booleans(),
        deferred=rarely,
    )
    def prompt_is_done(
        self, count: int, share: bool, offered: bool, fetched: bool, deferred: bool
    ) -> None:
        self.mint(count, share, deferred)
        if offered and self.producer.to_offer:
            self.offer_arrives()
        if fetched and self.tickets:
            self.fetch(0, True, False)

    def mint(self, count: int, share: bool, deferred: bool) -> None:
        """A prompt is done, or will be: new blocks, perhaps behind a prefix that another request
        has too."""
        producer = self.producer
        free = [block for block in range(BLOCKS) if block not in producer.in_use()]
        prefix = [blocks[0] for blocks, _ in producer.requests.values()][:1] if share else []
        blocks = (*prefix, *free[:count])
        if not blocks:
            return
        self.numbers += 1
        content = [producer.content[block] for block in blocks]
        names = (f"t{self.numbers}", f"p{self.numbers}")
        ticket = Ticket(*names, producer.epoch, blocks, content, deferred)
        producer.requests[ticket.request] = (blocks, self.now)
        producer.to_offer.append(ticket)
        self.tickets.append(ticket)

    @precondition(lambda self: self.producer.to_offer)
    @rule()
    def offer_arrives(self) -> None:
        self.send(self.producer.offer(self.producer.to_offer.pop(0)))

    @precondition(lambda self: self.producer.requests)
    @rule(pick=st.integers(0, 9), really=rarely)
    def producer_cancels(self, pick: int, really: bool) -> None:
        if not really:
            return
        requests = list(self.producer.requests)
        self.producer.leases.cancel(self.now, requests[pick % len(requests)])
        self.producer.tell()

    @rule(what=st.sampled_from(["revoke", "drop", "restart"]), really=rarely)
    def producer_forgets(self, what: str, really: bool) -> None:
        if not really:
            return
        if what == "revoke":
            self.producer.leases.revoke_all(self.now)
        elif what == "drop":
            self.producer.leases.drop_consumer(self.now, "consumer")
        else:
            self.producer.restart()
        self.producer.tell()

    @rule(on=rarely)
    def quiesce(self, on: bool) -> None:
        self.producer.leases.quiesced = on

    # ------------------------------------------------------------ the consumer's engine

    @precondition(lambda self: self.tickets)
    @rule(back=st.integers(0, 3), connects=st.booleans(), wrong=rarely)
    def fetch(self, back: int, connects: bool, wrong: bool) -> None:
        """With a new ticket, or an old one that may have been used or have run out."""
        ticket = self.tickets[-1 - back % len(self.tickets)]
        if wrong:
            ticket = replace(ticket, blocks=(*ticket.blocks[1:], ticket.blocks[0]), wrong=True)
            if len(ticket.blocks) == 1:
                ticket = replace(ticket, blocks=((ticket.blocks[0] + 1) % BLOCKS,))
        free = [block for block in range(BLOCKS) if block not in self.owner]
        blocks = free[: len(ticket.blocks)]
        if len(blocks) < len(ticket.blocks):
            return
        self.numbers += 1
        record = Fetch(
            fetch_id=f"f{self.numbers}",
            request_id=f"c{self.numbers}",
            transfer_id=ticket.transfer,
            token=ticket.transfer.encode(),
            peer="producer",
            started=self.now,
            deadline=self.now + TIMEOUT,
            deferred=ticket.deferred,
        )
        shares = [Share(list(range(len(blocks)))) for _ in range(RANKS)]
        running = Running(record, ticket, blocks, shares)
        assert self.fetches.add(record)
        self.fetches.reserve(record, {0: np.array(blocks, np.int32)})
        self.owner |= dict.fromkeys(blocks, running)
        self.running.append(running)
        self.started.add(record.request_id)
        if connects:
            self.connected(-1, False)

    @precondition(lambda self: self.running)
    @rule(pick=st.integers(0, 9), fails=rarely)
    def connected(self, pick: int, fails: bool) -> None:
        running = self.pick(pick)
        if fails or running.ticket.epoch != self.producer.epoch:
            self.feed(running, Event.CONNECT_FAILED, "peer_gone: x")
        else:
            self.feed(running, Event.CONNECTED)

    @precondition(lambda self: self.running)
    @rule(pick=st.integers(0, 9), really=rarely)
    def consumer_cancels(self, pick: int, really: bool) -> None:
        if really:
            self.feed(self.pick(pick), Event.CANCEL, "cancelled: x")

    @precondition(lambda self: self.tickets)
    @rule(back=st.integers(0, 3), really=rarely)
    def release_ticket(self, back: int, really: bool) -> None:
        if really:
            self.call("release", self.tickets[-1 - back % len(self.tickets)])

    # ------------------------------------------------------------ reads

    @precondition(lambda self: self.running)
    @rule(pick=st.integers(0, 9), rank=st.integers(0, RANKS - 1))
    def read(self, pick: int, rank: int) -> None:
        """A rank begins with a block, or is through with it."""
        running = self.pick(pick)
        share = running.shares[rank]
        if share.done or running.record.reading_since == 0.0:
            return
        if share.current is not None:
            self.lands(running, rank)
        elif share.todo and not running.stopped:
            index = share.todo.pop(0)
            share.current = (index, self.producer.content[running.ticket.blocks[index]])
        if share.current is None and (running.stopped or not share.todo):
            self.rank_done(running, rank, "cancelled: x" if running.stopped else "")

    @precondition(lambda self: self.running)
    @rule(pick=st.integers(0, 9), rank=st.integers(0, RANKS - 1), really=rarely)
    def rank_fails(self, pick: int, rank: int, really: bool) -> None:
        """The read in flight lands all the same, before the rank is through."""
        running = self.pick(pick)
        share = running.shares[rank]
        if really and running.record.reading_since and not share.done:
            self.feed(running, Event.RANK_FAILED, "transport: x")
            if share.current is not None:
                self.lands(running, rank)
            self.rank_done(running, rank, "transport: x")

    @precondition(lambda self: self.running)
    @rule(pick=st.integers(0, 9), rank=st.integers(0, RANKS - 1))
    def rank_says_it_again(self, pick: int, rank: int) -> None:
        running = self.pick(pick)
        if running.shares[rank].done:
            self.rank_done(running, rank, "cancelled: late")

    def lands(self, running: Running, rank: int) -> None:
        share = running.shares[rank]
        assert share.current is not None
        index, before = share.current
        share.current = None
        block = running.blocks[index]
        assert self.owner.get(block) is running, "written after it was given back"
        after = self.producer.content[running.ticket.blocks[index]]
        self.local[block, rank] = (before, after)

    def rank_done(self, running: Running, rank: int, failure: str) -> None:
        running.shares[rank].done = True
        record = running.record
        if record.ranks_done or record.terminal:
            return
        if failure:
            self.feed(running, Event.RANK_FAILED, failure)
        steps = [Step() for _ in range(RANKS)]
        failed = {record.fetch_id: failure} if failure else {}
        steps[rank].kv_connector_output = KVConnectorOutput(
            finished_recving={record.fetch_id}, failed_recving=failed
        )
        combined = self.aggregator.aggregate(steps)
        assert combined is not None
        output = combined.kv_connector_output
        if record.fetch_id in (output.finished_recving or ()):
            self.feed(running, Event.RANKS_DONE, output.failed_recving.get(record.fetch_id, ""))

    # ------------------------------------------------------------ the borrower

    def pick(self, number: int) -> Running:
        return self.running[number % len(self.running)]

    def feed(self, running: Running, event: Event, cause: str = "") -> None:
        for action in self.fetches.feed(running.record, event, self.now, cause):
            if action is Action.STOP_READS:
                running.stopped = True
            elif action is Action.REPORT:
                self.report(running)
            elif action is Action.COMPLETE:
                self.completing.append(running)
            elif action is not Action.START_READS:
                self.call(action.value, running.ticket, [running], running.record.fetch_id)

    def call(
        self, kind: str, ticket: Ticket, fetches: list[Running] | None = None, fetch_id: str = ""
    ) -> None:
        until, again_at = self.now + CALL, self.now + AGAIN
        call = Call(kind, ticket, fetches or [], fetch_id, until, again_at)
        self.calls.append(call)
        self.asked[kind] += 1
        self.send([Message(call, self.now)])

    @rule()
    def turn_ends(self) -> None:
        """Of the consumer's event loop: what ended in it is asked for together."""
        if self.completing:
            asked, self.completing = self.completing, []
            self.call("complete", asked[0].ticket, asked)

    def report(self, running: Running) -> None:
        record = running.record
        self.fetches.remove(record)
        self.aggregator.forget(record.fetch_id)
        self.running.remove(running)
        self.reports[record.request_id] += 1
        assert self.reports[record.request_id] == 1
        assert all(share.current is None for share in running.shares), "a rank may still write"
        for call in self.calls:
            if call.kind == "claim" and running in call.fetches:
                call.over = True
        if not record.cause:
            assert not running.ticket.wrong
            self.good.add((record.deferred, record.claimed, running.overtook))
            for index, block in enumerate(running.blocks):
                right = running.ticket.content[index]
                for rank in range(RANKS):
                    assert self.local[block, rank] == (right, right), "wrong bytes called good"
        for block in running.blocks:
            del self.owner[block]
            for rank in range(RANKS):
                self.local.pop((block, rank), None)

    def answered(self, call: Call, epoch: int, verdicts: list[Verdict]) -> None:
        if call.over:
            return
        call.over = True
        if call.kind == "renew":
            for running, verdict in zip(call.fetches, verdicts, strict=True):
                if verdict is not Verdict.HELD:
                    self.feed(running, Event.LEASE_LOST, f"{verdict.value}: x")
        elif call.kind == "complete":
            for running, verdict in zip(call.fetches, verdicts, strict=True):
                self.completed(running, epoch, verdict)
        elif call.kind == "claim":
            (running,), (verdict,) = call.fetches, verdicts
            held = verdict is Verdict.HELD and epoch == call.ticket.epoch
            event = Event.CLAIM_HELD if held else Event.CLAIM_REFUSED
            running.renew_at = self.now + LEASE / 3
            self.feed(running, event, "" if held else f"{verdict.value}: x")

    def completed(self, running: Running, epoch: int, verdict: Verdict) -> None:
        event, cause = Event.COMPLETE_REFUSED, f"{verdict.value}: x"
        if epoch != running.ticket.epoch:
            cause = "peer_restarted: x"
        elif verdict is Verdict.HELD:
            event, cause = Event.COMPLETE_HELD, ""
        elif verdict is Verdict.UNKNOWN:
            event = Event.COMPLETE_UNKNOWN
            running.overtook = True
        self.feed(running, event, cause)

    def consumer_ticks(self) -> None:
        self.turn_ends()
        for call in list(self.calls):
            if not call.over and self.now >= call.until:
                call.over = True
                refused = {"claim": Event.CLAIM_REFUSED, "complete": Event.COMPLETE_REFUSED}
                if call.kind in refused:
                    for running in call.fetches:
                        self.feed(running, refused[call.kind], "peer_gone: x")
            elif not call.over and self.now >= call.again_at:
                call.again_at += AGAIN
                self.send([Message(call, self.now)])
        self.calls = [call for call in self.calls if not call.over]
        for running in list(self.running):
            if running.record in self.fetches.overdue(self.now):
                self.feed(running, Event.DEADLINE, "timed_out: x")
            if not running.record.terminal and self.now >= running.record.deadline + FENCE:
                for rank, share in enumerate(running.shares):
                    share.current = None
                    self.rank_done(running, rank, "timed_out: x")
        for running in list(self.running):
            record = running.record
            reads = record.state is FetchState.READING and not record.claimed
            if reads and self.now >= record.reading_since + LASTS:
                self.feed(running, Event.LASTS)
        due = [r for r in self.running if r.record.claim_held and self.now >= r.renew_at]
        if due:
            held = [running for running in self.running if running.record.claim_held]
            for running in held:
                running.renew_at = self.now + LEASE / 3
            self.call("renew", held[0].ticket, held)

    # ------------------------------------------------------------ the network and time

    def send(self, messages: list[Message]) -> None:
        if not self.cut:
            self.network += messages

    def deliver(self, message: Message) -> None:
        if message.answer is None:
            self.send(self.producer.ask(message.call))
        else:
            self.answered(message.call, *message.answer)

    def messages_arrive(self) -> None:
        self.turn_ends()
        arriving, self.network = self.network, []
        for message in arriving:
            self.deliver(message)

    @precondition(lambda self: self.network)
    @rule(pick=st.integers(0, 20), what=st.sampled_from(["deliver", "lose", "repeat"]))
    def one_message(self, pick: int, what: str) -> None:
        index = pick % len(self.network)
        message = self.network[index] if what == "repeat" else self.network.pop(index)
        if what != "lose":
            self.deliver(message)

    @rule(rounds=st.integers(1, 12), offers=st.booleans())
    def all_is_well(self, rounds: int, offers: bool = True) -> None:
        """Messages arrive, ranks read."""
        self.cut = False
        for _ in range(rounds):
            while offers and self.producer.to_offer:
                self.offer_arrives()
            for running in list(self.running):
                if running in self.running and running.record.reading_since == 0.0:
                    self.connected(self.running.index(running), False)
            self.messages_arrive()
            self.all_read()

    @rule()
    def all_read(self) -> None:
        for running in list(self.running):
            for rank in range(RANKS):
                if running in self.running:
                    self.read(self.running.index(running), rank)

    @rule(cut=rarely)
    def network_fails(self, cut: bool) -> None:
        self.cut = cut

    @rule(
        seconds=st.sampled_from([TICK, AGAIN, 2.0, LEASE]),
        stands_still=st.sampled_from(["", "", "reads", "producer", "consumer"]),
        well=st.booleans(),
    )
    def time_passes(self, seconds: float, stands_still: str, well: bool) -> None:
        """`well`: messages arrive meanwhile, and ranks read."""
        self.stalled |= stands_still in ("producer", "consumer")
        for _ in range(int(seconds / TICK)):
            self.now += TICK
            self.producer.now = self.now
            self.network = [one for one in self.network if self.now < one.sent + SLOWEST]
            if stands_still != "consumer":
                self.consumer_ticks()
            if stands_still != "producer":
                self.send(self.producer.tick())
            if stands_still == "reads":
                self.messages_arrive()
            elif well and not stands_still and not self.cut:
                self.all_is_well(1)

    @rule(
        count=st.integers(1, 3),
        before=st.integers(1, 5),
        seconds=st.sampled_from(LENGTHS),
        what=st.sampled_from(PAUSES),
        reads=st.booleans(),
        kind=st.sampled_from(KINDS),
    )
    def transfer_with_a_pause(
        self, count: int, before: int, seconds: float, what: str, reads: bool, kind: str
    ) -> None:
        """All is well, but for something in the middle."""
        self.prompt_is_done(count, False, kind == "", what != "wrong", kind == "deferred")
        self.all_is_well(before, kind == "")
        self.cut = what == "network"
        if what == "quiesce":
            self.quiesce(True)
        elif what in ("rival", "wrong") and self.tickets:
            self.fetch(0, True, what == "wrong")
        if what in ("revoke", "drop", "restart"):
            self.producer_forgets(what, True)
        elif what == "cancel" and self.producer.requests:
            self.producer_cancels(-1, True)
        still = what in ("reads", "producer", "consumer")
        self.time_passes(seconds, what if still else "", False)
        if reads:
            self.all_read()
        if kind:
            self.all_is_well(1, False)
            while self.producer.to_offer:
                self.offer_arrives()
        self.all_is_well(1)
        self.quiesce(False)
        self.all_is_well(12)

    # ------------------------------------------------------------ what always holds

    @invariant()
    def both_ledgers_are_right(self) -> None:
        live = {lease.transfer_id for lease in self.producer.leases.live()}
        lent = [ticket for ticket in self.tickets if ticket.transfer in live]
        assert {ticket.request for ticket in lent} <= self.producer.requests.keys()
        blocks = {block for ticket in lent for block in ticket.blocks}
        assert self.producer.ledger.counts()["free"] == BLOCKS - len(blocks)
        assert self.ledger.counts()["free"] == BLOCKS - len(self.owner)
        assert set(self.owner.values()) == set(self.running)

    @invariant()
    def nothing_takes_longer_than_it_may(self) -> None:
        if self.stalled:
            return
        for running in self.running:
            assert self.now <= running.record.started + FETCH_BOUND
        waiting = {ticket.request for ticket in self.producer.to_offer}
        for request, (_, since) in self.producer.requests.items():
            assert request in waiting or self.now <= since + LEASE_BOUND

    def teardown(self) -> None:
        """Reads hang, and the network stays as it is: all the same everything ends in time."""
        while self.producer.to_offer:
            self.offer_arrives()
        end = self.now + LEASE_BOUND
        while self.now < end:
            self.time_passes(TICK, "", False)
            self.messages_arrive()
        assert not self.running
        assert not self.producer.requests
        assert self.reports == Counter(self.started)
        assert self.ledger.counts()["free"] == BLOCKS
        assert self.producer.ledger.counts()["free"] == BLOCKS
        assert not self.producer.parked
        assert not self.owner
        assert self.aggregator.num_counting == 0


TestTransfers = TransferMachine.TestCase
TestTransfers.settings = settings(stateful_step_count=60)


def test_a_slow_reader_loses_nothing() -> None:
    machine = TransferMachine()
    machine.prompt_is_done(3, False, True, True, False)
    machine.all_is_well(2)
    while machine.now < 1.8 * LEASE:
        machine.time_passes(TICK, "", False)
        machine.messages_arrive()
    machine.all_is_well(12)
    assert machine.fetches.ended == {"ok": 1}
    assert machine.producer.told == {"p1": 1}
    assert machine.asked["claim"] == machine.asked["complete"] == 1
    assert machine.asked["renew"] > 2


def test_a_quick_reader_asks_once() -> None:
    machine = TransferMachine()
    for _ in range(3):
        machine.prompt_is_done(2, False, True, True, False)
    machine.all_is_well(12)
    assert machine.fetches.ended == {"ok": 3}
    assert machine.asked == {"complete": 1}, "for all three of them"


def test_a_complete_that_overtakes_its_offer() -> None:
    machine = TransferMachine()
    machine.prompt_is_done(2, False, False, True, False)
    machine.all_is_well(12, offers=False)
    assert machine.asked == {"complete": 1, "claim": 1}
    machine.time_passes(PARK - TICK, "", False)
    machine.all_is_well(12)
    assert machine.fetches.ended == {"ok": 1}
    assert machine.asked == {"complete": 2, "claim": 1}


def test_an_offer_that_never_comes() -> None:
    machine = TransferMachine()
    machine.prompt_is_done(2, False, False, True, False)
    machine.all_is_well(12, offers=False)
    machine.time_passes(PARK + TICK, "", False)
    machine.all_is_well(1, offers=False)
    assert machine.fetches.ended == {"unknown": 1}


def test_a_deferred_ticket_is_claimed_first() -> None:
    machine = TransferMachine()
    machine.prompt_is_done(2, False, False, True, True)
    machine.all_is_well(3, offers=False)
    assert machine.asked == {"claim": 1}
    assert not any(share.current for one in machine.running for share in one.shares)
    machine.all_is_well(12)
    assert machine.fetches.ended == {"ok": 1}


@pytest.mark.parametrize("seed", range(4))
def test_many_transfers(seed: int) -> None:
    """As above, but drawn by the dozen: what takes many steps in one order is rare."""
    rng = random.Random(seed)
    ends: Counter[str] = Counter()
    good: set[tuple[bool, bool, bool]] = set()
    for _ in range(200):
        machine = TransferMachine()
        for _ in range(4):
            machine.transfer_with_a_pause(
                rng.randint(1, 3),
                rng.randint(1, 5),
                rng.choice(LENGTHS),
                rng.choice(PAUSES),
                rng.random() < 0.5,
                rng.choice(KINDS),
            )
            machine.both_ledgers_are_right()
            machine.nothing_takes_longer_than_it_may()
        machine.teardown()
        ends.update(machine.fetches.ended)
        good |= machine.good
    assert ends.keys() >= {
        *("ok", "expired", "cancelled", "revoked", "timed_out"),
        *("mismatch", "quiesced", "unknown", "used"),
    }, "a good mixture"
    short, lasting, overtaken = (False, False, False), (False, True, False), (False, True, True)
    assert good == {short, lasting, overtaken, (True, True, False)}


@pytest.mark.slow
@pytest.mark.timeout(1800)
class TestTransfersAtLength(TransferMachine.TestCase):
    settings = settings(max_examples=10 * settings.default.max_examples, stateful_step_count=120)
