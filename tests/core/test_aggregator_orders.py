"""KVOutputAggregator under any reports in any order: exactly once, and no residue."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st
from steps import Step

from kvagent.core.aggregator import KVOutputAggregator
from kvagent.core.output import KVConnectorOutput

RANKS = 4
MAX_AGE = 50.0


def step_of(output: KVConnectorOutput | None) -> Step:
    step = Step()
    step.kv_connector_output = output
    return step


some_ids = st.sets(st.sampled_from("abcde"), max_size=3)
reports = st.builds(
    KVConnectorOutput,
    finished_sending=st.none() | some_ids,
    finished_recving=st.none() | some_ids,
    failed_recving=st.dictionaries(st.sampled_from("abcde"), st.just("why"), max_size=2),
    invalid_block_ids=st.sets(st.integers(0, 9), max_size=2),
)
steps = st.lists(st.none() | reports, min_size=RANKS, max_size=RANKS)


@given(
    expected=st.integers(1, RANKS),
    script=st.lists(st.tuples(steps, st.booleans()), max_size=12),
)
def test_reports_against_a_plain_model(
    expected: int, script: list[tuple[list[KVConnectorOutput | None], bool]]
):
    """The model keeps everything for ever. A step may lack the output to report on."""
    aggregator = KVOutputAggregator(expected, max_age=MAX_AGE)
    sending: dict[str, set[int]] = {}
    recving: dict[str, set[int]] = {}
    failed: set[str] = set()
    out_sent: set[str] = set()
    out_received: set[str] = set()
    invalid: set[int] = set()
    script = [*script, ([None] * RANKS, True)]
    for now, (step, has_output) in enumerate(script):
        for rank, report in enumerate(step):
            if report is not None:
                for request_id in report.finished_sending or ():
                    sending.setdefault(request_id, set()).add(rank)
                for request_id in report.finished_recving or ():
                    recving.setdefault(request_id, set()).add(rank)
                failed |= set(report.failed_recving)
                invalid |= report.invalid_block_ids
        outputs: list[Step | None] = [step_of(report) for report in step]
        if has_output:
            result = aggregator.aggregate(outputs, now=float(now))
        else:  # the output is wanted from one rank more, which has none
            result = aggregator.aggregate([*outputs, None], RANKS, now=float(now))
        if not has_output:
            assert result is None
            continue
        assert result is not None
        output = result.kv_connector_output
        sent = {r for r, ranks in sending.items() if len(ranks) >= expected} - out_sent
        received = {r for r, ranks in recving.items() if len(ranks) >= expected} - out_received
        assert output.finished_sending == (sent or None)
        assert output.finished_recving == (received or None)
        assert set(output.failed_recving) == received & failed
        assert output.invalid_block_ids == invalid
        out_sent |= sent
        out_received |= received
        invalid = set()

    unfinished = (sending.keys() - out_sent, (recving.keys() | failed) - out_received)
    assert aggregator.num_counting == sum(map(len, unfinished))
    assert aggregator.sweep(len(script) + MAX_AGE + 1) == unfinished[0] | unfinished[1]
    assert aggregator.num_counting == 0


@given(data=st.data(), world=st.integers(1, 5), requests=st.integers(1, 5))
def test_any_order_and_any_repetition_gives_each_request_once(
    data: st.DataObject, world: int, requests: int
):
    """Every rank reports every request at least once; how often, and when, is anybody's guess."""
    needed = [(rank, f"r{number}") for rank in range(world) for number in range(requests)]
    repeated = data.draw(st.lists(st.sampled_from(needed), max_size=10))
    order = data.draw(st.permutations(needed + repeated))
    failing = set(data.draw(st.lists(st.sampled_from(needed), max_size=3)))

    aggregator = KVOutputAggregator(world, world_size=world)
    seen: Counter[str] = Counter()
    said: set[tuple[int, str]] = set()
    while order:
        size = data.draw(st.integers(1, len(order)))
        batch, order = order[:size], order[size:]
        outputs = [KVConnectorOutput() for _ in range(world)]
        for rank, request_id in batch:
            output = outputs[rank]
            output.finished_recving = (output.finished_recving or set()) | {request_id}
            if (rank, request_id) in failing:
                output.failed_recving[request_id] = "why"
        said |= set(batch)
        result = aggregator.aggregate([step_of(output) for output in outputs])
        assert result is not None
        finished = result.kv_connector_output.finished_recving or set()
        for request_id in finished:
            assert {(rank, request_id) for rank in range(world)} <= said, "before its last rank"
        assert set(result.kv_connector_output.failed_recving) == {
            request_id for _, request_id in failing if request_id in finished
        }
        seen.update(finished)
    assert seen == Counter({f"r{number}": 1 for number in range(requests)})
    assert aggregator.num_counting == 0


@given(
    batches=st.lists(
        st.tuples(st.integers(0, 2), st.sampled_from("abc"), st.booleans()), max_size=30
    )
)
def test_forgotten_requests_leave_nothing_and_start_afresh(batches: list[tuple[int, str, bool]]):
    aggregator = KVOutputAggregator(3)
    ranks: dict[str, set[int]] = {}
    done: set[str] = set()
    for rank, request_id, forget in batches:
        if forget:
            aggregator.forget(request_id)
            ranks.pop(request_id, None)
            done.discard(request_id)
            continue
        outputs = [Step() for _ in range(3)]
        outputs[rank].kv_connector_output = KVConnectorOutput(finished_sending={request_id})
        result = aggregator.aggregate(outputs)
        assert result is not None
        finished = None
        if request_id not in done:
            ranks.setdefault(request_id, set()).add(rank)
            if len(ranks[request_id]) == 3:
                del ranks[request_id]
                done.add(request_id)
                finished = {request_id}
        assert result.kv_connector_output.finished_sending == finished
    assert aggregator.num_counting == len(ranks)
    for request_id in "abc":
        aggregator.forget(request_id)
    assert aggregator.num_counting == 0
