"""KVOutputAggregator under any reports in any order: exactly once, and no residue."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, rule
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


def test_one_that_is_forgotten_before_there_is_an_output_does_not_come_out():
    aggregator = KVOutputAggregator(1)
    done = step_of(KVConnectorOutput(finished_sending={"a"}, finished_recving={"a"}))
    assert aggregator.aggregate([done, None], 1) is None
    aggregator.forget("a")
    result = aggregator.aggregate([Step()])
    assert result is not None
    assert result.kv_connector_output.is_empty()


# ---------------------------------------------------------------- aborts and the loss of ranks


@dataclass(eq=False)
class Part:
    """What is known of one fetch: who has ended it, what went wrong first, whether it came out."""

    name: str
    ended: set[int] = field(default_factory=set)
    failure: str | None = None
    out: bool = False
    forgotten: bool = False


class LeaderMachine(RuleBasedStateMachine):
    """As a leader uses it: a fetch has a name of its own, is handed to all ranks, and ends when
    each has, or is lost. Ranks may say everything twice, and too late."""

    parts = Bundle("parts")

    def __init__(self) -> None:
        super().__init__()
        self.aggregator = KVOutputAggregator(RANKS, max_age=MAX_AGE)
        self.all: list[Part] = []
        self.seen: Counter[str] = Counter()

    @rule(target=parts)
    def start(self) -> Part:
        self.all.append(Part(f"part-{len(self.all)}"))
        return self.all[-1]

    @rule(
        said=st.lists(
            st.tuples(st.integers(0, RANKS - 1), parts, st.sampled_from([None, None, "a", "b"])),
            min_size=1,
            max_size=6,
        ),
        silent=st.integers(0, 3).map(lambda number: number == 3),
    )
    def ranks_end(self, said: list[tuple[int, Part, str | None]], silent: bool) -> None:
        """In one step, each of some parts, well or not, and perhaps not for the first time.

        `silent`: there is no output to report it on.
        """
        self.step([(rank, part, why) for rank, part, why in said if not part.forgotten], silent)

    @rule(rank=st.integers(0, RANKS - 1))
    def rank_is_lost(self, rank: int) -> None:
        """The leader ends its shares in its name. What it said itself may still come."""
        lost = [part for part in self.all if not part.out and not part.forgotten]
        self.step([(rank, part, "lost") for part in lost])

    @rule(part=parts, told=st.sets(st.integers(0, RANKS - 1)))
    def abort(self, part: Part, told: set[int]) -> None:
        """Some ranks have nothing in flight and end at once."""
        if not part.forgotten:
            self.step([(rank, part, "aborted") for rank in sorted(told)])

    @rule(part=parts)
    def forget(self, part: Part) -> None:
        """The leader has reported it, or its engine is no more. Nothing of it is counted then."""
        self.aggregator.forget(part.name)
        part.forgotten = True

    def step(self, said: list[tuple[int, Part, str | None]], silent: bool = False) -> None:
        outputs = [KVConnectorOutput() for _ in range(RANKS)]
        first: dict[Part, str] = {}
        for rank, part, why in sorted(said, key=lambda one: one[0]):
            output = outputs[rank]
            output.finished_recving = (output.finished_recving or set()) | {part.name}
            part.ended.add(rank)
            if why is not None:
                # The last word of a rank within a step stands for it, the first rank's counts.
                output.failed_recving[part.name] = why
        for output in outputs:
            for part in self.all:
                if part.name in output.failed_recving:
                    first.setdefault(part, output.failed_recving[part.name])
        for part, why in first.items():
            if part.failure is None and not part.out:
                part.failure = why
        steps: list[Step | None] = [step_of(output) for output in outputs]
        if silent:
            assert self.aggregator.aggregate([*steps, None], RANKS) is None
            return
        result = self.aggregator.aggregate(steps)
        assert result is not None
        combined = result.kv_connector_output
        complete = {
            part
            for part in self.all
            if len(part.ended) == RANKS and not part.out and not part.forgotten
        }
        assert (combined.finished_recving or set()) == {part.name for part in complete}
        assert combined.failed_recving == {
            part.name: part.failure for part in complete if part.failure is not None
        }
        for part in complete:
            part.out = True
            self.seen[part.name] += 1
            assert self.seen[part.name] == 1

    @invariant()
    def it_counts_what_is_under_way(self) -> None:
        under_way = [p for p in self.all if p.ended and not p.out and not p.forgotten]
        assert self.aggregator.num_counting == len(under_way)

    def teardown(self) -> None:
        """All ranks are lost: everything comes out that was not forgotten, and nothing stays."""
        for rank in range(RANKS):
            self.rank_is_lost(rank)
        assert all(part.out or part.forgotten for part in self.all)
        assert self.aggregator.num_counting == 0
        for part in self.all:
            self.aggregator.forget(part.name)
        for tally in (self.aggregator._sending, self.aggregator._recving):
            kept = (tally.counts, tally._complete, tally._done, tally._done_before)
            assert not any(kept)


TestLeaders = LeaderMachine.TestCase


@pytest.mark.slow
@pytest.mark.timeout(1800)
class TestLeadersAtLength(LeaderMachine.TestCase):
    settings = settings(max_examples=10 * settings.default.max_examples, stateful_step_count=100)
