"""The table of fetches with its ledger, fed with every event in any order, against a model.

The model does not know the machine's states. It knows what has happened to a fetch, and says from
that what is still owed: the ranks' end, the producer's word, the one report.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from kvagent.core.fetch import Action, Event, Fetch, FetchState, FetchTable
from kvagent.core.ledger import BlockState, Holding, Ledger
from kvagent.core.regions import CacheGroup
from kvagent.errors import BlockInUseError

BLOCKS = 8
TIMEOUT = 20.0

REFUSALS = {
    Event.CLAIM_REFUSED,
    Event.LEASE_LOST,
    Event.COMPLETE_REFUSED,
    Event.COMPLETE_UNKNOWN,
}
"""The producer's word that nothing is held for us: there is nothing to release."""

EARLY = {Event.CONNECT_FAILED, Event.CANCEL, Event.DEADLINE}
FINE = (Event.CONNECTED, Event.LASTS, Event.CLAIM_HELD, Event.COMPLETE_HELD)
CLAIMING = {Event.CLAIM_REFUSED, Event.RANK_FAILED, Event.CANCEL, Event.DEADLINE}
READING = {
    Event.CLAIM_REFUSED,
    Event.LEASE_LOST,
    Event.RANK_FAILED,
    Event.CANCEL,
    Event.DEADLINE,
}
ASKING = {Event.COMPLETE_REFUSED, Event.CLAIM_REFUSED, Event.CANCEL, Event.DEADLINE}


WAYS = {
    "short": (Event.RANKS_DONE,),
    "lasts": (Event.LASTS, Event.CLAIM_HELD, Event.RANKS_DONE),
    "ends while it claims": (Event.LASTS, Event.RANKS_DONE, Event.CLAIM_HELD),
    "overtakes its offer": (Event.RANKS_DONE, Event.COMPLETE_UNKNOWN, Event.CLAIM_HELD),
    "deferred": (Event.CLAIM_HELD, Event.RANKS_DONE),
}
"""For all to go well, between the connection and the producer's word."""


@dataclass
class Story:
    """What has happened to one fetch."""

    record: Fetch
    blocks: set[int]
    posted: bool = False
    claimed: bool = False
    held: bool = False
    ranks_done: bool = False
    asked: int = 0
    """How often the producer was asked for its word."""
    grants: int = 0
    """Claims that were granted after that: then it is asked again."""
    failed: str | None = None
    """The first cause."""
    over: bool = False
    done: Counter[Action] = field(default_factory=Counter)

    @property
    def may_be_written(self) -> bool:
        return self.posted and not self.ranks_done

    def expect(self, event: Event, cause: str) -> set[Action]:
        """The event happens; returns what has to be done about it."""
        if self.over:
            return set()
        if not self.posted:
            return self._before_it_reads(event, cause)
        if self.failed is not None:
            if event is not Event.RANKS_DONE:
                return set()
            self.ranks_done = self.over = True
            return {Action.REPORT}
        if self.asked:
            return self._while_it_asks(event, cause)
        if event is Event.LASTS:
            return self._claim()
        if event is Event.CLAIM_HELD:
            self.held = True
        if event is Event.RANKS_DONE:
            self.ranks_done = True
        failed = event in READING or (event is Event.RANKS_DONE and cause != "")
        if failed:
            self.failed, self.over = cause, self.ranks_done
            end = {Action.REPORT} if self.over else {Action.STOP_READS}
            return end | (set() if event in REFUSALS else {Action.RELEASE})
        if self.ranks_done and (self.held or not self.claimed):
            self.asked += 1
            return {Action.COMPLETE}
        return set()

    def _before_it_reads(self, event: Event, cause: str) -> set[Action]:
        waits = self.claimed  # only a deferred one has claimed here
        if event is (Event.CLAIM_HELD if waits else Event.CONNECTED):
            if self.record.deferred and not waits:
                return self._claim()
            self.posted, self.held = True, waits
            return {Action.START_READS}
        if event not in (CLAIMING if waits else EARLY):
            return set()
        self.failed, self.over = cause, True
        return {Action.REPORT} | (set() if event in REFUSALS else {Action.RELEASE})

    def _while_it_asks(self, event: Event, cause: str) -> set[Action]:
        if event is Event.COMPLETE_HELD:
            self.over = True
            return {Action.REPORT}
        if event is Event.COMPLETE_UNKNOWN and not self.claimed:
            return self._claim()  # it waits for the offer
        if event is Event.CLAIM_HELD:
            self.held = True
            self.grants += 1
            self.asked += 1
            return {Action.COMPLETE}
        if event not in {*ASKING, Event.COMPLETE_UNKNOWN}:
            return set()
        self.failed, self.over = cause, True
        return {Action.REPORT} | (set() if event in REFUSALS else {Action.RELEASE})

    def _claim(self) -> set[Action]:
        claims = set() if self.claimed else {Action.CLAIM}
        self.claimed = True
        return claims

    @property
    def state(self) -> BlockState:
        if self.over:
            return BlockState.FREE
        if not self.posted:
            return BlockState.RESERVED
        return BlockState.IN_FLIGHT if self.failed is None else BlockState.QUARANTINED


