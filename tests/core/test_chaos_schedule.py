"""The schedule of a drill: by a seed, and never a blow for what lies on the ground."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvagent.chaos.schedule import Action, Plan, schedule
from kvagent.errors import ConfigError

PLANS = st.builds(
    Plan,
    targets=st.lists(st.text("abc", min_size=1), min_size=1, max_size=4, unique=True).map(tuple),
    seconds=st.floats(0.1, 300),
    every=st.floats(0.5, 60),
    kill=st.floats(0, 1),
    stop_seconds=st.floats(0.1, 30),
    seed=st.integers(0, 2**32),
)


def plan(**changes: Any) -> Plan:
    settings: dict[str, Any] = {
        "targets": ("a", "b", "c"),
        "seconds": 6000.0,
        "every": 2.0,
        "kill": 0.25,
        "stop_seconds": 1.0,
    }
    return Plan(**settings | changes)


@given(PLANS)
def test_a_seed_reproduces(drill: Plan):
    assert schedule(drill) == schedule(drill)


def test_other_seeds_give_other_drills():
    assert len({tuple(schedule(plan(seed=seed, seconds=60))) for seed in range(20)}) == 20


@given(PLANS)
def test_every_stop_is_continued_and_nothing_stopped_is_hit(drill: Plan):
    stopped: dict[str, float] = {}
    before = 0.0
    for strike in schedule(drill):
        assert strike.at >= before
        before = strike.at
        if strike.action is Action.CONTINUE:
            assert strike.at == pytest.approx(
                stopped.pop(strike.target) + drill.stop_seconds, abs=0.002
            )
            continue
        assert strike.at <= drill.seconds
        assert strike.target in drill.targets
        assert strike.target not in stopped
        if strike.action is Action.STOP:
            stopped[strike.target] = strike.at
    assert not stopped


def test_shares_and_rates():
    faults = [strike for strike in schedule(plan()) if strike.action is not Action.CONTINUE]
    assert len(faults) == pytest.approx(3000, rel=0.1)
    actions = Counter(strike.action for strike in faults)
    assert actions[Action.KILL] / len(faults) == pytest.approx(0.25, abs=0.05)
    targets = Counter(strike.target for strike in faults)
    assert all(count == pytest.approx(1000, rel=0.2) for count in targets.values())


@pytest.mark.parametrize(("kill", "never"), [(0.0, Action.KILL), (1.0, Action.STOP)])
def test_only_one_kind(kill: float, never: Action):
    found = {strike.action for strike in schedule(plan(kill=kill))}
    assert found
    assert never not in found


def test_when_all_are_stopped_nothing_is_hit():
    found = schedule(plan(targets=("a",), every=0.1, stop_seconds=50.0, kill=0.0, seconds=100.0))
    stops = [strike for strike in found if strike.action is Action.STOP]
    assert len(stops) == 2


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"targets": ()}, "--target"),
        ({"seconds": 0.0}, "seconds"),
        ({"every": -1.0}, "every"),
        ({"every": float("inf")}, "every"),
        ({"stop_seconds": 0.0}, "stop_seconds"),
        ({"kill": 1.5}, "kill"),
        ({"kill": float("nan")}, "kill"),
        ({"every": 1e-6}, "longer --every"),
    ],
)
def test_refused(changes: dict[str, Any], text: str):
    with pytest.raises(ConfigError, match=text):
        schedule(plan(**changes))
