"""`quiesce` and `resume`: nothing starts in between, and what waited starts afterwards."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from kvagent.visible.health import IN_A_ROW
from kvagent.visible.status import why_not_ready
from kvagent.wire.messages import Hello
from tests.harness import Engine
from tests.loopback import LONG
from tests.test_agent_loopback import (
    LOCAL,
    at_rest,
    end,
    failed,
    good,
    hung,
    offer,
    quiet,
    same,
    sidecar,
    wait_for,
)
from tests.test_agent_loopback import engines as engines
from tests.test_agent_loopback import stage as stage

Engines = Callable[..., Engine]


def test_an_idle_engine_is_quiet_at_once(engines: Engines) -> None:
    engine = engines("decode")
    assert engine.client.quiesce(LONG) == ()
    assert why_not_ready(sidecar(engine).agent).startswith("quiesced")
    assert engine.client.quiesce(LONG) == ()  # a second time is no error
    engine.client.resume()
    wait_for(lambda: not why_not_ready(sidecar(engine).agent), "ready again")


def test_fetches_wait_until_it_resumes(engines: Engines) -> None:
    producer, consumer = engines("prefill"), engines("decode", 2)
    assert consumer.client.quiesce(LONG) == ()
    consumer.client.fetch("r", offer(producer, "r"), LOCAL)
    consumer.client.fetch("cancelled", offer(producer, "cancelled"), [10, 11, 12])
    consumer.client.cancel("cancelled")
    assert end(consumer, "cancelled", [10, 11, 12]).startswith("cancelled:")
    began = time.monotonic()
    quiet(consumer)
    assert sidecar(consumer).agent.leader.ledger.counts()["reserved"] == len(LOCAL)
    waited = time.monotonic() - began
    consumer.client.resume()
    assert consumer.received("r", LONG) is None
    assert same(producer, consumer)
    stats = consumer.seen[-1].kv_connector_stats["fetches"]["r"]
    assert waited <= stats["wait"] <= stats["seconds"], "the leader's wait is in it"
    producer.sent("r", LONG)
    at_rest(producer, consumer)


def test_it_waits_for_what_is_read_and_written(engines: Engines) -> None:
    producer, consumer = engines("prefill"), engines("decode")
    good(producer, consumer, "first")
    hung(producer, consumer, "r")
    for engine in (producer, consumer):
        assert engine.client.quiesce(0.1) == ("r",)
    found: list[tuple[str, ...]] = []
    waiting = threading.Thread(target=lambda: found.append(producer.client.quiesce(LONG)))
    waiting.start()
    sidecar(producer).resume()
    assert consumer.received("r", LONG) is None
    waiting.join(LONG)
    assert found == [()]
    assert consumer.client.quiesce(LONG) == ()
    for engine in (producer, consumer):
        engine.client.resume()
    good(producer, consumer, "next")


def test_a_fetch_in_its_handshake_waits_too(engines: Engines) -> None:
    producer, consumer = engines("prefill"), engines("decode")
    with sidecar(producer).holding(Hello) as reached:
        consumer.client.fetch("r", offer(producer, "r"), LOCAL)
        assert reached()
        assert consumer.client.quiesce(LONG) == ()
    quiet(consumer)
    assert sidecar(consumer).agent.leader.ledger.counts()["reserved"] == len(LOCAL)
    consumer.client.resume()
    assert consumer.received("r", LONG) is None
    assert same(producer, consumer)


def test_a_producer_refuses_first_claims_meanwhile(engines: Engines) -> None:
    producer, consumer = engines("prefill"), engines("decode")
    ticket = offer(producer, "r")
    assert producer.client.quiesce(LONG) == ()  # offers alone are no transfers
    assert failed(consumer, "r", ticket).startswith("quiesced: the producer's engine starts no")
    producer.client.resume()
    consumer.client.fetch("r", ticket, LOCAL)  # the ticket is as good as before
    assert consumer.received("r", LONG) is None
    assert same(producer, consumer)


def test_a_read_that_is_not_claimed_yet_is_not_waited_for(engines: Engines) -> None:
    """It began before, but is not called good: the producer's engine may do what it likes."""
    producer, consumer = engines("prefill"), engines("decode", 2)
    good(producer, consumer, "first")
    ticket = offer(producer, "r")
    fabric = sidecar(producer).fabric
    reads = fabric.reads
    sidecar(producer).hang()
    consumer.client.fetch("r", ticket, LOCAL)
    wait_for(lambda: fabric.reads > reads, "not reading")
    assert producer.client.quiesce(LONG) == ()
    sidecar(producer).resume()
    assert end(consumer, "r").startswith("quiesced: the producer's engine starts no")
    quiet(producer)
    producer.client.resume()
    consumer.client.fetch("again", ticket, LOCAL)
    assert consumer.received("again", LONG) is None
    assert same(producer, consumer)
    producer.sent("r", LONG)
    at_rest(producer, consumer)


def test_the_deadline_goes_on(engines: Engines) -> None:
    producer, consumer = engines("prefill"), engines("decode", fetch_timeout=2.0)
    assert consumer.client.quiesce(LONG) == ()
    for number in range(IN_A_ROW):
        request = f"r{number}"
        assert failed(consumer, request, offer(producer, request)) == (
            "timed_out: not done after 2 s; this engine is quiesced, and starts nothing until "
            "resume()"
        )
    consumer.client.resume()
    wait_for(lambda: not why_not_ready(sidecar(consumer).agent), "the peer was never asked")
    good(producer, consumer, "next")


def test_it_ends_with_the_scheduler(engines: Engines) -> None:
    engine = engines("decode")
    assert engine.client.quiesce(LONG) == ()
    engine.client.close()
    wait_for(lambda: not sidecar(engine).agent.leader.quiesced, "resumed")
