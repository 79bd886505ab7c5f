"""A fetch that reads from two ranks of a producer: one dies, the other sleeps and wakes up."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.faults import BIG, GONE, MINE, Landing, Watched, cause, engine, offer, watched
from tests.harness import Engine, random_fill

pytestmark = pytest.mark.timeout(300)  # busy machines start processes slowly


@contextmanager
def caught(
    folder: Path, transport: str, killed: int, ranks: int
) -> Iterator[tuple[list[Watched], Engine, Landing]]:
    """Both sources are being read when `killed` is killed and the other one is stopped."""
    names = ["prefill-0", "prefill-1", *(f"decode-{rank}" for rank in range(ranks))]
    with watched(folder, names, transport, lease_seconds=600, fetch_timeout=600) as sidecars:
        prefill, decode = sidecars[:2], sidecars[2:]
        with (
            engine(prefill, "prefill", BIG, random_fill(1)) as producer,
            engine(decode, "decode", BIG) as consumer,
        ):
            landing = Landing(consumer, range(BIG))
            ticket = offer(producer, "request", range(BIG))
            consumer.client.fetch("request", ticket, list(range(BIG)))
            landing.until(0.05, sources=2)
            prefill[1 - killed].stop()
            if transport == "tcp":  # over shared memory it would be read to its end meanwhile
                prefill[killed].stop()
                landing.until_still()
            prefill[killed].kill()
            there = [landing.share(source, sources=2) for source in range(2)]
            assert max(there) < 1, "a read had ended already"
            yield sidecars, consumer, landing


def fails_once(decode: list[Watched], consumer: Engine, landing: Landing) -> None:
    """The report names the rank that was killed; after it nothing is written, or said again."""
    reason = consumer.received("request")
    landing.write(MINE)
    assert cause(reason) in GONE, reason
    assert landing.keeps(MINE, seconds=0.5)
    for sidecar in decode:
        sidecar.until_idle()
    status = decode[0].status()
    assert sum(status["fetches_ended"].values()) == 1
    assert status["unacknowledged_reports"] == 0
    assert consumer.client.step().is_empty()


def test_one_reader(tmp_path: Path) -> None:
    with caught(tmp_path, "tcp", killed=1, ranks=1) as (sidecars, consumer, landing):
        # That the one is dead is noticed meanwhile, but the other may still write.
        until = time.monotonic() + 1.5
        while time.monotonic() < until:
            assert consumer.client.step().is_empty()
            time.sleep(0.01)
        assert sidecars[2].status()["parts_reading"] == 1
        sidecars[0].resume()
        fails_once(sidecars[2:], consumer, landing)


@pytest.mark.slow
def test_a_reader_for_each_source(tmp_path: Path) -> None:
    with caught(tmp_path, "tcp", killed=0, ranks=2) as (sidecars, consumer, landing):
        decode = sidecars[2:]
        status = decode[0].until(lambda status: status["fetches"]["draining"])
        assert status["ledger"]["quarantined"] == BIG
        assert [sidecar.status()["parts_reading"] for sidecar in decode] == [0, 1]
        assert consumer.client.step().is_empty()
        sidecars[1].resume()
        fails_once(decode, consumer, landing)


@pytest.mark.slow
def test_over_shared_memory_a_stopped_source_holds_nothing_up(tmp_path: Path) -> None:
    """The kernel reads from its memory all the same."""
    with caught(tmp_path, "shm", killed=1, ranks=1) as (sidecars, consumer, landing):
        decode = sidecars[2:]
        reason = consumer.received("request")
        landing.write(MINE)
        assert cause(reason) in GONE, reason
        sidecars[0].resume()
        assert landing.keeps(MINE, seconds=0.5)
        decode[0].until_idle()
