"""A fetch that is cancelled in the middle: its blocks are the engine's when `step()` says so, and
not before."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.faults import (
    BIG,
    EMPTY,
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


@pytest.fixture(scope="module", params=TRANSPORTS)
def transport(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def sidecars(transport: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Watched]]:
    folder = tmp_path_factory.mktemp(transport)
    with watched(folder, ["prefill", "decode"], transport, lease_seconds=600) as made:
        yield made


@pytest.fixture(scope="module")
def engines(sidecars: list[Watched]) -> Iterator[tuple[Engine, Engine]]:
    prefill, decode = sidecars
    with (
        engine([prefill], "prefill", BIG, random_fill(1)) as producer,
        engine([decode], "decode", BIG + SMALL) as consumer,
    ):
        yield producer, consumer


def test_in_the_middle(sidecars: list[Watched], engines: tuple[Engine, Engine]) -> None:
    """Every other time the blocks are handed to another request; otherwise they are watched."""
    producer, consumer = engines
    aborted = Landing(consumer, range(BIG))
    for turn, share in enumerate((0.01, 0.2, 0.4, 0.6)):
        handed_on = turn % 2 == 1
        for name in (f"aborted-{turn}-{attempt}" for attempt in range(10)):
            aborted.write(EMPTY)
            consumer.client.fetch(name, offer(producer, name, range(BIG)), list(aborted.blocks))
            aborted.until(share)
            consumer.client.cancel(name)
            reason = consumer.received(name)
            if reason is not None:
                break
            producer.sent(name)  # this process was held up: it was all there before the cancel
        if handed_on:
            aborted.write(MINE)
        there = aborted.share()
        assert cause(reason) == "cancelled", reason
        producer.sent(name)

        # What is late from this producer comes before the next transfer over the same connection.
        other = Landing(consumer, range(BIG, BIG + SMALL))
        name = f"good-{turn}"
        consumer.client.fetch(name, offer(producer, name, range(SMALL)), list(other.blocks))
        assert consumer.received(name) is None
        assert other.equals(producer, range(SMALL))
        assert aborted.share() == there
        assert not handed_on or aborted.keeps(MINE)
    for sidecar in sidecars:
        sidecar.until_idle()
    assert aborted.keeps(MINE, seconds=0.5)


@pytest.mark.parametrize("transport", ["tcp"], indirect=True)
def test_while_the_producer_sleeps(sidecars: list[Watched], engines: tuple[Engine, Engine]) -> None:
    """What was asked for before the abort comes long after it: till then nothing is reported."""
    (prefill, decode), (producer, consumer) = sidecars, engines
    aborted = Landing(consumer, range(BIG))
    ticket = offer(producer, "aborted", range(BIG))
    consumer.client.fetch("aborted", ticket, list(aborted.blocks))
    aborted.until(0.1)
    prefill.stop()
    aborted.until_still()
    consumer.client.cancel("aborted")
    status = decode.until(lambda status: status["fetches"]["draining"])
    assert status["ledger"]["quarantined"] == BIG
    assert consumer.client.step().is_empty()
    prefill.resume()
    reason = consumer.received("aborted")
    aborted.write(MINE)
    assert cause(reason) == "cancelled", reason
    producer.sent("aborted")
    assert aborted.keeps(MINE, seconds=0.5)
    for sidecar in sidecars:
        sidecar.until_idle()
