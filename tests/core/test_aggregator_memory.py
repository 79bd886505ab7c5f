"""KVOutputAggregator: ranks counted as a set, failures kept, and nothing left behind."""

from __future__ import annotations

import copy

import pytest
from steps import Step, combined, received, sent

from kvagent.core import tally
from kvagent.core.aggregator import KVOutputAggregator

# ---------------------------------------------------------------- ranks and failures


def test_a_rank_that_reports_twice_counts_once():
    aggregator = KVOutputAggregator(2)
    for _ in range(3):
        assert combined(aggregator, received("a"), Step()).is_empty()
    assert combined(aggregator, Step(), received("a")).finished_recving == {"a"}


def test_late_and_repeated_reports_of_a_finished_request_change_nothing():
    aggregator = KVOutputAggregator(2)
    combined(aggregator, received("a"), received("a"))
    assert combined(aggregator, received("a"), received(a="late")).is_empty()
    assert combined(aggregator, received("a"), received("a"), Step()).is_empty()
    assert aggregator.num_counting == 0


def test_a_failure_sticks_and_comes_out_once_with_the_request():
    aggregator = KVOutputAggregator(3)
    assert combined(aggregator, Step(), received(a="peer gone"), Step()).failed_recving == {}
    assert combined(aggregator, received("a"), Step(), Step()).failed_recving == {}
    output = combined(aggregator, Step(), Step(), received(a="cancelled"))
    assert output.finished_recving == {"a"}
    assert output.failed_recving == {"a": "peer gone"}, "the first cause"
    output = combined(aggregator, received("b"), received("b"), received("b"))
    assert (output.finished_recving, output.failed_recving) == ({"b"}, {})


def test_a_failure_alone_does_not_finish_a_request():
    """The rank may still have reads in flight: it has finished when it says so."""
    aggregator = KVOutputAggregator(1)
    assert combined(aggregator, Step(failed_recving={"a": "peer gone"})).is_empty()
    output = combined(aggregator, received("a"))
    assert output.finished_recving == {"a"}
    assert output.failed_recving == {"a": "peer gone"}


def test_a_failure_in_the_step_of_completion_counts_whatever_its_rank():
    aggregator = KVOutputAggregator(1)
    output = combined(aggregator, received("a"), received(a="late"))
    assert output.failed_recving == {"a": "late"}


def test_inputs_are_left_alone():
    aggregator = KVOutputAggregator(2)
    steps = [
        Step(finished_sending={"a"}, invalid_block_ids={1}),
        Step(finished_sending={"a"}, finished_recving={"b"}, failed_recving={"b": "x"}),
        Step(invalid_block_ids={2}, expected_finished_count=2),
    ]
    inputs = [step.kv_connector_output for step in steps]
    before = copy.deepcopy(inputs)
    output = combined(aggregator, *steps)
    output.finished_sending.add("other")
    output.invalid_block_ids.add(9)
    assert inputs == before
    assert [step.kv_connector_output for step in steps[1:]] == before[1:]


# ---------------------------------------------------------------- forget


def test_forget_makes_an_id_unknown():
    aggregator = KVOutputAggregator(2)
    aggregator.forget("never seen")
    combined(aggregator, Step(finished_sending={"a"}, finished_recving={"a"}), Step())
    assert aggregator.num_counting == 2
    aggregator.forget("a")
    assert aggregator.num_counting == 0
    assert combined(aggregator, Step(), received("a")).is_empty(), "rank 0 has to say it again"
    assert combined(aggregator, received("a"), Step()).finished_recving == {"a"}
    aggregator.forget("a")
    assert combined(aggregator, received("a"), received("a")).finished_recving == {"a"}


def test_forget_reaches_requests_that_finished_long_ago():
    aggregator = KVOutputAggregator(1, max_age=10)
    combined(aggregator, received("a"), now=0.0)
    combined(aggregator, received("b"), now=10.5)
    assert combined(aggregator, received("a", "b")).is_empty()
    aggregator.forget("a")
    assert combined(aggregator, received("a", "b")).finished_recving == {"a"}


def test_forget_holds_back_what_was_waiting_for_an_output():
    aggregator = KVOutputAggregator(1)
    assert aggregator.aggregate([None, received(a="x")]) is None
    aggregator.forget("a")
    assert combined(aggregator, Step(), Step()).is_empty()


# ---------------------------------------------------------------- age


def test_a_request_whose_rank_died_leaves_nothing_behind():
    aggregator = KVOutputAggregator(2, max_age=10)
    combined(aggregator, received(a="x"), Step(), now=100.0)
    combined(aggregator, sent("b"), Step(), now=105.0)
    assert aggregator.sweep(110.0) == set()
    assert aggregator.sweep(110.5) == {"a"}
    assert combined(aggregator, Step(), received("a"), now=111.0).is_empty()
    assert aggregator.sweep(115.5) == {"b"}
    assert aggregator.sweep(200.0) == {"a"}
    assert aggregator.num_counting == 0


def test_a_report_that_arrives_with_the_sweep_still_completes():
    aggregator = KVOutputAggregator(2, max_age=10)
    combined(aggregator, received("a"), Step(), now=0.0)
    assert combined(aggregator, Step(), received("a"), now=1000.0).finished_recving == {"a"}


def test_what_is_complete_is_never_too_old():
    aggregator = KVOutputAggregator(1, max_age=10)
    assert aggregator.aggregate([None, received("a")], now=0.0) is None
    assert aggregator.aggregate([None, Step()], now=1000.0) is None
    assert combined(aggregator, Step(), now=2000.0).finished_recving == {"a"}


def test_nothing_ages_without_a_clock():
    aggregator = KVOutputAggregator(2, max_age=0.0)
    combined(aggregator, received("a"), Step())
    combined(aggregator, Step(), Step())
    assert aggregator.sweep(5.0) == set(), "it is new to this clock"
    assert combined(aggregator, Step(), received("a")).finished_recving == {"a"}


def test_finished_requests_are_remembered_for_max_age_and_not_for_ever():
    aggregator = KVOutputAggregator(1, max_age=10)
    combined(aggregator, received("a"), now=0.0)
    for now in (5.0, 9.0, 10.0):
        assert combined(aggregator, received("a"), now=now).is_empty()
    aggregator.sweep(20.5)
    aggregator.sweep(31.0)
    assert combined(aggregator, received("a"), now=32.0).finished_recving == {"a"}


def test_memory_of_finished_requests_is_bounded_without_a_clock(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(tally, "MAX_DONE", 8)
    aggregator = KVOutputAggregator(1)
    for number in range(100):
        name = f"r{number}"
        assert combined(aggregator, received(name)).finished_recving == {name}
        for recent in range(max(0, number - 3), number + 1):
            assert combined(aggregator, received(f"r{recent}")).is_empty()
    assert combined(aggregator, received("r0")).finished_recving == {"r0"}
