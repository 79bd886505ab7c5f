"""`EngineClient.hold`: a ticket whose request waits for blocks keeps its lease."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import pytest

from kvagent.wire.messages import Claim, Complete, Renew
from tests.harness import Engine, random_fill
from tests.loopback import LONG, Stage

REMOTE, LOCAL, TOKENS = [7, 8, 9], [1, 2, 3], 12
LEASE = 2.0


class Both:
    def __init__(self, stage: Stage) -> None:
        self.sidecars = [stage.sidecars(1, lease_seconds=LEASE)[0] for _ in range(2)]
        names = ("prefill", "decode")
        self.producer, self.consumer = (
            Engine([sidecar], name, fill=random_fill(i))  # type: ignore[list-item]
            for i, (sidecar, name) in enumerate(zip(self.sidecars, names, strict=True))
        )

    @property
    def claimed(self) -> int:
        return self.sidecars[0].agent.leader.leases.counts()["claimed"]

    def wait(self, done: Callable[[], object], what: str) -> None:
        until = time.monotonic() + LONG
        while not done():
            assert time.monotonic() < until, what
            time.sleep(0.005)

    def wait_claimed(self, count: int) -> None:
        self.wait(lambda: self.claimed == count, f"{count} claimed")


@pytest.fixture
def both() -> Iterator[Both]:
    stage = Stage()
    made = Both(stage)
    yield made
    made.consumer.close()
    made.producer.close()
    stage.close()


def test_a_held_ticket_outlives_its_lease(both: Both) -> None:
    ticket = both.producer.client.offer("r", REMOTE, TOKENS)
    both.consumer.client.hold(ticket)
    both.consumer.client.hold(ticket)  # changes nothing
    both.wait_claimed(1)
    time.sleep(2.5 * LEASE)
    both.consumer.client.fetch("r", ticket, LOCAL)
    assert both.consumer.received("r", LONG) is None
    for head in range(both.producer.heads):
        want = both.producer.tokens("layer.0", REMOTE, head)
        assert both.consumer.tokens("layer.0", LOCAL, head).equal(want)
    both.producer.sent("r", LONG)


def test_what_is_held_is_not_claimed_again(both: Both) -> None:
    with both.sidecars[0].hearing() as heard:
        ticket = both.producer.client.offer("r", REMOTE, TOKENS)
        both.consumer.client.hold(ticket)
        both.wait_claimed(1)
        both.consumer.client.fetch("r", ticket, LOCAL)
        assert both.consumer.received("r", LONG) is None
        both.producer.sent("r", LONG)
    (claim,) = (message for message in heard if isinstance(message, Claim))
    (complete,) = (message for message in heard if isinstance(message, Complete))
    assert not claim.reading
    assert complete.leases[0].fetch_id == claim.fetch_id
    time.sleep(2 * LEASE / 3)
    assert not both.sidecars[1].agent.leader.borrower.holder._held, "nor renewed any more"


def test_a_held_ticket_that_is_read_for_long(both: Both) -> None:
    """Its fetch claims it, too: now it is read. From then on the fetch renews it."""
    ticket = both.producer.client.offer("r", REMOTE, TOKENS)
    both.consumer.client.hold(ticket)
    both.wait_claimed(1)
    with both.sidecars[0].hearing() as heard:
        both.sidecars[0].hang()
        both.consumer.client.fetch("r", ticket, LOCAL)
        holder = both.sidecars[1].agent.leader.borrower.holder
        both.wait(lambda: not holder._held, "the holder renews it on")
        assert both.producer.client.quiesce(0.1) == ("r",), "it is read"
        time.sleep(2.5 * LEASE)
        assert both.claimed == 1
        both.sidecars[0].resume()
        assert both.consumer.received("r", LONG) is None
    both.producer.sent("r", LONG)
    both.producer.client.resume()
    (claim,) = (message for message in heard if isinstance(message, Claim))
    assert claim.reading
    assert sum(isinstance(message, Renew) for message in heard) >= 3


def test_a_fetch_right_after_the_hold(both: Both) -> None:
    for name in ("a", "b", "c"):
        ticket = both.producer.client.offer(name, REMOTE, TOKENS)
        both.consumer.client.hold(ticket)
        both.consumer.client.fetch(name, ticket, LOCAL)
        assert both.consumer.received(name, LONG) is None
        both.producer.sent(name, LONG)


def test_a_held_ticket_is_released(both: Both) -> None:
    ticket = both.producer.client.offer("r", REMOTE, TOKENS)
    both.consumer.client.hold(ticket)
    both.wait_claimed(1)
    both.consumer.client.release(ticket)
    both.producer.sent("r", LONG)
    assert both.sidecars[0].agent.leader.leases.ended["released"] == 1


def test_a_scheduler_that_dies_holds_nothing(both: Both) -> None:
    both.consumer.client.hold(both.producer.client.offer("r", REMOTE, TOKENS))
    both.wait_claimed(1)
    both.consumer.client.close()
    both.producer.sent("r", LONG)
    assert both.sidecars[0].agent.leader.leases.ended["released"] == 1


def test_holding_comes_too_late(both: Both) -> None:
    ticket = both.producer.client.offer("r", REMOTE, TOKENS)
    both.producer.sent("r", LONG)  # it lapsed
    both.consumer.client.hold(ticket)
    both.consumer.client.fetch("r", ticket, LOCAL)
    assert (both.consumer.received("r", LONG) or "").startswith("expired")


def test_one_held_ticket_is_fetched_once(both: Both) -> None:
    ticket = both.producer.client.offer("r", REMOTE, TOKENS)
    both.consumer.client.hold(ticket)
    both.wait_claimed(1)
    both.consumer.client.fetch("r", ticket, LOCAL)
    assert both.consumer.received("r", LONG) is None
    both.consumer.client.fetch("again", ticket, LOCAL)
    assert (both.consumer.received("again", LONG) or "").startswith("used")


def test_what_is_only_held_does_not_keep_a_producer_busy(both: Both) -> None:
    ticket = both.producer.client.offer("r", REMOTE, TOKENS)
    both.consumer.client.hold(ticket)
    both.wait_claimed(1)
    assert both.producer.client.quiesce(LONG) == ()
    both.consumer.client.fetch("r", ticket, LOCAL)
    assert (both.consumer.received("r", LONG) or "").startswith("quiesced:")
    both.producer.client.resume()


def test_a_fetch_that_waits_keeps_what_was_held(both: Both) -> None:
    ticket = both.producer.client.offer("r", REMOTE, TOKENS)
    both.consumer.client.hold(ticket)
    both.wait_claimed(1)
    assert both.consumer.client.quiesce(LONG) == ()
    both.consumer.client.fetch("r", ticket, LOCAL)
    time.sleep(2 * LEASE)
    both.consumer.client.resume()
    assert both.consumer.received("r", LONG) is None
    both.producer.sent("r", LONG)


def test_tickets_of_an_engine_that_is_gone_are_not_renewed(both: Both) -> None:
    ticket = both.producer.client.offer("r", REMOTE, TOKENS)
    both.consumer.client.hold(ticket)
    both.wait_claimed(1)
    both.consumer.client.drop_peer("prefill")
    both.producer.sent("r", LONG)  # the lease has run out
    held = both.sidecars[1].agent.leader.borrower.holder._held.values()
    assert [one.session for one in held] == [None]


def test_two_fetches_of_one_held_ticket(both: Both) -> None:
    ticket = both.producer.client.offer("r", REMOTE, TOKENS)
    both.consumer.client.hold(ticket)
    both.wait_claimed(1)
    both.consumer.client.fetch("r1", ticket, LOCAL)
    both.consumer.client.fetch("r2", ticket, [10, 11, 12])
    ends: dict[str, str] = {}
    while len(ends) < 2:
        out = both.consumer.until(lambda o: bool(o.finished_recving), LONG)
        for request in out.finished_recving or ():
            ends[request] = out.failed_recving.get(request, "")
    assert ends["r1"] == ""
    assert ends["r2"].startswith("used:")
    both.producer.sent("r", LONG)
