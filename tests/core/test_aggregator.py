"""KVOutputAggregator: the classic results, and what it refuses.

Its memory is tested in test_aggregator_memory.py, how values are combined in
test_aggregator_values.py, and any order of events in test_aggregator_orders.py.
"""

from __future__ import annotations

import copy
from types import SimpleNamespace

import pytest
from steps import Step, combined, received, sent

from kvagent.core.aggregator import KVOutputAggregator
from kvagent.core.output import KVConnectorOutput
from kvagent.errors import AggregationError


class Nothing(Step):
    def __bool__(self) -> bool:
        return False


# ---------------------------------------------------------------- classic results


def test_steps_without_reports():
    aggregator = KVOutputAggregator(2)
    first, second = Step(), Step()
    assert aggregator.aggregate([first, second]) is first
    assert first.kv_connector_output == KVConnectorOutput(expected_finished_count=2)
    assert first.kv_connector_output.is_empty()
    assert second.kv_connector_output is None


def test_requests_are_counted_over_calls():
    aggregator = KVOutputAggregator(2)
    output = combined(
        aggregator,
        Step(finished_sending={"s"}, finished_recving={"r"}),
        Step(invalid_block_ids={1}),
    )
    assert output == KVConnectorOutput(invalid_block_ids={1}, expected_finished_count=2)
    output = combined(aggregator, Step(invalid_block_ids={2}), sent("s"))
    assert output.finished_sending == {"s"}
    assert output.finished_recving is None
    assert output.invalid_block_ids == {2}
    output = combined(
        aggregator,
        Step(invalid_block_ids={3, 4}),
        Step(finished_recving={"r"}, invalid_block_ids={4, 5}),
    )
    assert output.finished_sending is None
    assert output.finished_recving == {"r"}
    assert output.invalid_block_ids == {3, 4, 5}
    assert aggregator.num_counting == 0


def test_directions_are_counted_apart():
    aggregator = KVOutputAggregator(2)
    assert combined(aggregator, sent("a"), received("a")).is_empty()
    output = combined(aggregator, received("a"), sent("a"))
    assert output.finished_sending == output.finished_recving == {"a"}


def test_the_output_of_another_rank():
    aggregator = KVOutputAggregator(2)
    steps = [sent("a"), sent("a")]
    assert aggregator.aggregate(steps, output_rank=1) is steps[1]
    assert steps[1].kv_connector_output.finished_sending == {"a"}
    assert aggregator.aggregate([sent("b"), sent("b")], 1) is not None


def test_expectation_changes_for_requests_first_seen_after_that():
    aggregator = KVOutputAggregator(3)
    assert combined(aggregator, sent("old")).expected_finished_count == 3
    output = combined(
        aggregator,
        Step(finished_recving={"new"}, expected_finished_count=2),
        Step(finished_sending={"old"}, finished_recving={"new", "newer"}),
        Step(),
    )
    assert output.expected_finished_count == 2
    assert output.finished_recving == {"new"}
    assert output.finished_sending is None, "two ranks have reported it, and it needs three"
    output = combined(aggregator, Step(), Step(), Step(finished_sending={"old"}))
    assert output.finished_sending == {"old"}
    assert combined(aggregator, received("newer")).finished_recving == {"newer"}


@pytest.mark.parametrize("count", [0, -1])
def test_an_expectation_of_nothing_changes_nothing(count: int):
    aggregator = KVOutputAggregator(2)
    output = combined(
        aggregator, Step(finished_sending={"a"}, expected_finished_count=count), Step()
    )
    assert output.expected_finished_count == 2
    assert output.finished_sending is None


@pytest.mark.parametrize(("said", "expected"), [(None, 4), (0, 4), (2, 2)])
def test_from_connector(said: int | None, expected: int):
    connector = SimpleNamespace(get_finished_count=lambda: said)
    aggregator = KVOutputAggregator.from_connector(connector, 4)
    assert combined(aggregator, Step()).expected_finished_count == expected


def test_classic_outputs_without_failures():
    classic = SimpleNamespace(
        finished_sending={"s"},
        finished_recving={"r"},
        invalid_block_ids=set(),
        kv_connector_stats=None,
        kv_cache_events=None,
        kv_connector_worker_meta=None,
        expected_finished_count=0,
    )
    output = combined(KVOutputAggregator(1), SimpleNamespace(kv_connector_output=classic))
    assert isinstance(output, KVConnectorOutput)
    assert (output.finished_sending, output.finished_recving) == ({"s"}, {"r"})


# ---------------------------------------------------------------- steps without an output


def test_nothing_comes_of_a_missing_output():
    aggregator = KVOutputAggregator(2)
    assert aggregator.aggregate([None, None]) is None
    assert aggregator.aggregate([Nothing(), Step()]) is None
    assert aggregator.aggregate([Step(), None], output_rank=1) is None


def test_reports_of_a_step_without_output_come_with_the_next():
    aggregator = KVOutputAggregator(2)
    combined(aggregator, received(a="lost"), Step())
    report = Step(finished_recving={"a"}, invalid_block_ids={7}, expected_finished_count=1)
    before = copy.deepcopy(report.kv_connector_output)
    assert aggregator.aggregate([None, report]) is None
    assert report.kv_connector_output == before
    output = combined(aggregator, Step(), Step())
    assert output == KVConnectorOutput(
        finished_recving={"a"},
        failed_recving={"a": "lost"},
        invalid_block_ids={7},
        expected_finished_count=1,
    )
    assert combined(aggregator, Step(), Step()).is_empty()


# ---------------------------------------------------------------- refusals


@pytest.mark.parametrize("rank", [-1, 2, 100])
def test_an_output_rank_out_of_range_is_refused(rank: int):
    aggregator = KVOutputAggregator(1)
    with pytest.raises(AggregationError, match=str(rank)):
        aggregator.aggregate([sent("a"), sent("a")], output_rank=rank)
    assert aggregator.num_counting == 0


def test_no_outputs_at_all_are_refused():
    with pytest.raises(AggregationError):
        KVOutputAggregator(1).aggregate([])


def test_more_outputs_than_the_engine_has_ranks_are_refused():
    connector = SimpleNamespace(get_finished_count=lambda: None)
    aggregator = KVOutputAggregator.from_connector(connector, 2)
    with pytest.raises(AggregationError, match=r"3.*2"):
        aggregator.aggregate([sent("a"), sent("a"), sent("a")])
    assert aggregator.num_counting == 0
    assert combined(aggregator, sent("a"), sent("a")).finished_sending == {"a"}


def test_a_missing_output_of_another_rank_is_refused_and_nothing_is_counted():
    aggregator = KVOutputAggregator(1)
    with pytest.raises(AggregationError, match="rank 1"):
        aggregator.aggregate([sent("a"), None])
    assert aggregator.num_counting == 0
    assert combined(aggregator, sent("a"), Step()).finished_sending == {"a"}


@pytest.mark.parametrize("count", [0, -3])
def test_an_expectation_below_one_is_refused(count: int):
    with pytest.raises(AggregationError, match=str(count)):
        KVOutputAggregator(count)
