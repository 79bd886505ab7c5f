"""A leader that dies while its followers read: nobody may write after the engine was told."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from contextlib import closing
from typing import Any

import pytest
import torch

from kvagent import EngineClient
from kvagent.agent import follower
from kvagent.wire.messages import AbortPart, JoinLeader, Part, PartState, Peer, Refused
from kvagent.wire.peer import Handler
from tests.harness import GUARD, Engine
from tests.loopback import LONG, LoopbackSidecar, answered
from tests.test_agent_loopback import (
    LOCAL,
    good,
    hung,
    offer,
    quiet,
    sidecar,
    wait_for,
)
from tests.test_agent_loopback import engines as engines
from tests.test_agent_loopback import stage as stage

Engines = Callable[..., Engine]
FENCE = 0.3


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(follower, "EVERY", 0.2)


def reading(one: LoopbackSidecar) -> int:
    return one.stage.call(one.agent.rank.reading)


def test_fetches_end_when_the_followers_have_stopped(engines: Engines) -> None:
    producer, consumer = engines("prefill", 2), engines("decode", 2, fence_seconds=FENCE)
    good(producer, consumer, "first")
    consumer.client.offer("lent", [10, 11, 12], 12)
    hung(producer, consumer, "r", ranks=[1])
    leader, other = sidecar(consumer), sidecar(consumer, 1)
    wait_for(lambda: reading(other), "the follower reads")
    leader.close()
    consumer.sent("lent", LONG)  # nobody can claim it any more
    assert (consumer.received("r", LONG) or "").startswith("agent_lost")
    assert not reading(other)
    assert other.agent.rank.fences == 1
    for cache in consumer.caches[1].values():
        cache.fill_(GUARD)
    sidecar(producer, 1).resume()
    quiet(consumer)
    assert all(bool((cache == GUARD).all()) for cache in consumer.caches[1].values())


def test_one_rank_has_nobody_to_wait_for(engines: Engines) -> None:
    producer, consumer = engines("prefill", 2), engines("decode")
    good(producer, consumer, "first")
    consumer.client.fetch("r", offer(producer, "r"), [10, 11, 12])
    sidecar(consumer).close()
    began = time.monotonic()
    consumer.received("r", LONG)
    assert time.monotonic() - began < 1.0


def test_a_new_leader_waits_for_what_is_read_for_the_old_one(engines: Engines) -> None:
    """The leader's process lives, but its worker joins afresh: it is another leader."""
    producer, consumer = engines("prefill", 2), engines("decode", 2, fence_seconds=1.0)
    good(producer, consumer, "first")
    hung(producer, consumer, "r", ranks=[1])
    other = sidecar(consumer, 1)
    wait_for(lambda: reading(other), "the follower reads")
    worker = consumer.workers[0]
    assert worker._info is not None
    consumer.client.close()
    worker.join(worker._info)
    worker.allocate_kv_caches(dict.fromkeys(consumer.caches[0], consumer.spec), consumer.num_blocks)
    client = EngineClient(sidecar(consumer).socket)
    client.wait_ready(LONG)
    assert not reading(other)
    assert other.agent.rank.fences == 1
    client.close()


def test_a_leader_that_is_only_slow_loses_nothing(engines: Engines) -> None:
    producer, consumer = engines("prefill", 2), engines("decode", 2)
    good(producer, consumer, "first")
    hung(producer, consumer, "r", ranks=[1])
    other = sidecar(consumer, 1)
    wait_for(lambda: reading(other), "the follower reads")
    until = time.monotonic() + 2.0
    while time.monotonic() < until:
        assert reading(other)
        time.sleep(0.05)
    sidecar(producer, 1).resume()
    assert consumer.received("r", LONG) is None


def test_silence_ends_what_is_read(engines: Engines) -> None:
    producer, consumer = engines("prefill", 2), engines("decode", 2, fence_seconds=FENCE)
    good(producer, consumer, "first")
    hung(producer, consumer, "r", ranks=[1])
    other = sidecar(consumer, 1)
    wait_for(lambda: reading(other), "the follower reads")
    with sidecar(consumer).holding(JoinLeader):
        wait_for(lambda: not reading(other), "the follower gives up")
    assert consumer.received("r", LONG) is not None
    sidecar(producer, 1).resume()
    wait_for(lambda: sidecar(consumer).agent.leader.team.complete, "it is followed again")
    good(producer, consumer, "next")


def late(one: LoopbackSidecar, kind: type) -> list[Peer]:
    """Messages of a kind that never arrive at the sidecar; they can be handed in later."""
    kept: list[Peer] = []
    handler = one.agent.peers._handler

    async def keep(message: Peer) -> Peer:
        kept.append(message)
        await asyncio.sleep(LONG)
        return await answered(handler(message))

    def gate(message: Peer) -> Peer | Coroutine[Any, Any, Peer]:
        return keep(message) if isinstance(message, kind) else handler(message)

    one.agent.peers._handler = gate
    return kept


async def answer_to(handler: Handler, message: Peer) -> Peer:
    return await answered(handler(message))


def untouched(cache: dict[str, torch.Tensor]) -> bool:
    return all(bool((tensor == GUARD).all()) for tensor in cache.values())


def test_a_part_of_a_leader_before_is_not_begun(engines: Engines) -> None:
    producer, consumer = engines("prefill"), engines("decode", 2)
    good(producer, consumer, "first")
    other = sidecar(consumer, 1)
    handler = other.agent.peers._handler
    parts = late(other, Part)
    late(other, AbortPart)
    consumer.client.fetch("r", offer(producer, "r"), LOCAL)
    wait_for(lambda: parts, "the part is on its way")
    worker = consumer.workers[0]
    assert worker._info is not None
    consumer.client.close()
    worker.join(worker._info)
    worker.allocate_kv_caches(dict.fromkeys(consumer.caches[0], consumer.spec), consumer.num_blocks)
    with closing(EngineClient(sidecar(consumer).socket)) as client:
        client.wait_ready(LONG)
        for cache in consumer.caches[1].values():
            cache.fill_(GUARD)
        answer = other.stage.run(answer_to(handler, parts[0]))
        assert isinstance(answer, PartState)
        assert answer.failure.startswith("rank_lost: this rank follows another leader")
        assert untouched(consumer.caches[1])


def test_late_news_of_a_rank_is_no_news(engines: Engines) -> None:
    producer, consumer = engines("prefill", 2), engines("decode", 2)
    leader, other = sidecar(consumer), sidecar(consumer, 1)
    seen: list[Peer] = []
    handler = leader.agent.peers._handler

    def spy(message: Peer) -> Peer | Coroutine[Any, Any, Peer]:
        if isinstance(message, JoinLeader):
            seen.append(message)
        return handler(message)

    leader.agent.peers._handler = spy
    wait_for(lambda: seen, "a sign of life")
    old = seen[0]
    worker = consumer.workers[1]
    assert worker._info is not None
    worker.join(worker._info)
    consumer.caches[1] = worker.allocate_kv_caches(
        dict.fromkeys(consumer.caches[0], consumer.spec), consumer.num_blocks
    )
    incarnation = other.agent.rank.require_identity().incarnation
    team = leader.agent.leader.team
    wait_for(
        lambda: team.complete and team.followers()[0].card.incarnation == incarnation, "the new one"
    )
    good(producer, consumer, "first")
    hung(producer, consumer, "r", ranks=[1])
    answer = leader.stage.run(answer_to(handler, old))
    assert isinstance(answer, Refused)
    assert answer.code == "past"
    quiet(consumer)
    sidecar(producer, 1).resume()
    assert consumer.received("r", LONG) is None
