"""KVOutputAggregator: stats, metadata and cache events, each combined by its own methods."""

from __future__ import annotations

import copy

import pytest
from steps import Step

from kvagent.core.aggregator import KVOutputAggregator
from kvagent.core.output import KVConnectorOutput
from kvagent.core.stats import ReadStats
from kvagent.errors import AggregationError

FIELDS = ["kv_connector_stats", "kv_connector_worker_meta"]


class Lists:
    """Adds in place, and adopts the other's lists: the worst that a `aggregate()` may do."""

    def __init__(self, **data: list[int]) -> None:
        self.data = data

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Lists) and self.data == other.data

    def aggregate(self, other: Lists) -> Lists:
        for key, value in other.data.items():
            if key in self.data:
                self.data[key].extend(value)
            else:
                self.data[key] = value
        return self


class MoreLists(Lists):
    pass


class Other:
    def aggregate(self, other: Other) -> Other:
        return self


class Events:
    """Adds in place, and adopts the first list that it is given."""

    def __init__(self, *events: str, workers: int = 1) -> None:
        self.events = list(events)
        self.workers = workers

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Events) and vars(self) == vars(other)

    def get_all_events(self) -> list[str]:
        return self.events

    def add_events(self, events: list[str]) -> None:
        if self.events:
            self.events.extend(events)
        else:
            self.events = events

    def increment_workers(self, count: int = 1) -> None:
        self.workers += count


class OtherEvents(Events):
    pass


def aggregate(steps: list[Step], output_rank: int = 0) -> KVConnectorOutput:
    result = KVOutputAggregator(1).aggregate(steps, output_rank)
    assert result is not None
    assert result.kv_connector_output is not None
    return result.kv_connector_output


@pytest.mark.parametrize("name", FIELDS)
def test_values_are_folded_in_the_order_of_the_ranks(name: str):
    values = [Lists(a=[1]), Lists(b=[2]), Lists(a=[3], b=[4])]
    output = aggregate([Step(**{name: value}) for value in values])
    assert getattr(output, name) == Lists(a=[1, 3], b=[2, 4])


@pytest.mark.parametrize("name", FIELDS)
@pytest.mark.parametrize("output_rank", range(5))
def test_other_ranks_values_are_left_alone(name: str, output_rank: int):
    steps = [Step(), *(Step(**{name: Lists(**{key: [1]})}) for key in "abab")]
    inputs = [step.kv_connector_output for step in steps]
    before = copy.deepcopy(inputs)
    assert getattr(aggregate(steps, output_rank), name) == Lists(a=[1, 1], b=[1, 1])
    for rank in {0, 1, 2, 3, 4} - {output_rank}:
        assert inputs[rank] == before[rank]


@pytest.mark.parametrize("name", [*FIELDS, "kv_cache_events"])
def test_the_value_of_a_single_rank_is_passed_on_whatever_it_is(name: str):
    value = {"plain": "data"}
    output = aggregate([Step(), Step(**{name: value}), Step(finished_sending={"a"})])
    assert getattr(output, name) is value


@pytest.mark.parametrize("name", [*FIELDS, "kv_cache_events"])
def test_empty_values_are_none(name: str):
    output = aggregate([Step(**{name: {}}), Step(**{name: []})])
    assert getattr(output, name) is None


@pytest.mark.parametrize("name", FIELDS)
def test_values_of_different_types_are_refused_and_nothing_is_counted(name: str):
    aggregator = KVOutputAggregator(1)
    steps = [
        Step(finished_sending={"a"}, kv_cache_events=Events("x"), **{name: Lists(a=[1])}),
        Step(kv_cache_events=Events("y"), **{name: Other()}),
    ]
    with pytest.raises(AggregationError, match=f"{name}: rank 0 sent Lists, rank 1 sent Other"):
        aggregator.aggregate(steps)
    assert aggregator.num_counting == 0
    assert steps[0].kv_connector_output == KVConnectorOutput(
        finished_sending={"a"}, kv_cache_events=Events("x"), **{name: Lists(a=[1])}
    )


@pytest.mark.parametrize("name", FIELDS)
def test_derived_types_agree(name: str):
    for pair in ([Lists(a=[1]), MoreLists(a=[2])], [MoreLists(a=[1]), Lists(a=[2])]):
        output = aggregate([Step(**{name: value}) for value in pair])
        assert getattr(output, name).data == {"a": [1, 2]}


@pytest.mark.parametrize("name", [*FIELDS, "kv_cache_events"])
def test_plain_values_of_several_ranks_cannot_be_combined(name: str):
    with pytest.raises(AggregationError, match=f"{name}.*dict"):
        aggregate([Step(**{name: {"a": 1}}), Step(**{name: {"a": 2}})])


def test_the_first_workers_events_take_the_others():
    first = Events("a")
    output = aggregate(
        [
            Step(kv_cache_events=first),
            Step(kv_cache_events=Events("b", "c")),
            Step(),
            Step(kv_cache_events=Events("a")),
        ]
    )
    assert output.kv_cache_events is first
    assert output.kv_cache_events == Events("a", "b", "c", "a", workers=3)


@pytest.mark.parametrize("output_rank", range(4))
def test_other_ranks_events_are_left_alone(output_rank: int):
    steps = [Step(), *(Step(kv_cache_events=Events(*names)) for names in ("", "a", "b"))]
    inputs = [step.kv_connector_output for step in steps]
    before = copy.deepcopy(inputs)
    assert aggregate(steps, output_rank).kv_cache_events == Events("a", "b", workers=3)
    for rank in {0, 1, 2, 3} - {output_rank}:
        assert inputs[rank] == before[rank]


def test_events_of_different_types_are_refused():
    class Unrelated:
        get_all_events = add_events = increment_workers = None

    with pytest.raises(AggregationError, match="kv_cache_events: rank 0 sent Events"):
        aggregate([Step(kv_cache_events=Events("a")), Step(kv_cache_events=Unrelated())])
    assert aggregate(
        [Step(kv_cache_events=Events("a")), Step(kv_cache_events=OtherEvents("b"))]
    ).kv_cache_events == Events("a", "b", workers=2)


def test_shares_of_ranks_add_up():
    slow, fast = ReadStats(nbytes=1, wire=2.0), ReadStats(nbytes=2, wire=1.0)
    assert slow.merge(fast) == ReadStats(nbytes=3, wire=2.0)
