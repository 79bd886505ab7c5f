"""The consumer is killed, sleeps, or is slow: the producer's blocks come back in time, no sooner
than they may, and nothing that was read too late is called good."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.faults import (
    BIG,
    MINE,
    SMALL,
    TRANSPORTS,
    Landing,
    Watched,
    cause,
    engine,
    offer,
    watched,
)
from tests.harness import Engine, random_fill

pytestmark = pytest.mark.timeout(300)  # busy machines start processes slowly

LEASE = 2.0
IN_TIME = LEASE + LEASE / 3
"""A lease, and the interval at which leases are renewed."""
HUGE = 4 * BIG


@pytest.fixture(scope="module", params=TRANSPORTS)
def transport(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def sidecars(transport: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Watched]]:
    """A producer's and two of consumers. A rank that sleeps is not taken for a dead one."""
    folder = tmp_path_factory.mktemp(transport)
    names = ["prefill", "decode-0", "decode-1"]
    settings = {"lease_seconds": LEASE, "call_timeout": 60, "fetch_timeout": 600}
    with watched(folder, names, transport, **settings) as made:
        yield made


@pytest.fixture
def producer(sidecars: list[Watched]) -> Iterator[Engine]:
    with engine(sidecars[:1], "prefill", BIG, random_fill(1)) as made:
        yield made


def test_it_is_slow(sidecars: list[Watched], producer: Engine) -> None:
    """One of its ranks takes more than three leases, and so does its scheduler."""
    prefill, *decode = sidecars
    completed = prefill.status()["leases_ended"].get("completed", 0)
    with engine(decode, "decode", BIG) as consumer:
        landing = Landing(consumer, range(BIG))
        ticket = offer(producer, "slow", range(BIG))
        consumer.client.fetch("slow", ticket, list(landing.blocks))
        landing.until(0.05, sources=2)  # the halves are those of the two readers
        decode[1].stop()
        assert landing.share(1, sources=2) < 1, "the read had ended"
        prefill.until(lambda status: status["leases"]["claimed"] == 1)  # it lasts
        until = time.monotonic() + 3 * LEASE
        while time.monotonic() < until:
            assert prefill.status()["leases"]["claimed"] == 1
            time.sleep(0.1)
        decode[1].resume()
        prefill.until(lambda status: status["leases_ended"].get("completed", 0) > completed)
        assert consumer.received("slow") is None
        assert landing.equals(producer, range(BIG))
        producer.sent("slow")
        for sidecar in sidecars:
            sidecar.until_idle()


@pytest.mark.slow
def test_it_reads_slowly(tmp_path: Path) -> None:
    """Over TCP, a little at a time, for more than three leases."""
    settings = {"lease_seconds": 1, "piece_bytes": 4096, "inflight_bytes": 4096}
    with (
        watched(tmp_path, ["prefill", "decode"], "tcp", **settings) as (prefill, decode),
        engine([prefill], "prefill", HUGE, random_fill(1)) as producer,
        engine([decode], "decode", HUGE) as consumer,
    ):
        landing = Landing(consumer, range(HUGE))
        ticket = offer(producer, "slow", range(HUGE))
        consumer.client.fetch("slow", ticket, list(landing.blocks))
        assert consumer.received("slow", 60) is None
        seconds = consumer.seen[-1].kv_connector_stats["fetches"]["slow"]["seconds"]
        assert seconds > 3, "it was too fast to show anything"
        assert landing.equals(producer, range(HUGE))
        producer.sent("slow")


def test_it_sleeps_through_its_lease(sidecars: list[Watched], producer: Engine) -> None:
    prefill, decode, _ = sidecars
    with engine([decode], "decode", BIG) as consumer:
        landing = Landing(consumer, range(BIG))
        ticket = offer(producer, "asleep", range(BIG))
        consumer.client.fetch("asleep", ticket, list(landing.blocks))
        landing.until(0.05)
        decode.stop()
        assert landing.share() < 1, "the read had ended"
        producer.sent("asleep")
        for cache in producer.caches[0].values():
            cache.fill_(9.0)  # another request has the blocks
        decode.resume()
        reason = consumer.received("asleep")
        landing.write(MINE)
        assert cause(reason) == "expired", reason
        assert landing.keeps(MINE, seconds=0.5)
        for sidecar in (prefill, decode):
            sidecar.until_idle()


def test_it_is_killed(
    tmp_path: Path, transport: str, sidecars: list[Watched], producer: Engine
) -> None:
    """Its sidecar; then that of another consumer, together with the engine."""
    prefill = sidecars[0]
    names = ["sidecar", "engine"]
    with watched(tmp_path, names, transport, lease_seconds=LEASE) as doomed:
        for sidecar, name in zip(doomed, names, strict=True):
            with Consumer(sidecar, name) as consumer:
                assert consumer.says() == "ready"
                before = prefill.status()["leases_ended"]
                consumer.fetch(offer(producer, name, range(BIG)))
                began = time.monotonic()
                sidecar.kill()
                if name == "engine":
                    consumer.process.kill()
                else:
                    assert consumer.says().startswith("agent_lost")
            producer.sent(name)
            seconds = time.monotonic() - began
            print(f"\n{transport}: the blocks are back {seconds:.3f} s after the kill")
            assert seconds < IN_TIME + 2.0  # for a machine that is busy
            after = prefill.status()["leases_ended"]
            assert after == before | {"expired": before.get("expired", 0) + 1}
            prefill.until_idle()

    # The survivor serves others.
    with engine(sidecars[1:2], "decode", SMALL) as survivor:
        landing = Landing(survivor, range(SMALL))
        survivor.client.fetch("good", offer(producer, "good", range(SMALL)), list(landing.blocks))
        assert survivor.received("good") is None
        assert landing.equals(producer, range(SMALL))


class Consumer:
    """An engine in a process of its own: `tests.faults`."""

    def __init__(self, sidecar: Watched, engine_id: str) -> None:
        command = [sys.executable, "-m", "tests.faults", sidecar.socket, engine_id, str(BIG)]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True)

    def says(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def fetch(self, ticket: dict[str, Any]) -> None:
        """Returns when some of it is there."""
        assert self.process.stdin is not None
        print(json.dumps(ticket), file=self.process.stdin, flush=True)
        assert self.says() == "reading"

    def __enter__(self) -> Consumer:
        return self

    def __exit__(self, *_: Any) -> None:
        self.process.kill()
        self.process.communicate()