class FetchMachine(RuleBasedStateMachine):
    fetches = Bundle("fetches")
    leases = Bundle("leases")

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.ledger = Ledger()
        self.ledger.know([CacheGroup(index=0, block_size=4, num_blocks=BLOCKS)])
        self.table = FetchTable(self.ledger)
        self.open: dict[str, Story] = {}
        """By request."""
        self.lent: dict[int, tuple[Holding, set[int]]] = {}
        self.numbers = 0
        self.causes: Counter[str] = Counter()
        self.good: set[tuple[bool, bool, bool]] = set()
        """How fetches came to a good end: deferred, claimed, asked for again."""

    @rule(
        target=fetches,
        request=st.sampled_from(["r0", "r1", "r2", "r3"]),
        blocks=st.sets(st.integers(0, BLOCKS - 1), max_size=4),
        deferred=st.booleans(),
    )
    def start(self, request: str, blocks: set[int], deferred: bool) -> Story:
        self.numbers += 1
        record = Fetch(
            fetch_id=f"f{self.numbers}",
            request_id=request,
            transfer_id="t",
            token=b"",
            peer="p",
            started=self.now,
            deadline=self.now + TIMEOUT,
            deferred=deferred,
        )
        if request in self.open:
            assert not self.table.add(record)
            return self.open[request]
        assert self.table.add(record)
        taken = set().union(
            *(story.blocks for story in self.open.values()),
            *(lent for _, lent in self.lent.values()),
        )
        story = self.open[request] = Story(record, set() if blocks & taken else blocks)
        written = {0: np.array(sorted(blocks), np.int32)}
        if blocks & taken:
            with pytest.raises(BlockInUseError):
                self.table.reserve(record, written)
            self.happens(story, Event.CONNECT_FAILED, "block_in_use: x", 1)
        else:
            self.table.reserve(record, written)
        return story

    @rule(
        story=fetches,
        event=st.sampled_from(Event),
        cause=st.sampled_from(["x: one", "y: two"]),
        good=st.booleans(),
        times=st.integers(1, 2),
    )
    def something_happens(
        self, story: Story, event: Event, cause: str, good: bool, times: int
    ) -> None:
        """Also to a fetch that ended long ago."""
        fine = event in FINE
        ends_well = event is Event.RANKS_DONE and good
        self.happens(story, event, "" if fine or ends_well else cause, times)

    @rule(story=fetches, steps=st.integers(1, 7), how=st.sampled_from(sorted(WAYS)))
    def all_goes_well(self, story: Story, steps: int, how: str) -> None:
        """Up to some step."""
        for event in (Event.CONNECTED, *WAYS[how], Event.COMPLETE_HELD)[:steps]:
            self.happens(story, event, "", 1)

    @rule(seconds=st.sampled_from([1.0, 5.0, TIMEOUT]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        overdue = {record.fetch_id for record in self.table.overdue(self.now)}
        late = [story for story in self.open.values() if self.now >= story.record.deadline]
        assert overdue == {story.record.fetch_id for story in late}
        for story in late:
            self.happens(story, Event.DEADLINE, "timed_out: x", 1)

    @rule(target=leases, block=st.integers(0, BLOCKS - 1))
    def lend(self, block: int) -> int:
        """The engine offers a block, which no fetch may be writing then."""
        self.numbers += 1
        blocks = [np.array([block], np.int32)]
        if any(block in story.blocks for story in self.open.values()):
            with pytest.raises(BlockInUseError):
                self.ledger.lend(blocks)
        else:
            self.lent[self.numbers] = (self.ledger.lend(blocks), {block})
        return self.numbers

    @rule(number=consumes(leases))
    def lease_ends(self, number: int) -> None:
        if number in self.lent:
            self.lent.pop(number)[0].move(BlockState.FREE)

    def happens(self, story: Story, event: Event, cause: str, times: int) -> None:
        record = story.record
        for _ in range(times):
            was_over = story.over
            expected = story.expect(event, cause)
            actions = self.table.feed(record, event, self.now, cause)
            assert set(actions) == expected
            assert len(actions) == len(expected)
            story.done.update(actions)
            assert record.terminal == story.over
            if Action.REPORT in actions:
                assert actions[-1] is Action.REPORT, "nothing is left to do after it"
                assert not was_over
                assert not story.may_be_written
                assert record.cause == (story.failed or "")
                good = record.state is FetchState.DONE
                assert good == (story.failed is None)
                assert not good or (event is Event.COMPLETE_HELD and story.ranks_done)
                assert not good or story.asked
                assert not good or story.held or not record.deferred
                self.table.remove(record)
                assert self.open.pop(record.request_id) is story
                self.causes[(story.failed or "ok").split(":")[0]] += 1
                if good:
                    self.good.add((record.deferred, story.claimed, story.grants > 0))
            assert record.claimed == story.claimed
            assert record.claim_held == story.held
        assert story.done[Action.REPORT] == int(story.over)
        assert story.done[Action.COMPLETE] == story.asked <= 1 + story.grants
        once = [count for action, count in story.done.items() if action is not Action.COMPLETE]
        assert max(once, default=0) <= 1, "each is done once at most"

    @invariant()
    def every_block_is_in_one_state(self) -> None:
        counts: Counter[str] = Counter()
        for story in self.open.values():
            counts[story.state.value] += len(story.blocks)
        counts["offered"] = len(set().union(*(lent for _, lent in self.lent.values())))
        counts["free"] = BLOCKS - sum(counts.values())
        assert self.ledger.counts() == {state.value: counts[state.value] for state in BlockState}

    @invariant()
    def counts_are_the_models(self) -> None:
        assert len(self.table) == len(self.open) == sum(self.table.counts().values())
        assert self.table.ended == self.causes
        quarantined = sum(s.state is BlockState.QUARANTINED for s in self.open.values())
        assert self.table.counts()["draining"] == quarantined
        for request, story in self.open.items():
            assert self.table.of_request(request) is story.record
            assert self.table.get(story.record.fetch_id) is story.record

    def teardown(self) -> None:
        """Whatever happened: once its deadline has passed and its ranks have ended, it is over."""
        for holding, _ in self.lent.values():
            holding.move(BlockState.FREE)
        self.lent.clear()
        self.time_passes(TIMEOUT)
        for story in list(self.open.values()):
            assert story.may_be_written
            self.happens(story, Event.RANKS_DONE, "", 1)
        self.counts_are_the_models()
        assert len(self.table) == 0
        assert self.ledger.counts()["free"] == BLOCKS


TestFetches = FetchMachine.TestCase


@pytest.mark.parametrize("seed", range(4))
def test_many_fetches(seed: int) -> None:
    """As above, but drawn by the dozen: what takes many events in one order is rare."""
    rng = random.Random(seed)
    ends: set[tuple[bool, bool, bool]] = set()
    events = [*Event, *FINE, Event.RANKS_DONE]
    for _ in range(150):
        machine = FetchMachine()
        stories: list[Story] = []
        for _ in range(30):
            if rng.random() < 0.2:
                blocks = set(rng.sample(range(BLOCKS), rng.randint(0, 3)))
                deferred = rng.random() < 0.3
                stories.append(machine.start(f"r{rng.randint(0, 3)}", blocks, deferred))
            elif stories and rng.random() < 0.2:
                story, how = rng.choice(stories[-3:]), rng.choice(sorted(WAYS))
                machine.all_goes_well(story, rng.randint(1, 7), how)
            elif stories:
                story, event = rng.choice(stories[-3:]), rng.choice(events)
                cause, good = rng.choice(["x: one", "y: two"]), rng.random() < 0.5
                machine.something_happens(story, event, cause, good, rng.randint(1, 2))
            machine.every_block_is_in_one_state()
            machine.counts_are_the_models()
        machine.teardown()
        ends |= machine.good
    short, lasting, overtaken = (False, False, False), (False, True, False), (False, True, True)
    assert ends >= {short, lasting, overtaken, (True, True, False)}, "a good mixture"


@pytest.mark.slow
@pytest.mark.timeout(1800)
class TestFetchesAtLength(FetchMachine.TestCase):
    settings = settings(max_examples=10 * settings.default.max_examples, stateful_step_count=100)
