"""The plan of which messages go wrong: by a seed, so that a drill can be replayed."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvagent.core.chaos import ChaosConfig, ChaosPlan, Fault, FaultAt
from kvagent.errors import ConfigError

KINDS = {"claim", "verdict", "renew"}
SHARES = st.sampled_from([0.0, 0.05, 0.1, 0.25])


def faults(count: int, **settings: Any) -> list[Fault | None]:
    plan = ChaosPlan(ChaosConfig(**settings))
    found = []
    for _ in range(count):
        found.append(plan.next("claim"))
        if found[-1] is Fault.DELAY:
            plan.delay()
    return found


def test_off_by_default():
    config = ChaosConfig()
    config.validate(KINDS)
    assert not config.active
    assert faults(1000) == [None] * 1000


@given(st.integers(0, 2**32), SHARES, SHARES, SHARES, SHARES)
def test_a_seed_reproduces(seed: int, drop: float, duplicate: float, delay: float, reorder: float):
    settings = {
        "seed": seed,
        "drop": drop,
        "duplicate": duplicate,
        "delay": delay,
        "reorder": reorder,
    }
    assert faults(200, **settings) == faults(200, **settings)


def test_other_seeds_give_other_faults():
    found = [tuple(faults(200, seed=seed, drop=0.1)) for seed in range(20)]
    assert len(set(found)) == 20


def test_delays_are_reproduced_and_bounded():
    plans = [ChaosPlan(ChaosConfig(seed=5, delay=1.0, delay_seconds=0.25)) for _ in range(2)]
    delays = [[plan.delay() for _ in range(100)] for plan in plans]
    assert delays[0] == delays[1]
    assert all(0 <= delay <= 0.25 for delay in delays[0])
    assert len(set(delays[0])) > 50
    assert plans[0].longest == 0.25


def test_shares():
    shares = {"drop": 0.05, "duplicate": 0.1, "delay": 0.2, "reorder": 0.3}
    found = Counter(faults(20_000, seed=1, **shares))
    for name, share in shares.items():
        assert abs(found[Fault(name)] / 20_000 - share) < 0.02
    assert abs(found[None] / 20_000 - 0.35) < 0.02


@pytest.mark.parametrize("fault", list(Fault))
def test_a_share_of_one_is_every_message(fault: Fault):
    assert faults(1000, seed=3, **{fault.value: 1.0}) == [fault] * 1000


@given(
    st.integers(0, 1000),
    st.dictionaries(st.integers(1, 100), st.sampled_from(Fault), max_size=5),
)
def test_at_is_for_its_message_only(seed: int, at: dict[int, Fault]):
    shares = {"seed": seed, "drop": 0.1, "delay": 0.2, "duplicate": 0.1}
    entries = tuple(FaultAt(message=message, fault=fault) for message, fault in at.items())
    found = faults(100, at=entries, **shares)
    without = faults(100, **shares)
    for number in range(1, 101):
        assert found[number - 1] is at.get(number, without[number - 1])


def test_only_the_named_kinds_count():
    config = ChaosConfig(kinds=("claim",), at=(FaultAt(message=2, fault=Fault.DROP),))
    plan = ChaosPlan(config)
    kinds = ["renew", "claim", "verdict", "claim", "claim", "renew"]
    found = [plan.next(kind) for kind in kinds]
    assert found == [None, None, None, Fault.DROP, None, None]
    assert plan.messages == 3


def test_faults_are_counted():
    plan = ChaosPlan(ChaosConfig(seed=9, drop=0.2, reorder=0.2))
    found = [plan.next("renew") for _ in range(500)]
    assert plan.messages == 500
    assert plan.done == Counter(fault.value for fault in found if fault is not None)


# ---------------------------------------------------------------- settings that are refused


def test_shares_that_add_up_to_one_are_fine():
    for parts in itertools.product(range(0, 101, 5), repeat=4):
        if sum(parts) == 100:
            drop, duplicate, delay, reorder = (part / 100 for part in parts)
            ChaosConfig(drop=drop, duplicate=duplicate, delay=delay, reorder=reorder).validate(())


@pytest.mark.parametrize(
    ("config", "text"),
    [
        (ChaosConfig(drop=0.6, delay=0.5), "add up to more than 1"),
        (ChaosConfig(drop=0.1, kinds=("claims",)), "'claims'.*claim.*renew.*verdict"),
        (
            ChaosConfig(
                at=(
                    FaultAt(message=4, fault=Fault.DROP),
                    FaultAt(message=4, fault=Fault.DELAY),
                )
            ),
            "message 4 is there twice",
        ),
    ],
)
def test_contradictions(config: ChaosConfig, text: str):
    with pytest.raises(ConfigError, match=text):
        config.validate(KINDS)


@pytest.mark.parametrize(
    "values",
    [
        {"drop": 1.5},
        {"drop": -0.1},
        {"drop": float("nan")},
        {"delay_seconds": 0},
        {"delay_seconds": 61},
        {"at": [{"message": 0, "fault": "drop"}]},
        {"at": [{"message": 1, "fault": "explode"}]},
        {"at": [{"message": 1}]},
        {"dropp": 0.1},
    ],
)
def test_values_out_of_range(values: dict[str, Any]):
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(values, ChaosConfig)
