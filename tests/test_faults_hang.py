"""A producer's sidecar that is stopped in the middle of a read: the fetch fails by its deadline.

Over TCP its blocks stay in quarantine until the sidecar wakes up, or until a fence ends the read.
Over shared memory the read needs nothing of the producer's process, but nobody says that the bytes
were valid.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.faults import BIG, MINE, SMALL, Landing, Watched, cause, engine, offer, watched
from tests.harness import Engine, random_fill

pytestmark = pytest.mark.timeout(300)  # busy machines start processes slowly

TIMEOUT = 2.0
"""Shorter than `call_timeout`: the deadline is what comes first."""


@contextmanager
def stopped(
    folder: Path, transport: str, fence_seconds: float, *others: str
) -> Iterator[tuple[list[Watched], Engine, Engine, Landing]]:
    """The producer stands still in the middle of the fetch of "request"."""
    settings = {"lease_seconds": 600, "fetch_timeout": TIMEOUT, "fence_seconds": fence_seconds}
    names = ["prefill", "decode", *others]
    with watched(folder, names, transport, **settings) as sidecars:
        prefill, decode = sidecars[:2]
        with (
            engine([prefill], "prefill", BIG, random_fill(1)) as producer,
            engine([decode], "decode", BIG + SMALL) as consumer,
        ):
            landing = Landing(consumer, range(BIG))
            ticket = offer(producer, "request", range(BIG))
            consumer.client.fetch("request", ticket, list(range(BIG)))
            landing.until(0.05)
            prefill.stop()
            assert landing.share() < 1, "the read had ended"
            yield sidecars, producer, consumer, landing


def good(producer: Engine, consumer: Engine, name: str) -> None:
    other = Landing(consumer, range(BIG, BIG + SMALL))
    ticket = offer(producer, name, range(SMALL))
    consumer.client.fetch(name, ticket, list(other.blocks))
    assert consumer.received(name) is None
    assert other.equals(producer, range(SMALL))


def in_quarantine(decode: Watched, consumer: Engine) -> None:
    """It has failed, and is not reported."""
    status = decode.until(lambda status: status["fetches"]["draining"])
    assert status["ledger"]["quarantined"] == BIG
    assert status["parts_reading"] == 1
    assert consumer.client.step().is_empty()


def test_it_wakes_up_before_the_fence(tmp_path: Path) -> None:
    with stopped(tmp_path, "tcp", 600) as (sidecars, producer, consumer, landing):
        prefill, decode = sidecars
        in_quarantine(decode, consumer)
        prefill.resume()
        reason = consumer.received("request")
        landing.write(MINE)
        assert cause(reason) == "timed_out", reason
        producer.sent("request")
        good(producer, consumer, "again")
        assert landing.keeps(MINE, seconds=0.5)
        for sidecar in sidecars:
            sidecar.until_idle()
        assert decode.status()["fences"] == 0


def test_a_fence_ends_it(tmp_path: Path) -> None:
    with stopped(tmp_path, "tcp", 1.5, "other") as (sidecars, _, consumer, landing):
        prefill, decode, other = sidecars
        in_quarantine(decode, consumer)
        reason = consumer.received("request")
        landing.write(MINE)
        assert cause(reason) == "timed_out", reason
        decode.until_idle()
        assert decode.status()["fences"] == 1
        with engine([other], "other", SMALL, random_fill(2)) as producer:
            good(producer, consumer, "from another one")
            prefill.resume()
            assert landing.keeps(MINE, seconds=1.0)
            good(producer, consumer, "and again")
        decode.until_idle()


@pytest.mark.slow
def test_over_shared_memory_it_times_out(tmp_path: Path) -> None:
    with stopped(tmp_path, "shm", 600) as (sidecars, producer, consumer, landing):
        reason = consumer.received("request")
        landing.write(MINE)
        assert cause(reason) == "timed_out", reason
        sidecars[0].resume()
        producer.sent("request")
        good(producer, consumer, "again")
        assert landing.keeps(MINE, seconds=0.5)
        for sidecar in sidecars:
            sidecar.until_idle()
