"""Tickets that are given away before their bytes are there: nothing is read before the claim."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvagent.core.fetch import Action, Event, Fetch, FetchState, FetchTable
from kvagent.core.lease import LeaseTable, Verdict, ticket_digest
from kvagent.core.ledger import Ledger
from kvagent.core.regions import CacheGroup

BLOCKS = (b"\x01\0\0\0\x02\0\0\0",)
TOKEN = b"t" * 16


def fetch() -> Fetch:
    return Fetch(
        fetch_id="f",
        request_id="r",
        transfer_id="t",
        token=b"",
        peer="p",
        started=0.0,
        deadline=60.0,
        deferred=True,
    )


def run(one: Fetch, *events: Event) -> list[Action]:
    return [action for event in events for action in one.on(event, 1.0, f"{event.value}: x")]


def test_reading_starts_with_the_grant() -> None:
    one = fetch()
    assert run(one, Event.CONNECTED) == [Action.CLAIM]
    assert one.state is FetchState.CLAIMING
    assert run(one, Event.CLAIM_HELD) == [Action.START_READS]
    assert one.state is FetchState.READING
    assert one.reading_since == 1.0
    assert one.on(Event.RANKS_DONE, 2.0) == [Action.COMPLETE]
    assert one.on(Event.COMPLETE_HELD, 3.0) == [Action.REPORT]


@pytest.mark.parametrize(
    ("event", "actions"),
    [
        (Event.CLAIM_REFUSED, [Action.REPORT]),
        (Event.CANCEL, [Action.RELEASE, Action.REPORT]),
        (Event.DEADLINE, [Action.RELEASE, Action.REPORT]),
        (Event.RANK_FAILED, [Action.RELEASE, Action.REPORT]),
    ],
)
def test_it_ends_at_once_while_nothing_is_posted(event: Event, actions: list[Action]) -> None:
    one = fetch()
    run(one, Event.CONNECTED)
    assert run(one, event) == actions
    assert one.state is FetchState.FAILED
    assert run(one, Event.CLAIM_HELD) == []  # it comes too late


@given(st.lists(st.sampled_from(list(Event)), max_size=12))
def test_any_order_of_events(events: list[Event]) -> None:
    """Reads begin only after a granted claim, and a report comes once, never while they go on."""
    ledger = Ledger()
    ledger.know([CacheGroup(index=0, block_size=4, num_blocks=8)])
    table, one = FetchTable(ledger), fetch()
    table.add(one)
    table.reserve(one, {0: np.array([1, 2], np.int32)})
    reading, reports, granted = False, 0, False
    for event in events:
        before = one.state
        granted = granted or (event is Event.CLAIM_HELD and before is FetchState.CLAIMING)
        for action in table.feed(one, event, 1.0, f"{event.value}: x"):
            if action is Action.START_READS:
                assert granted
                assert not reading
                reading = True
            if action is Action.REPORT:
                reports += 1
                assert not reading or one.ranks_done
        assert reports == (1 if one.terminal else 0)
    assert (ledger.counts()["free"] == 8) == one.terminal


def test_the_digest_knows() -> None:
    assert ticket_digest(BLOCKS, 8, deferred=True) != ticket_digest(BLOCKS, 8)
    table = LeaseTable(lease_seconds=10)
    table.offer(0, "t", TOKEN, "r", BLOCKS, 8, deferred=True)
    assert table.claim(0, "t", TOKEN, "f", ticket_digest(BLOCKS, 8)) is Verdict.MISMATCH
    assert table.claim(0, "t", TOKEN, "f", ticket_digest(BLOCKS, 8, True)) is Verdict.HELD


def test_a_claim_waits_for_an_offer_that_is_coming() -> None:
    table = LeaseTable(lease_seconds=10, park_seconds=2)
    digest = ticket_digest(BLOCKS, 8, deferred=True)
    assert table.claim(0, "t", TOKEN, "f", digest) is None
    assert table.claim(0, "other", TOKEN, "g", digest) is None
    assert table.sweep(5, {"t"}) == ["g"]
    table.offer(6, "t", TOKEN, "r", BLOCKS, 8, deferred=True)
    assert table.answer_parked(6, "t") == ("f", Verdict.HELD)


def test_a_complete_does_not_claim_it() -> None:
    """What was read before the claim was granted may be anything."""
    table = LeaseTable(lease_seconds=10)
    digest = ticket_digest(BLOCKS, 8, deferred=True)
    table.offer(0, "t", TOKEN, "r", BLOCKS, 8, deferred=True)
    for wrong in (digest, ticket_digest(BLOCKS, 8)):
        assert table.complete(1, "t", TOKEN, "f", wrong) is Verdict.UNKNOWN
    assert table.counts()["offered"] == 1
    assert table.claim(2, "t", TOKEN, "f", digest) is Verdict.HELD
    assert table.complete(3, "t", TOKEN, "f", digest) is Verdict.HELD


def test_it_is_claimed_once() -> None:
    one = fetch()
    assert run(one, Event.CONNECTED, Event.LASTS) == [Action.CLAIM]
    assert run(one, Event.CLAIM_HELD, Event.LASTS) == [Action.START_READS]
    assert run(one, Event.LASTS) == []


def test_one_that_the_producer_forgot_fails() -> None:
    one = fetch()
    run(one, Event.CONNECTED, Event.CLAIM_HELD)
    assert one.on(Event.RANKS_DONE, 2.0) == [Action.COMPLETE]
    assert one.on(Event.COMPLETE_UNKNOWN, 3.0, "unknown: x") == [Action.REPORT]
    assert one.cause == "unknown: x"
