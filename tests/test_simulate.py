"""The simulation: every request ends, nothing is left over, and cost does not grow."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from kvagent.agent import borrower
from kvagent.bench import simulation
from kvagent.bench.contact import RANKS, Contact, signs_of_life
from kvagent.bench.players import LEASE_SECONDS, Nature
from kvagent.bench.simulate import grows, main
from kvagent.bench.simulation import Simulation

REQUESTS = 300


def test_every_request_ends_and_nothing_is_left() -> None:
    ended: list[int] = []
    simulation = Simulation(6, REQUESTS, tick=ended.append)
    outcome = simulation.run()
    assert ended[-1] == REQUESTS
    assert outcome.good + sum(outcome.failed.values()) == REQUESTS
    assert outcome.good >= 0.9 * REQUESTS
    for producer in simulation._producers:
        assert not len(producer.leases)
        counts = producer.ledger.counts()
        assert counts["free"] == sum(counts.values()) == len(producer.free)
    for consumer in simulation._consumers:
        assert not len(consumer.fetches)
        assert not consumer.running
        assert not consumer.aggregator.num_counting
        counts = consumer.ledger.counts()
        assert counts["free"] == sum(counts.values()) == len(consumer.free)


def test_messages_are_those_of_the_protocol() -> None:
    outcome = Simulation(4, REQUESTS).run()
    sent = outcome.messages
    natures = [Nature(number, 0) for number in range(REQUESTS)]
    fetched = sum(not nature.lost for nature in natures)
    slow = sum(min(nature.reads) > 5 and not nature.lost for nature in natures)
    assert sent["offer"] == REQUESTS
    assert sent["fetch"] == fetched
    assert sent["claim"] == slow == 6, "only what lasts is claimed"
    assert 0.9 * fetched < sent["complete"] == sent["completed"] <= fetched
    assert sent["verdict"] == sent["claim"] + sent["release"]
    assert sent["part"] >= (RANKS - 1) * outcome.good
    assert sent["part_done"] == (RANKS - 1) * fetched
    assert sent["report"] == sent["ack"]
    assert sent["renew"] == sent["renewed"] > 0
    assert outcome.bytes["fetch"] > 2 * 4 * 128 * sent["fetch"]  # two lists of int32 ids
    assert all(seconds > 0 for seconds in outcome.cpu.values())


def test_only_what_lasts_is_claimed_as_by_a_sidecar() -> None:
    assert simulation.CLAIM_AFTER == borrower.CLAIM_AFTER <= LEASE_SECONDS / 10


def test_what_ends_at_the_same_time_is_asked_for_in_one_message(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Simulation, "_read", _all_at_once(Simulation._read))
    outcome = Simulation(2, 40).run()
    assert outcome.good + sum(outcome.failed.values()) == 40
    assert 0 < outcome.messages["complete"] < outcome.good / 2


def _all_at_once(read: Callable[..., None]) -> Callable[..., None]:
    """Reads of followers end as soon as they begin, those of rank 0 when a second is full."""

    def wait(simulation: Simulation, consumer: Any, running: Any, rank: int) -> None:
        delay = math.ceil(simulation.now + 0.01) - simulation.now if rank == 0 else 0.0
        simulation.at(delay, partial(read, simulation, consumer, running, rank))

    return wait


def test_the_same_seed_is_the_same_simulation() -> None:
    one, two = (Simulation(4, 100, seed=3).run() for _ in range(2))
    assert one.messages == two.messages
    assert one.simulated == two.simulated
    assert Nature(5, 3).reads == Nature(5, 3).reads != Nature(5, 4).reads


def test_more_engines_cost_a_request_no_more() -> None:
    rows = [Simulation(40, REQUESTS, circle=size).run().summary() for size in (4, 40)]
    assert rows[0]["contacts"] <= 40  # two by two
    assert rows[1]["contacts"] > rows[0]["contacts"]
    assert rows[1]["messages"] == pytest.approx(rows[0]["messages"], rel=0.02)
    assert rows[1]["bytes"] == pytest.approx(rows[0]["bytes"], rel=0.02)


def test_growth_is_noticed() -> None:
    row = {"messages": 40.0, "bytes": 1e4, "lender_us": 50.0, "borrower_us": 100.0}
    assert grows([row, row])["ok"]
    assert not grows([row, {**row, "messages": 41.0}])["ok"]
    assert not grows([row, {**row, "borrower_us": 200.0}])["ok"]


def test_a_contact_is_counted_once_per_rank() -> None:
    contact = Contact().measure()
    assert set(contact.messages.values()) == {RANKS}
    assert contact.bytes["welcome"] > 8 * contact.bytes["hello"]
    messages, nbytes = signs_of_life()
    assert messages == 2 * (RANKS - 1)
    assert nbytes > 1000 * (RANKS - 1)


def test_the_command_prints_json(capsys: pytest.CaptureFixture[str]) -> None:
    import typer

    with pytest.raises(typer.Exit):
        main(engines=[4, 2], requests=20, as_json=True)
    found = json.loads(capsys.readouterr().out)
    assert [row["circle"] for row in found["sizes"]] == [2, 4]
    assert [row["engines"] for row in found["sizes"]] == [4, 4]
    assert found["growth"].keys() == {"messages", "bytes", "cpu", "ok"}
