"""The lease table with its ledger, in any order of events, against a model of its own.

The model knows a lease by four facts: until when it is held, who claimed it, whether that one
reads, and how it ended.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    invariant,
    precondition,
    rule,
)

from kvagent.core.lease import LeaseTable, Verdict, ticket_digest
from kvagent.core.ledger import BlockState, Holding, Ledger
from kvagent.core.regions import CacheGroup
from kvagent.errors import BlockInUseError

LEASE, PARK, REMEMBER = 10.0, 2.0, 40.0
MAX_PARKED, MAX_TOMBSTONES = 2, 4
BLOCKS = 8
GROUPS = 2
CONSUMERS = {"f0": "engine-a", "f1": "engine-a", "f2": "engine-b"}

Block = tuple[int, int]
"""(group, id)"""


@dataclass(frozen=True)
class Ticket:
    """Made by the engine before any message about it arrives anywhere."""

    transfer: str
    request: str
    blocks: tuple[tuple[int, ...], ...]
    deferred: bool

    @property
    def token(self) -> bytes:
        return self.transfer.encode().ljust(16, b".")

    @property
    def packed(self) -> tuple[bytes, ...]:
        return tuple(np.array(ids, "<i4").tobytes() for ids in self.blocks)

    @property
    def digest(self) -> bytes:
        return ticket_digest(self.packed, 8, self.deferred)

    @property
    def held(self) -> set[Block]:
        return {(group, block) for group, ids in enumerate(self.blocks) for block in ids}


@dataclass
class Known:
    """What the model knows of a lease."""

    ticket: Ticket
    until: float
    holder: str = ""
    reading: bool = False
    quieted: bool = False
    """Quiesced while nobody was known to read it."""
    ended: Verdict | None = None
    """What a late question is answered; `USED`: completed."""


@dataclass(frozen=True)
class Claim:
    fetch: str
    right_token: bool = True
    right_digest: bool = True
    reading: bool = True
    begun: bool = True


@dataclass
class Model:
    live: dict[str, Known] = field(default_factory=dict)
    remembered: dict[str, tuple[Known, float]] = field(default_factory=dict)
    """Ended ones, each with the time at which it is forgotten."""
    forgotten: set[str] = field(default_factory=set)
    parked: dict[str, tuple[Claim, float]] = field(default_factory=dict)
    """By transfer: the claim, until when."""
    early: dict[tuple[str, bytes], float] = field(default_factory=dict)
    """Releases that came before their offer, by transfer and token, and until when they count."""
    written: dict[int, set[Block]] = field(default_factory=dict)
    to_report: set[str] = field(default_factory=set)
    ends: Counter[str] = field(default_factory=Counter)
    """How many leases of each request have ended and nobody was told yet."""

    def end(self, now: float, transfer: str, how: Verdict) -> None:
        lease = self.live.pop(transfer)
        lease.ended = how
        self.remembered[transfer] = (lease, now + REMEMBER)
        request = lease.ticket.request
        self.ends[request] += 1
        if all(other.ticket.request != request for other in self.live.values()):
            self.to_report.add(request)

    def forget(self, transfers: Iterable[str]) -> None:
        for transfer in transfers:
            del self.remembered[transfer]
            self.forgotten.add(transfer)

    def find(self, now: float, transfer: str) -> Known | None:
        lease = self.live.get(transfer)
        if lease is not None and now >= lease.until:
            self.end(now, transfer, Verdict.EXPIRED)
        if transfer in self.remembered:
            return self.remembered[transfer][0]
        return self.live.get(transfer)


lately = st.integers(0, 3)
"""A ticket, counted from the latest."""
fetches = st.sampled_from(["f0", "f0", "f0", "f1", "f2"])
requests = st.sampled_from(["r0", "r0", "r1"])
EVENTS = (
    *("claim", "claim", "hold", "rival", "renew", "renew", "release"),
    *("complete", "complete", "rival completes", "wrong complete"),
    *("wait", "wait", "wait", "lapse", "sweep", "take", "other", "other"),
    *("offer", "cancel", "revoke", "drop", "quiesce", "mint"),
)
mostly = st.integers(0, 7).map(bool)
rarely = st.integers(0, 3).map(lambda number: number == 3)


class LeaseMachine(RuleBasedStateMachine):
    writes = Bundle("writes")

    def __init__(self) -> None:
        super().__init__()
        self.now = 100.0
        self.ledger = Ledger()
        self.ledger.know(
            CacheGroup(index=index, block_size=4, num_blocks=BLOCKS) for index in range(GROUPS)
        )
        self.table = LeaseTable(
            lease_seconds=LEASE,
            ledger=self.ledger,
            park_seconds=PARK,
            tombstone_seconds=REMEMBER,
            max_parked=MAX_PARKED,
            max_tombstones=MAX_TOMBSTONES,
        )
        self.model = Model()
        self.tickets: list[Ticket] = []
        self.writing: dict[int, Holding] = {}
        self.write_count = 0
        self.broken: set[str] = set()
        """Transfers whose blocks were not held at some moment since their offer."""
        self.last_words: dict[tuple[str, str, str], Verdict] = {}
        self.completes: set[tuple[bool, Verdict]] = set()
        """Whether the lease was claimed, and the answer."""

    # ------------------------------------------------------------ the engine

    @rule(
        request=requests,
        blocks=st.lists(
            st.lists(st.integers(0, BLOCKS - 1), max_size=3, unique=True), max_size=GROUPS
        ),
        offered=st.booleans(),
        deferred=rarely,
    )
    def mint(self, request: str, blocks: list[list[int]], offered: bool, deferred: bool) -> None:
        number = len(self.tickets) + 1
        self.tickets.append(Ticket(f"t{number}", request, tuple(map(tuple, blocks)), deferred))
        if offered:
            self.offer(0)

    @precondition(lambda self: self.tickets)
    @rule(back=lately)
    def offer(self, back: int) -> None:
        """Also a second time; but no engine offers again what is forgotten."""
        ticket, model = self.ticket(back), self.model
        if ticket.transfer in model.forgotten:
            return
        new = ticket.transfer not in {*model.live, *model.remembered}
        refused = new and any(ticket.held & blocks for blocks in model.written.values())
        offer = (
            *(self.now, ticket.transfer, ticket.token, ticket.request, ticket.packed, 8),
            ticket.deferred,
        )
        if refused:
            with pytest.raises(BlockInUseError):
                self.table.offer(*offer)
        else:
            self.table.offer(*offer)
        if new:
            model.to_report.discard(ticket.request)
            model.live[ticket.transfer] = Known(ticket, self.now + LEASE)
        if refused:
            self.ended(ticket.transfer, Verdict.REFUSED)
        elif new and model.early.pop((ticket.transfer, ticket.token), self.now) > self.now:
            self.ended(ticket.transfer, Verdict.RELEASED)
        # The claim that waited is answered as one that comes now.
        answered = self.table.answer_parked(self.now, ticket.transfer)
        parked = model.parked.pop(ticket.transfer, None)
        if parked is None:
            assert answered is None
        else:
            assert answered == (parked[0].fetch, self.claimed(ticket, parked[0]))

    @rule(request=requests, really=rarely)
    def cancel(self, request: str, really: bool) -> None:
        if not really:
            return
        mine = [t for t, one in self.model.live.items() if one.ticket.request == request]
        assert self.table.cancel(self.now, request) == bool(mine)
        for transfer in mine:
            self.ended(transfer, Verdict.CANCELLED)

    @rule(really=rarely)
    def revoke_all(self, really: bool) -> None:
        if not really:
            return
        self.table.revoke_all(self.now)
        for transfer in list(self.model.live):
            self.ended(transfer, Verdict.REVOKED)

    @rule(consumer=st.sampled_from(["engine-a", "engine-b", "engine-c"]), really=rarely)
    def drop_consumer(self, consumer: str, really: bool) -> None:
        if not really:
            return
        self.table.drop_consumer(self.now, consumer)
        for transfer, one in list(self.model.live.items()):
            if CONSUMERS.get(one.holder) == consumer:
                self.ended(transfer, Verdict.REVOKED)

    @rule(on=rarely)
    def quiesce(self, on: bool) -> None:
        if self.table.quiesced and not on:
            for one in self.model.live.values():
                one.quieted |= not one.reading
        self.table.quiesced = on

    @rule()
    def take_finished(self) -> None:
        """At any time later: a request that was offered again meanwhile is not finished."""
        assert self.table.take_finished() == self.model.to_report
        assert self.table.take_ended() == self.model.ends
        self.model.to_report, self.model.ends = set(), Counter()

    @rule(target=writes, block=st.integers(0, BLOCKS - 1), group=st.integers(0, GROUPS - 1))
    def write(self, group: int, block: int) -> int:
        """A fetch of the same engine takes a block."""
        blocks = {(group, block)}
        taken = set().union(
            *self.model.written.values(), *(one.ticket.held for one in self.model.live.values())
        )
        self.write_count += 1
        wanted = {group: np.array([block], np.int32)}
        if blocks & taken:
            with pytest.raises(BlockInUseError):
                self.ledger.reserve(wanted)
        else:
            self.writing[self.write_count] = self.ledger.reserve(wanted)
            self.model.written[self.write_count] = blocks
        return self.write_count

    @rule(number=consumes(writes))
    def written(self, number: int) -> None:
        if number in self.writing:
            self.writing.pop(number).move(BlockState.FREE)
            del self.model.written[number]

    # ------------------------------------------------------------ consumers

    @precondition(lambda self: self.tickets)
    @rule(
        back=lately,
        fetch=fetches,
        right_token=mostly,
        right_digest=mostly,
        reading=mostly,
        begun=st.booleans(),
        times=st.integers(1, 2),
    )
    def claim(
        self,
        back: int,
        fetch: str,
        right_token: bool = True,
        right_digest: bool = True,
        reading: bool = True,
        begun: bool = True,
        times: int = 1,
    ) -> None:
        ticket = self.ticket(back)
        claim = Claim(fetch, right_token, right_digest, reading, begun)
        for _ in range(times):
            verdict = self.table.claim(
                self.now,
                ticket.transfer,
                ticket.token if right_token else b"wrong",
                fetch,
                ticket.digest if right_digest else b"wrong",
                CONSUMERS[fetch],
                reading,
                begun,
            )
            if self.model.find(self.now, ticket.transfer) is None:
                parked = self.model.parked
                if ticket.transfer not in parked and len(parked) < MAX_PARKED:
                    parked[ticket.transfer] = (claim, self.now + PARK)
                waits = ticket.transfer in parked and parked[ticket.transfer][0].fetch == fetch
                assert verdict is (None if waits else Verdict.UNKNOWN)
            else:
                assert verdict is self.claimed(ticket, claim)

    @precondition(lambda self: self.tickets)
    @rule(back=lately, fetch=fetches, times=st.integers(1, 2))
    def renew(self, back: int, fetch: str, times: int) -> None:
        ticket = self.ticket(back)
        for _ in range(times):
            verdict = self.table.renew(self.now, ticket.transfer, fetch)
            lease = self.model.find(self.now, ticket.transfer)
            if lease is None:
                assert verdict is Verdict.UNKNOWN
            elif lease.holder != fetch:
                assert verdict is Verdict.USED
            elif lease.ended:
                assert verdict is lease.ended
            else:
                assert verdict is Verdict.HELD
                lease.until = self.now + LEASE

    @precondition(lambda self: self.tickets)
    @rule(
        back=lately,
        fetch=fetches,
        right_token=mostly,
        right_digest=mostly,
        times=st.integers(1, 2),
    )
    def complete(
        self,
        back: int,
        fetch: str,
        right_token: bool = True,
        right_digest: bool = True,
        times: int = 1,
    ) -> None:
        """Whoever has not claimed it does so by this, if that is still to be had."""
        ticket = self.ticket(back)
        claim = Claim(fetch, right_token, right_digest)
        for _ in range(times):
            lease = self.model.find(self.now, ticket.transfer)
            was_claimed = lease is not None and lease.holder != ""
            expected = self.completed(ticket, claim)
            verdict = self.table.complete(
                self.now,
                ticket.transfer,
                ticket.token if right_token else b"wrong",
                fetch,
                ticket.digest if right_digest else b"wrong",
                CONSUMERS[fetch],
            )
            assert verdict is expected
            self.completes.add((was_claimed, verdict))
            if verdict is Verdict.HELD:
                assert right_token
                assert lease is not None
                assert lease.holder == fetch
                if not lease.ended:
                    assert ticket.transfer not in self.broken
                    self.ended(ticket.transfer, Verdict.USED)
            if lease is not None and lease.ended and right_token:
                self.is_the_last_word("complete", ticket, fetch, verdict)

    @precondition(lambda self: self.tickets)
    @rule(
        back=lately,
        fetch=st.just("") | fetches,
        right_token=mostly,
        times=st.integers(1, 2),
    )
    def release(self, back: int, fetch: str, right_token: bool, times: int) -> None:
        ticket = self.ticket(back)
        token = ticket.token if right_token else b"wrong"
        for _ in range(times):
            lease = self.model.find(self.now, ticket.transfer)
            verdict = self.table.release(self.now, ticket.transfer, token, fetch)
            parked = self.model.parked.get(ticket.transfer)
            if parked is not None and parked[0].fetch == fetch:
                del self.model.parked[ticket.transfer]
            if lease is None:
                assert verdict is Verdict.UNKNOWN
                if len(self.model.early) < MAX_PARKED:
                    self.model.early[ticket.transfer, token] = self.now + PARK
            elif not right_token:
                assert verdict is Verdict.FORBIDDEN
            elif lease.holder not in ("", fetch):
                assert verdict is Verdict.USED
            else:
                if not lease.ended:
                    self.ended(ticket.transfer, Verdict.RELEASED)
                assert verdict is lease.ended
            if lease is not None and lease.ended and right_token:
                self.is_the_last_word("release", ticket, fetch, verdict)

    # ------------------------------------------------------------ time

    @rule(seconds=st.sampled_from([0.5, 1.0, 3.0, 7.0, LEASE, REMEMBER]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        self.broken |= {t for t, one in self.model.live.items() if self.now >= one.until}

    @rule(
        request=requests,
        offered=st.booleans(),
        deferred=rarely,
        script=st.lists(st.sampled_from(EVENTS), max_size=12),
    )
    def one_life(self, request: str, offered: bool, deferred: bool, script: list[str]) -> None:
        """Much happens to one lease and the one before, so that long chains are not too rare."""
        self.mint(request, [[0, 1], [2]], offered, deferred)
        backs = [0, 1]
        happens = {
            "mint": lambda: self.mint(request, [[3]], False, deferred),
            "offer": lambda: self.offer(backs[0]),
            "claim": lambda: self.claim(backs[0], "f0"),
            "hold": lambda: self.claim(backs[0], "f0", reading=False),
            "rival": lambda: self.claim(backs[0], "f1"),
            "renew": lambda: self.renew(backs[0], "f0", 1),
            "complete": lambda: self.complete(backs[0], "f0"),
            "rival completes": lambda: self.complete(backs[0], "f1"),
            "wrong complete": lambda: self.complete(backs[0], "f0", right_digest=False),
            "release": lambda: self.release(backs[0], "f0", True, 1),
            "cancel": lambda: self.cancel(request, True),
            "revoke": lambda: self.revoke_all(True),
            "drop": lambda: self.drop_consumer(CONSUMERS["f0"], True),
            "wait": lambda: self.time_passes(0.6 * LEASE),
            "lapse": lambda: self.time_passes(LEASE),
            "quiesce": lambda: self.quiesce(not self.table.quiesced),
            "sweep": self.sweep,
            "take": self.take_finished,
            "other": backs.reverse,
        }
        for name in script:
            happens[name]()
            self.counts_are_the_models()
            self.every_block_is_in_one_state()

    @rule()
    def sweep(self) -> None:
        model = self.model
        late = [t for t, (_, until) in model.parked.items() if self.now >= until]
        expected = sorted(model.parked.pop(transfer)[0].fetch for transfer in late)
        assert sorted(self.table.sweep(self.now)) == expected
        model.early = {key: until for key, until in model.early.items() if self.now < until}
        for transfer, one in list(model.live.items()):
            if self.now >= one.until:
                self.ended(transfer, Verdict.EXPIRED)
        model.forget([t for t, (_, at) in model.remembered.items() if self.now >= at])

    # ------------------------------------------------------------ the model's side

    def ticket(self, back: int) -> Ticket:
        return self.tickets[-1 - back % len(self.tickets)]

    def ended(self, transfer: str, how: Verdict) -> None:
        self.model.end(self.now, transfer, how)
        self.broken.add(transfer)

    def claimed(self, ticket: Ticket, claim: Claim) -> Verdict:
        """What a claim of a lease that is known comes to."""
        lease = self.model.find(self.now, ticket.transfer)
        assert lease is not None
        if not claim.right_token:
            return Verdict.FORBIDDEN
        if lease.ended:
            return lease.ended
        if lease.holder not in ("", claim.fetch):
            return Verdict.USED
        if not claim.right_digest:
            return Verdict.MISMATCH
        not_now = self.table.quiesced or (lease.quieted and claim.begun)
        if claim.reading and not lease.reading and not_now:
            return Verdict.QUIESCED
        lease.holder, lease.until = claim.fetch, self.now + LEASE
        lease.reading |= claim.reading
        return Verdict.HELD

    def completed(self, ticket: Ticket, claim: Claim) -> Verdict:
        """What the question comes to; that ends a lease when it is `HELD`."""
        lease = self.model.find(self.now, ticket.transfer)
        if lease is None:
            return Verdict.UNKNOWN
        if not claim.right_token:
            return Verdict.FORBIDDEN
        if lease.ended:
            mine = lease.holder == claim.fetch
            if lease.ended is Verdict.USED and mine:
                return Verdict.HELD
            return lease.ended if mine or not lease.holder else Verdict.USED
        if not lease.holder:
            return Verdict.UNKNOWN if ticket.deferred else self.claimed(ticket, claim)
        if lease.holder != claim.fetch:
            return Verdict.USED
        if not claim.right_digest:
            return Verdict.MISMATCH
        quiesced = (self.table.quiesced or lease.quieted) and not lease.reading
        return Verdict.QUIESCED if quiesced else Verdict.HELD

    def is_the_last_word(self, name: str, ticket: Ticket, fetch: str, verdict: Verdict) -> None:
        """Once a lease has ended, a question has one answer for as long as it is remembered."""
        if ticket.transfer not in self.model.forgotten:
            question = (name, ticket.transfer, fetch)
            assert self.last_words.setdefault(question, verdict) is verdict

    def forget_what_is_too_much(self) -> None:
        """The oldest; among those that ended at once the table may choose."""
        model = self.model
        ages = sorted(at for _, at in model.remembered.values())
        while len(model.remembered) > MAX_TOMBSTONES:
            oldest = [t for t, (_, at) in model.remembered.items() if at == ages[0]]
            gone = [t for t in oldest if self.table.renew(self.now, t, "") is Verdict.UNKNOWN]
            assert gone
            model.forget(gone)
            del ages[: len(gone)]

    @invariant()
    def counts_are_the_models(self) -> None:
        self.forget_what_is_too_much()
        model = self.model
        claimed = sum(bool(one.holder) for one in model.live.values())
        assert self.table.counts() == {
            "offered": len(model.live) - claimed,
            "claimed": claimed,
            "parked": len(model.parked),
            "tombstones": len(model.remembered),
        }
        assert len(self.table) == len(model.live)
        assert {lease.transfer_id for lease in self.table.live()} == model.live.keys()
        assert len(model.parked) <= MAX_PARKED
        assert self.table._early.keys() == model.early.keys()
        assert len(model.early) <= MAX_PARKED
        assert len(model.remembered) <= MAX_TOMBSTONES

    @invariant()
    def every_block_is_in_one_state(self) -> None:
        states: dict[Block, str] = {}
        for one in self.model.live.values():
            for block in one.ticket.held:
                if one.holder or block not in states:
                    states[block] = "claimed" if one.holder else "offered"
        for blocks in self.model.written.values():
            assert not blocks & states.keys()
            states |= dict.fromkeys(blocks, "reserved")
        counts = Counter(states.values())
        counts["free"] = GROUPS * BLOCKS - len(states)
        assert self.ledger.counts() == {state.value: counts[state.value] for state in BlockState}

    def teardown(self) -> None:
        """Time alone ends everything: each request comes out, and nothing is left."""
        for holding in self.writing.values():
            holding.move(BlockState.FREE)
        self.model.written.clear()
        self.now += LEASE + PARK
        self.sweep()
        self.take_finished()
        self.now += REMEMBER
        self.sweep()
        self.counts_are_the_models()
        self.every_block_is_in_one_state()
        assert set(self.table.counts().values()) == {0}
        assert self.ledger.counts()["free"] == GROUPS * BLOCKS
        assert self.table.take_finished() == set()
        assert not self.table._by_request, "no residue inside either"
        assert not self.table._early


TestLeases = LeaseMachine.TestCase


@pytest.mark.parametrize("seed", range(4))
def test_many_lives(seed: int) -> None:
    """As above, but drawn by the dozen: what takes five events in one order is rare."""
    rng = random.Random(seed)
    completes: set[tuple[bool, Verdict]] = set()
    for _ in range(800):
        machine = LeaseMachine()
        for _ in range(5):
            script = rng.choices(EVENTS, k=rng.randint(2, 12))
            offered, deferred = rng.random() < 0.8, rng.random() < 0.2
            machine.one_life(rng.choice(["r0", "r1"]), offered, deferred, script)
        machine.teardown()
        completes |= machine.completes
    unclaimed = {verdict for claimed, verdict in completes if not claimed}
    assert unclaimed >= {
        *(Verdict.HELD, Verdict.MISMATCH, Verdict.QUIESCED, Verdict.UNKNOWN, Verdict.EXPIRED),
        *(Verdict.RELEASED, Verdict.CANCELLED, Verdict.REVOKED),
    }, "a good mixture"
    claimed = {verdict for claimed, verdict in completes if claimed}
    assert claimed >= {
        *(Verdict.HELD, Verdict.USED, Verdict.QUIESCED, Verdict.EXPIRED),
        *(Verdict.RELEASED, Verdict.CANCELLED, Verdict.REVOKED),
    }


@pytest.mark.slow
@pytest.mark.timeout(1800)
class TestLeasesAtLength(LeaseMachine.TestCase):
    settings = settings(max_examples=10 * settings.default.max_examples, stateful_step_count=100)
