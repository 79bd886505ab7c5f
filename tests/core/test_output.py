"""KVConnectorOutput: empty by default, plain on the wire."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvagent.core.output import Aggregatable, CacheEvents, KVConnectorOutput

REPORTS: list[dict[str, Any]] = [
    {"finished_sending": {"a"}},
    {"finished_recving": {"a"}},
    {"failed_recving": {"a": "peer gone"}},
    {"invalid_block_ids": {0}},
    {"kv_connector_stats": {"bytes": 1}},
    {"kv_cache_events": [1]},
    {"kv_connector_worker_meta": {"x": 1}},
]


def test_everything_is_empty_by_default():
    output = KVConnectorOutput()
    assert output.is_empty()
    assert output.finished_sending is None
    assert output.finished_recving is None
    assert output.failed_recving == {}
    assert output.invalid_block_ids == set()
    assert output.kv_connector_stats is None
    assert output.kv_cache_events is None
    assert output.kv_connector_worker_meta is None
    assert output.expected_finished_count == 0


@pytest.mark.parametrize("fields", REPORTS, ids=lambda fields: next(iter(fields)))
def test_any_report_makes_it_not_empty(fields: dict[str, Any]):
    assert not KVConnectorOutput(**fields).is_empty()


def test_empty_containers_and_the_expected_count_report_nothing():
    assert KVConnectorOutput(finished_sending=set(), kv_connector_stats={}).is_empty()
    assert KVConnectorOutput(expected_finished_count=3).is_empty()


def test_an_empty_output_is_still_truthy():
    """`if output:` asks whether there is one, as with the plain classes of other engines."""
    assert KVConnectorOutput()


def test_outputs_do_not_share_their_defaults():
    one, other = KVConnectorOutput(), KVConnectorOutput()
    one.failed_recving["a"] = "x"
    one.invalid_block_ids.add(1)
    assert other.is_empty()


def test_fields_are_keywords_and_can_be_set():
    with pytest.raises(TypeError):
        KVConnectorOutput({"a"})  # type: ignore[call-arg]
    output = KVConnectorOutput()
    output.finished_sending = {"a"}
    assert output == KVConnectorOutput(finished_sending={"a"})


ids = st.text(max_size=8)
plain = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(ids, inner, max_size=3),
    max_leaves=6,
)


@given(
    sending=st.none() | st.sets(ids, max_size=4),
    recving=st.none() | st.sets(ids, max_size=4),
    failed=st.dictionaries(ids, st.text(max_size=8), max_size=4),
    blocks=st.sets(st.integers(0, 2**31 - 1), max_size=4),
    values=st.tuples(plain, plain, plain),
    expected=st.integers(0, 1 << 16),
)
def test_round_trip(
    sending: set[str] | None,
    recving: set[str] | None,
    failed: dict[str, str],
    blocks: set[int],
    values: tuple[Any, Any, Any],
    expected: int,
):
    output = KVConnectorOutput(
        finished_sending=sending,
        finished_recving=recving,
        failed_recving=failed,
        invalid_block_ids=blocks,
        kv_connector_stats=values[0],
        kv_cache_events=values[1],
        kv_connector_worker_meta=values[2],
        expected_finished_count=expected,
    )
    data = msgspec.msgpack.encode(output)
    assert msgspec.msgpack.decode(data, type=KVConnectorOutput) == output


@pytest.mark.parametrize(
    "fields",
    [{"finished": ["a"]}, {"finished_sending": [1]}, {"invalid_block_ids": ["a"]}],
)
def test_other_fields_and_types_are_refused(fields: dict[str, Any]):
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(msgspec.msgpack.encode(fields), type=KVConnectorOutput)


def test_the_protocols_tell_values_that_can_be_combined():
    class Stats:
        def aggregate(self, other: Stats) -> Stats:
            return self

    class Events:
        def get_all_events(self) -> list[str]:
            return []

        def add_events(self, events: list[str]) -> None: ...

        def increment_workers(self, count: int = 1) -> None: ...

    assert isinstance(Stats(), Aggregatable)
    assert isinstance(Events(), CacheEvents)
    assert not isinstance({}, Aggregatable)
    assert not isinstance(Stats(), CacheEvents)
