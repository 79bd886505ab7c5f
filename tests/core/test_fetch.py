"""The consumer's fetch machine: the ways through its table, and any order of events."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvagent.core.fetch import Action, Event, Fetch, FetchState, FetchTable
from kvagent.core.ledger import Ledger
from kvagent.core.regions import CacheGroup
from kvagent.errors import BlockInUseError


def fetch(request: str = "r", deadline: float = 60.0) -> Fetch:
    return Fetch(
        fetch_id=f"f-{request}",
        request_id=request,
        transfer_id="t",
        token=b"",
        peer="p",
        started=0.0,
        deadline=deadline,
    )


def run(one: Fetch, *events: Event | tuple[Event, str]) -> list[Action]:
    actions: list[Action] = []
    for event in events:
        name, cause = event if isinstance(event, tuple) else (event, "")
        actions += one.on(name, 1.0, cause)
    return actions


def test_a_short_one_is_never_claimed() -> None:
    one = fetch()
    assert run(one, Event.CONNECTED) == [Action.START_READS]
    assert run(one, Event.RANKS_DONE) == [Action.COMPLETE]
    assert run(one, Event.LASTS) == [], "it asks already"
    assert run(one, Event.COMPLETE_HELD) == [Action.REPORT]
    assert one.state is FetchState.DONE
    assert one.cause == ""
    assert not one.claimed


def test_one_that_lasts_is_claimed_once() -> None:
    one = fetch()
    assert run(one, Event.CONNECTED, Event.LASTS, Event.LASTS) == [Action.START_READS, Action.CLAIM]
    assert one.claimed
    assert not one.claim_held
    assert run(one, Event.CLAIM_HELD) == []
    assert one.claim_held
    assert run(one, Event.LASTS) == []
    assert run(one, Event.RANKS_DONE) == [Action.COMPLETE]
    assert run(one, Event.COMPLETE_HELD) == [Action.REPORT]
    assert one.state is FetchState.DONE


def test_reads_may_end_before_the_claim_is_granted() -> None:
    one = fetch()
    assert run(one, Event.CONNECTED, Event.LASTS, Event.RANKS_DONE)[2:] == []
    assert run(one, Event.CLAIM_HELD) == [Action.COMPLETE]


@pytest.mark.parametrize("late", [Event.CLAIM_REFUSED, Event.LEASE_LOST])
def test_no_claim_no_good(late: Event) -> None:
    one = fetch()
    run(one, Event.CONNECTED, Event.LASTS, Event.RANKS_DONE)
    assert run(one, (late, "expired: x")) == [Action.REPORT]
    assert one.state is FetchState.FAILED
    assert one.cause == "expired: x"


@pytest.mark.parametrize("late", [Event.CLAIM_REFUSED, Event.LEASE_LOST])
def test_what_was_refused_is_read_no_further(late: Event) -> None:
    one = fetch()
    run(one, Event.CONNECTED, Event.LASTS)
    assert run(one, (late, "used: x")) == [Action.STOP_READS]
    assert run(one, Event.RANKS_DONE) == [Action.REPORT]
    assert one.cause == "used: x"


def test_an_offer_that_is_still_on_its_way_is_waited_for_by_a_claim() -> None:
    one = fetch()
    run(one, Event.CONNECTED, Event.RANKS_DONE)
    assert run(one, (Event.COMPLETE_UNKNOWN, "unknown: x")) == [Action.CLAIM]
    assert one.state is FetchState.VALIDATING
    assert one.cause == ""
    assert run(one, Event.CLAIM_HELD) == [Action.COMPLETE]
    assert one.claim_held, "it is renewed"
    assert run(one, Event.COMPLETE_HELD) == [Action.REPORT]
    assert one.state is FetchState.DONE


def test_an_offer_that_never_comes() -> None:
    one = fetch()
    run(one, Event.CONNECTED, Event.RANKS_DONE, (Event.COMPLETE_UNKNOWN, "unknown: x"))
    assert run(one, (Event.CLAIM_REFUSED, "unknown: still")) == [Action.REPORT]
    assert one.state is FetchState.FAILED
    assert one.cause == "unknown: still"


@pytest.mark.parametrize("claim", ["while it was read", "of the offer to come"])
def test_what_is_unknown_although_it_was_claimed_fails(claim: str) -> None:
    """The producer has forgotten it: there is nothing to wait for."""
    one = fetch()
    if claim == "while it was read":
        run(one, Event.CONNECTED, Event.LASTS, Event.CLAIM_HELD, Event.RANKS_DONE)
    else:
        run(one, Event.CONNECTED, Event.RANKS_DONE, Event.COMPLETE_UNKNOWN, Event.CLAIM_HELD)
    assert run(one, (Event.COMPLETE_UNKNOWN, "unknown: x")) == [Action.REPORT]
    assert one.cause == "unknown: x"


@pytest.mark.parametrize("how", [Event.CANCEL, Event.DEADLINE])
def test_an_end_while_the_offer_is_waited_for(how: Event) -> None:
    one = fetch()
    run(one, Event.CONNECTED, Event.RANKS_DONE, (Event.COMPLETE_UNKNOWN, "unknown: x"))
    assert run(one, (how, "y")) == [Action.RELEASE, Action.REPORT]
    assert one.cause == "y"
    assert run(one, Event.CLAIM_HELD) == []


def test_failure_waits_for_all_ranks_and_keeps_its_first_cause() -> None:
    one = fetch()
    run(one, Event.CONNECTED, Event.CLAIM_HELD)
    assert run(one, (Event.RANK_FAILED, "peer_gone: a")) == [Action.STOP_READS, Action.RELEASE]
    assert run(one, (Event.RANK_FAILED, "cancelled: b"), Event.DEADLINE, Event.CANCEL) == []
    assert one.state is FetchState.DRAINING
    assert run(one, (Event.RANKS_DONE, "peer_gone: a")) == [Action.REPORT]
    assert one.cause == "peer_gone: a"


def test_stale_answer_fails_what_was_read() -> None:
    one = fetch()
    run(one, Event.CONNECTED, Event.CLAIM_HELD, Event.RANKS_DONE)
    assert run(one, (Event.COMPLETE_REFUSED, "expired")) == [Action.REPORT]
    assert one.cause == "expired"


def test_cancel_before_anything_was_posted_ends_at_once() -> None:
    one = fetch()
    assert run(one, (Event.CANCEL, "cancelled")) == [Action.RELEASE, Action.REPORT]


EVENTS = st.tuples(st.sampled_from(Event), st.sampled_from(["", "x: one", "y: two"]))


@given(st.lists(EVENTS, max_size=40))
def test_any_order_of_events(events: list[tuple[Event, str]]) -> None:
    one = fetch()
    reports = claims = 0
    posted = done = asked = False
    for event, cause in events:
        before = one.state
        actions = one.on(event, 1.0, cause)
        posted |= Action.START_READS in actions
        if event is Event.RANKS_DONE and before in (FetchState.READING, FetchState.DRAINING):
            done = True
        asked |= Action.COMPLETE in actions
        reports += actions.count(Action.REPORT)
        if Action.REPORT in actions:
            assert one.terminal
            assert done or not posted, "reported while a rank may still write"
        if Action.CLAIM in actions:
            assert event in (Event.LASTS, Event.COMPLETE_UNKNOWN)
            claims += 1
        if Action.COMPLETE in actions:
            assert done
        if one.state is FetchState.DONE and before is not FetchState.DONE:
            assert event is Event.COMPLETE_HELD
            assert asked
        assert claims == int(one.claimed)
        assert claims <= 1
        assert reports == int(one.terminal)
    # Whatever happened, these bring it to an end.
    if not one.terminal:
        tail = one.on(Event.CANCEL, 2.0, "cancelled") + one.on(Event.RANKS_DONE, 2.0, "")
        assert one.terminal
        assert tail.count(Action.REPORT) == 1


@pytest.fixture
def ledger() -> Ledger:
    ledger = Ledger()
    ledger.know([CacheGroup(index=0, block_size=4, num_blocks=8)])
    return ledger


@pytest.fixture
def table(ledger: Ledger) -> FetchTable:
    return FetchTable(ledger)


def add(table: FetchTable, request: str, *blocks: int, deadline: float = 60.0) -> Fetch:
    one = fetch(request, deadline)
    assert table.add(one)
    table.reserve(one, {0: np.array(blocks, np.int32)})
    return one


def test_table(table: FetchTable) -> None:
    one, two = add(table, "a", deadline=5), add(table, "b", deadline=9)
    assert not table.add(fetch("a"))
    assert table.of_request("a") is one
    assert table.get("f-b") is two
    assert table.overdue(6) == [one]
    assert table.counts()["connecting"] == 2
    table.feed(one, Event.CANCEL, 6, "cancelled: x")
    table.remove(one)
    assert table.of_request("a") is None
    assert table.ended == {"cancelled": 1}
    assert len(table) == 1
    assert add(table, "a") is not one, "the request may be fetched again"


def test_blocks_are_kept_until_the_last_rank_is_terminal(table: FetchTable, ledger: Ledger) -> None:
    one = add(table, "a", 1, 2, 3)
    assert ledger.counts()["reserved"] == 3
    table.feed(one, Event.CONNECTED, 1)
    assert ledger.counts()["in_flight"] == 3
    table.feed(one, Event.CANCEL, 2, "cancelled")
    assert ledger.counts()["quarantined"] == 3
    assert table.feed(one, Event.RANKS_DONE, 3) == [Action.REPORT]
    assert ledger.counts()["free"] == 8


def test_blocks_are_in_flight_until_the_producer_says_that_they_are_good(
    table: FetchTable, ledger: Ledger
) -> None:
    one = add(table, "a", 1)
    for event in (
        Event.CONNECTED,
        Event.RANKS_DONE,
        Event.COMPLETE_UNKNOWN,
        Event.CLAIM_HELD,
    ):
        table.feed(one, event, 1)
        assert ledger.counts()["in_flight"] == 1
    table.feed(one, Event.COMPLETE_HELD, 2)
    assert ledger.counts()["free"] == 8


def test_a_fetch_that_may_not_have_its_blocks_holds_none(table: FetchTable, ledger: Ledger) -> None:
    add(table, "a", 1, 2)
    two = fetch("b")
    table.add(two)
    with pytest.raises(BlockInUseError, match="block 2 of group 0 is reserved"):
        table.reserve(two, {0: np.array([2, 3], np.int32)})
    assert table.feed(two, Event.CONNECT_FAILED, 1, "block_in_use: x")[-1] is Action.REPORT
    assert ledger.counts() | {"reserved": 2, "free": 6} == ledger.counts()
