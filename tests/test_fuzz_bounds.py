"""Ids that nobody knows, in numbers: the tables that they make entries in stay small, and empty."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import msgspec
import pytest

from kvagent.agent import peers, rank
from kvagent.agent.agent import Agent
from kvagent.wire.messages import (
    AbortPart,
    Complete,
    Completed,
    Completion,
    LeaseRef,
    PartDone,
    PartState,
    Release,
    Renew,
    Renewed,
)
from tests.harness import Engine, random_fill
from tests.loopback import LONG, Stage
from tests.test_agent_doors import Stranger, part, still_good


@pytest.fixture
def stage() -> Iterator[Stage]:
    made = Stage()
    yield made
    made.close()


@pytest.fixture
def engines(stage: Stage) -> Iterator[tuple[Engine, Engine]]:
    producer = Engine(stage.sidecars(1), "prefill", fill=random_fill(1))  # type: ignore[arg-type]
    consumer = Engine(
        stage.sidecars(2, handshake_timeout=1.0),  # type: ignore[arg-type]
        "decode",
    )
    yield producer, consumer
    producer.close()
    consumer.close()


def until(done: Callable[[], object], what: str) -> None:
    end = time.monotonic() + LONG
    while not done():
        assert time.monotonic() < end, what
        time.sleep(0.01)


def follower(stage: Stage) -> Agent:
    return stage._sidecars[2].agent


def test_parts_that_never_come(
    stage: Stage, engines: tuple[Engine, Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank, "MAX_KEPT_PARTS", 50)
    monkeypatch.setattr(rank, "KEEP_PARTS", 1.0)
    stranger = Stranger(stage, engines[1].workers[1].endpoint)
    for number in range(300):
        assert isinstance(stranger.ask(AbortPart(part_id=f"x{number}")), PartState)
    parts = follower(stage).rank._parts
    until(lambda: len(parts) <= 50, "more than may be kept")
    until(lambda: not parts, "they are forgotten")
    stranger.close()
    still_good(*engines)


def test_parts_from_engines_that_are_not_there(
    stage: Stage, engines: tuple[Engine, Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank, "MAX_RUNNING_PARTS", 20)
    monkeypatch.setattr(peers, "MAX_SESSIONS", 5)
    monkeypatch.setattr(rank, "KEEP_PARTS", 1.0)
    agent = follower(stage)
    identity = stage._sidecars[1].agent.rank.identity
    assert identity is not None
    stranger = Stranger(stage, engines[1].workers[1].endpoint)
    for number in range(100):
        message = msgspec.structs.replace(
            part(f"x{number}"), engine_id=f"engine{number}", leader=identity.incarnation
        )
        assert isinstance(stranger.ask(message), PartState)
        assert len(agent.rank.peers._sessions) <= 5
        assert agent.rank.reading() <= 20
    until(lambda: not agent.rank._parts, "they are forgotten")
    until(lambda: not agent.rank.peers._sessions, "the sessions are closed")
    stranger.close()
    still_good(*engines)


def test_leases_and_fetches_that_never_were(stage: Stage, engines: tuple[Engine, Engine]) -> None:
    stranger = Stranger(stage, engines[1].workers[0].endpoint)
    leader = stage._sidecars[1].agent.leader
    for number in range(200):
        done = PartDone(engine_id="decode", tp_rank=1, pp_rank=0, part_id=f"x{number}")
        assert not isinstance(stranger.ask(done), str)
        stranger.ask(Release(transfer_id=f"x{number}", token=b"", fetch_id=f"x{number}"))
        renewed = stranger.ask(Renew(leases=(LeaseRef(f"x{number}", "y"),)))
        assert isinstance(renewed, Renewed)
        lease = Completion(f"x{number}", bytes(16), f"y{number}", bytes(32))
        completed = stranger.ask(Complete(engine_id="stranger", leases=(lease, lease)))
        assert isinstance(completed, Completed)
        assert completed.verdicts == ("unknown", "unknown")
    assert not leader.fetches
    assert leader.leases.counts()["parked"] == 0
    assert not leader.leases
    assert leader.leases.counts()["tombstones"] == 0
    stranger.close()
    still_good(*engines)
