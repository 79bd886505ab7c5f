"""`EngineClient.wait`: a scheduler with nothing to compute sleeps until there is something."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvagent.client import engine as engine_module
from tests.harness import Engine
from tests.loopback import LONG
from tests.test_agent_loopback import LOCAL, at_rest, good, hung, offer, sidecar
from tests.test_agent_loopback import engines as engines
from tests.test_agent_loopback import stage as stage

Engines = Callable[..., Engine]
ROOT = Path(__file__).parent.parent


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who misses what comes does not find it by looking again."""
    monkeypatch.setattr(engine_module, "MAX_ATTEND", 10 * LONG)


def outcome(engine: Engine, request_id: str) -> str | None:
    """By `wait` and `step` alone; the reason when the fetch failed."""
    while True:
        assert engine.client.wait(LONG)
        out = engine.client.step()
        assert not out.is_empty(), "woken for nothing"
        if request_id in (out.finished_recving or ()):
            return out.failed_recving.get(request_id)


def test_every_end_wakes_it(engines: Engines) -> None:
    producer, consumer = engines("prefill"), engines("decode")
    for number in range(200):
        name = f"r{number}"
        consumer.client.fetch(name, offer(producer, name), LOCAL)
        assert outcome(consumer, name) is None
        assert producer.client.wait(LONG)
        assert producer.client.step().finished_sending == {name}
    at_rest(producer, consumer)


def test_in_vain(engines: Engines) -> None:
    engine = engines("decode")
    begin = time.monotonic()
    assert not engine.client.wait(0.2)
    assert 0.2 <= time.monotonic() - begin < LONG
    assert not engine.client.wait(0)
    assert engine.client.step().is_empty()


def test_what_is_there_already(engines: Engines) -> None:
    """Also what the client's thread took while the scheduler was busy."""
    producer, consumer = engines("prefill"), engines("decode")
    good(producer, consumer, "first")
    consumer.client.fetch("r", offer(producer, "r"), LOCAL)
    end = time.monotonic() + LONG
    while not consumer.client._reports:
        assert time.monotonic() < end
        time.sleep(0.01)
    assert consumer.client.wait(0)
    assert consumer.client.step().finished_recving == {"r"}
    assert not consumer.client.wait(0)


def test_it_costs_nothing(engines: Engines) -> None:
    engine = engines("decode")
    begin = time.thread_time()
    assert not engine.client.wait(1.0)
    assert time.thread_time() - begin < 0.1


def test_the_sidecar_goes_meanwhile(engines: Engines) -> None:
    producer, consumer = engines("prefill"), engines("decode")
    good(producer, consumer, "first")
    hung(producer, consumer, "r")
    killer = threading.Timer(0.2, sidecar(consumer).close)
    killer.start()
    found = outcome(consumer, "r")
    assert found is not None
    assert found.startswith(("agent_lost:", "cancelled:", "reset:"))
    killer.join()
    assert consumer.client.wait_lost(LONG)
    assert not consumer.client.wait(0.1), "nothing is open, and nothing will come"
    sidecar(producer).resume()
    producer.sent("r", LONG)


def test_what_could_not_be_sent_goes_out_meanwhile(engines: Engines) -> None:
    producer, consumer = engines("prefill"), engines("decode")
    good(producer, consumer, "first")
    ticket = offer(producer, "r")
    client, real = consumer.client, consumer.client._socket

    class Full:
        """A socket that takes nothing."""

        def __getattr__(self, name: str) -> Any:
            return getattr(real, name)

        def send(self, data: bytes) -> int:
            raise BlockingIOError

    client._socket = Full()  # type: ignore[assignment]
    client.fetch("r", ticket, LOCAL)
    assert client._unsent
    client._socket = real
    assert outcome(consumer, "r") is None
    assert not client._unsent


def test_overhead_runs() -> None:
    """`scripts/overhead` itself; what it finds is for people."""
    done = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "overhead"), "--json"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode in (0, 1), done.stderr
    found = json.loads(done.stdout)["calls"]
    assert len(found) == 4
    assert all(row["p50_us"] > 0 for row in found.values())
