"""`EmbeddedAgent`: the agent in threads of this process, over the engine's own tensors."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from kvagent import EmbeddedAgent, FullAttentionSpec, ModelInfo, WorkerInfo
from kvagent.errors import AgentError, ConfigError, GeometryError
from kvagent.fabric.loopback import LoopbackFabric, LoopbackNetwork

SPEC = FullAttentionSpec(
    block_size=4,
    num_kv_heads=2,
    head_size=8,
    dtype="float32",
    axes=("block", "kv", "token", "head", "channel"),
)
SHAPE = (32, 2, 4, 2, 8)


@pytest.fixture
def network() -> LoopbackNetwork:
    return LoopbackNetwork()


@pytest.fixture
def agents(network: LoopbackNetwork) -> Iterator[Any]:
    made: list[EmbeddedAgent] = []

    def make(engine_id: str, **settings: Any) -> EmbeddedAgent:
        agent = EmbeddedAgent(make_fabric=lambda name, _: LoopbackFabric(network, name), **settings)
        made.append(agent)
        agent.join(WorkerInfo(engine_id=engine_id, model=ModelInfo(name="m", num_layers=1)))
        return agent

    yield make
    for agent in made:
        agent.close()


def received(agent: EmbeddedAgent, request_id: str) -> str | None:
    until = time.monotonic() + 20
    while time.monotonic() < until:
        out = agent.step()
        if request_id in (out.finished_recving or ()):
            return out.failed_recving.get(request_id)
        time.sleep(0.001)
    raise AssertionError("it did not end")


def test_a_transfer_between_tensors_of_this_process(agents: Any) -> None:
    producer, consumer = agents("prefill"), agents("decode")
    # A view into a larger storage, rows further apart than they are long: strides say it all.
    big = torch.randn(32, 2, 4, 2, 16)
    producer.register_kv_caches({"l": big[..., 8:]}, {"l": SPEC})
    caches = consumer.allocate_kv_caches({"l": SPEC}, 32)
    for agent in (producer, consumer):
        agent.wait_ready(20)
    ticket = producer.offer("r", [5, 6], 7)
    consumer.fetch("r", ticket, [1, 2])
    assert received(consumer, "r") is None
    assert caches["l"][1].equal(big[5, ..., 8:])
    assert caches["l"][2, :, :3].equal(big[6, :, :3, :, 8:])
    assert not caches["l"][2, :, 3:].any()
    assert producer.drain(5) == ()
    assert producer.step().finished_sending == {"r"}


def test_before_it_is_ready(agents: Any) -> None:
    agent = agents("engine")
    with pytest.raises(AgentError, match=r"wait_ready\(\) first"):
        agent.step()
    with pytest.raises(AgentError, match="no cache registered yet"):
        agent.wait_ready(0.05)
    with pytest.raises(GeometryError, match="no tensor 'l'"):
        agent.register_kv_caches({}, {"l": SPEC})
    with pytest.raises(GeometryError, match=r"float16.*float32"):
        agent.register_kv_caches({"l": torch.zeros(SHAPE, dtype=torch.float16)}, {"l": SPEC})
    agent.register_kv_caches({"l": torch.zeros(SHAPE)}, {"l": SPEC})
    agent.wait_ready(20)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"lease_second": 5}, "did you mean 'lease_seconds'"),
        ({"lease_seconds": "5"}, "lease_seconds"),
        ({"bind": "10.0.0.5:0"}, "insecure"),
    ],
)
def test_bad_settings(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        EmbeddedAgent(**settings)


def test_a_port_that_is_taken(agents: Any) -> None:
    agent = agents("engine")
    before = threading.active_count()
    with pytest.raises(ConfigError, match="cannot bind the control port"):
        EmbeddedAgent(bind=agent.endpoint)
    assert threading.active_count() == before


def test_closing_twice_and_the_threads_it_leaves(network: LoopbackNetwork) -> None:
    before = threading.active_count()
    agent = EmbeddedAgent(make_fabric=lambda name, _: LoopbackFabric(network, name))
    agent.join(WorkerInfo(engine_id="e", model=ModelInfo(name="m", num_layers=1)))
    agent.register_kv_caches({"l": torch.zeros(SHAPE)}, {"l": SPEC})
    agent.wait_ready(20)
    agent.close()
    agent.close()
    assert threading.active_count() == before
    assert not network.fabrics
