"""The ledger in whole sidecars: what /status says of blocks, and what is refused because of it."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvagent.visible.status import status
from kvagent.wire.messages import Claim, Complete, Hello
from tests.harness import Engine
from tests.loopback import LONG
from tests.test_agent_loopback import (
    LOCAL,
    REMOTE,
    TOKENS,
    at_rest,
    end,
    failed,
    good,
    hung,
    offer,
    reaching,
    sidecar,
    wait_for,
)
from tests.test_agent_loopback import engines as engines
from tests.test_agent_loopback import stage as stage

Engines = Callable[..., Engine]


def ledger(engine: Engine) -> dict[str, int]:
    """The states that are not empty, but for the free blocks; checks that none is missing."""
    agent = sidecar(engine).agent
    counts: dict[str, int] = dict(sidecar(engine).stage.call(lambda: status(agent)["ledger"]))
    assert sum(counts.values()) == engine.num_blocks
    del counts["free"]
    return {state: count for state, count in counts.items() if count}


def becomes(engine: Engine, expected: dict[str, int]) -> None:
    wait_for(lambda: ledger(engine) == expected, f"{expected}")


def test_every_state(engines: Engines) -> None:
    producer, consumer = engines("prefill", 2), engines("decode")
    assert ledger(producer) == ledger(consumer) == {}
    ticket = offer(producer, "r")
    becomes(producer, {"offered": 3})
    with sidecar(producer).holding(Hello) as reached:
        consumer.client.fetch("r", ticket, LOCAL)
        assert reached()
        assert ledger(consumer) == {"reserved": 3}
    assert consumer.received("r", LONG) is None
    hung(producer, consumer, "r")
    becomes(consumer, {"in_flight": 3})
    becomes(producer, {"claimed": 3})
    consumer.client.cancel("r")
    becomes(consumer, {"quarantined": 3})
    becomes(producer, {})
    for rank in range(2):
        sidecar(producer, rank).resume()
    assert end(consumer, "r").startswith("cancelled:")
    assert ledger(consumer) == {}
    with sidecar(producer).holding(Complete) as reached:
        consumer.client.fetch("next", offer(producer, "next"), LOCAL)
        assert reached()
        assert ledger(consumer) == {"in_flight": 3}
        assert ledger(producer) == {"offered": 3}  # it was over so soon that nobody claimed it
    assert consumer.received("next", LONG) is None
    producer.sent("next", LONG)
    at_rest(producer, consumer)


def test_leases_share_blocks(engines: Engines) -> None:
    producer, consumer = engines("prefill"), engines("decode")
    first = producer.client.offer("a", [1, 2, 3], TOKENS)
    producer.client.offer("b", [1, 2, 4], TOKENS)
    becomes(producer, {"offered": 4})
    sidecar(producer).hang()
    consumer.client.fetch("a", first, LOCAL)
    becomes(producer, {"claimed": 3, "offered": 1})
    sidecar(producer).resume()
    producer.sent("a", LONG)
    assert ledger(producer) == {"offered": 3}
    producer.client.cancel("b")
    producer.sent("b", LONG)
    assert ledger(producer) == {}


def test_a_block_has_one_writer(engines: Engines) -> None:
    producer, consumer = engines("prefill"), engines("decode")
    good(producer, consumer, "first")
    hung(producer, consumer, "r")
    why = failed(consumer, "thief", offer(producer, "thief"), [4, 2, 5])
    assert why.startswith("block_in_use: block 2 of group 0 is in_flight: ")
    producer.sent("thief", LONG)  # it is told at once that its ticket is not needed
    assert ledger(consumer) == {"in_flight": 3}
    sidecar(producer).resume()
    assert consumer.received("r", LONG) is None
    good(producer, consumer, "next")
    at_rest(producer, consumer)


def test_a_prefix_hit_may_be_shared_with_anything(engines: Engines) -> None:
    producer, consumer = engines("prefill"), engines("decode")
    good(producer, consumer, "first")
    consumer.client.offer("lent", LOCAL[:2], 8)
    becomes(consumer, {"offered": 2})
    consumer.client.fetch("b", offer(producer, "b"), LOCAL, 8)
    assert consumer.received("b", LONG) is None


def test_what_is_lent_is_not_written(engines: Engines) -> None:
    producer, consumer = engines("prefill"), engines("decode")
    consumer.client.offer("lent", [3], 4)
    why = failed(consumer, "r", offer(producer, "r"))
    assert why.startswith("block_in_use: block 3 of group 0 is offered: ")
    consumer.client.cancel("lent")
    consumer.sent("lent", LONG)
    good(producer, consumer, "next")


def test_what_is_written_is_not_lent(engines: Engines) -> None:
    producer, consumer, third = engines("prefill"), engines("decode"), engines("third")
    good(producer, consumer, "first")
    hung(producer, consumer, "r")
    ticket = consumer.client.offer("early", LOCAL, TOKENS)
    consumer.sent("early", LONG)  # nobody will read it
    assert failed(third, "early", ticket).startswith("refused: the offered blocks were still")
    sidecar(producer).resume()
    assert consumer.received("r", LONG) is None
    ticket = consumer.client.offer("late", LOCAL, TOKENS)
    third.client.fetch("late", ticket, LOCAL)
    assert third.received("late", LONG) is None
    assert all(
        third.tokens(layer, LOCAL, head).equal(producer.tokens(layer, REMOTE, head))
        for layer in third.caches[0]
        for head in range(third.heads)
    )
    consumer.sent("late", LONG)
    at_rest(producer, consumer, third)


def test_a_claim_that_waits_for_a_bad_offer_is_refused_at_once(engines: Engines) -> None:
    producer, consumer, third = engines("prefill"), engines("decode"), engines("third")
    good(producer, consumer, "first")
    hung(producer, consumer, "r")
    # Sent by the scheduler after the claim came: `holding` keeps the offer's message here.
    offered = consumer.client._send
    kept: list[object] = []
    consumer.client._send = kept.append  # type: ignore[method-assign, assignment]
    ticket = consumer.client.offer("early", LOCAL, TOKENS)
    consumer.client._send = offered  # type: ignore[method-assign]
    third.client.fetch("early", ticket, LOCAL)
    leases = sidecar(consumer).agent.leader.leases
    wait_for(lambda: leases.counts()["parked"] == 1, "the claim is parked")
    offered(kept[0])  # type: ignore[arg-type]
    assert end(third, "early").startswith("refused: ")
    sidecar(producer).resume()
    assert consumer.received("r", LONG) is None


@pytest.mark.parametrize("at", [Hello, Claim], ids=lambda kind: kind.__name__)
def test_nothing_stays_when_the_cache_is_another_one(engines: Engines, at: type) -> None:
    producer, consumer = engines("prefill"), engines("decode")
    offer(consumer, "lent")
    with reaching(producer, at) as reached:
        consumer.client.fetch("r", offer(producer, "r"), LOCAL)
        assert reached()
        info = consumer.workers[0]._info
        assert info is not None
        consumer.workers[0].join(info)
        assert consumer.received("r", LONG) is not None
        consumer.workers[0].allocate_kv_caches({"layer.0": consumer.spec}, consumer.num_blocks)
        becomes(consumer, {})
    producer.sent("r", LONG)
    becomes(producer, {})
