"""The consumer's fetch machine: the ways through its table, and any order of events."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvagent.core.fetch import Action, Event, Fetch, FetchState, FetchTable


def fetch(request: str = "r", deadline: float = 60.0) -> Fetch:
    return Fetch(
        fetch_id=f"f-{request}",
        request_id=request,
        transfer_id="t",
        token=b"",
        peer="p",
        started=0.0,
        deadline=deadline,
        num_blocks=3,
    )


def run(one: Fetch, *events: Event | tuple[Event, str]) -> list[Action]:
    actions: list[Action] = []
    for event in events:
        name, cause = event if isinstance(event, tuple) else (event, "")
        actions += one.on(name, 1.0, cause)
    return actions


def test_good_path() -> None:
    one = fetch()
    assert run(one, Event.CONNECTED) == [Action.CLAIM, Action.START_READS]
    assert run(one, Event.CLAIM_HELD) == []
    assert run(one, Event.RANKS_DONE) == [Action.COMPLETE]
    assert run(one, Event.COMPLETE_HELD) == [Action.REPORT]
    assert one.state is FetchState.DONE
    assert one.cause == ""


def test_reads_may_end_before_the_claim_is_granted() -> None:
    one = fetch()
    assert run(one, Event.CONNECTED, Event.RANKS_DONE)[2:] == []
    assert run(one, Event.CLAIM_HELD) == [Action.COMPLETE]


@pytest.mark.parametrize("late", [Event.CLAIM_REFUSED, Event.LEASE_LOST])
def test_no_claim_no_good(late: Event) -> None:
    one = fetch()
    run(one, Event.CONNECTED, Event.RANKS_DONE)
    assert run(one, (late, "expired: x")) == [Action.REPORT]
    assert one.state is FetchState.FAILED
    assert one.cause == "expired: x"


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
    reports = 0
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
        if one.state is FetchState.DONE and before is not FetchState.DONE:
            assert event is Event.COMPLETE_HELD
            assert asked
            assert one.claim_held
        assert reports == int(one.terminal)
    # Whatever happened, these bring it to an end.
    if not one.terminal:
        tail = one.on(Event.CANCEL, 2.0, "cancelled") + one.on(Event.RANKS_DONE, 2.0, "")
        assert one.terminal
        assert tail.count(Action.REPORT) == 1


def test_table() -> None:
    table = FetchTable()
    one, two = fetch("a", 5), fetch("b", 9)
    assert table.add(one)
    assert table.add(two)
    assert not table.add(fetch("a"))
    assert table.of_request("a") is one
    assert table.overdue(6) == [one]
    run(one, Event.CONNECTED, (Event.CANCEL, "cancelled: x"))
    assert table.counts()["quarantined_blocks"] == 3
    run(one, Event.RANKS_DONE)
    table.remove(one)
    assert table.of_request("a") is None
    assert table.ended == {"cancelled": 1}
    assert len(table) == 1
