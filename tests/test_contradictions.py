"""Ranks that contradict each other about their engine are refused, and the scheduler hears why;
what a caller gets wrong is refused before it is sent."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest

from kvagent import EngineClient, FullAttentionSpec, ModelInfo, WorkerClient, WorkerInfo
from kvagent.errors import AgentError
from tests.harness import Engine
from tests.loopback import Stage

MODEL = ModelInfo(name="m", num_layers=2)
SPEC = FullAttentionSpec(block_size=4, num_kv_heads=4, head_size=8, dtype="float32")


@pytest.fixture
def stage() -> Iterator[Stage]:
    made = Stage()
    yield made
    made.close()


@pytest.mark.parametrize(
    ("info", "layers", "spec", "num_blocks", "words"),
    [
        ({"tp_size": 3}, 2, {}, 8, "rank 0 says tp size 2"),
        ({}, 1, {}, 8, "the same layers: layer.1"),
        ({}, 2, {"block_size": 8}, 8, "block_size of cache group 0 is 8, rank 0 has 4"),
        ({}, 2, {}, 9, "num_blocks of cache group 0 is 9, rank 0 has 8"),
        ({}, 2, {"head_size": 16}, 8, "head_size"),
    ],
    ids=["tp", "layers", "block-size", "num-blocks", "head-size"],
)
def test_a_rank_that_contradicts(
    stage: Stage,
    info: dict[str, Any],
    layers: int,
    spec: dict[str, Any],
    num_blocks: int,
    words: str,
) -> None:
    sidecars = stage.sidecars(2)
    workers = [WorkerClient(sidecar.socket) for sidecar in sidecars]
    workers[0].join(WorkerInfo(engine_id="e", model=MODEL, tp_size=2))
    leader = workers[0].endpoint
    place = {"tp_size": 2, **info}
    workers[1].join(WorkerInfo(engine_id="e", model=MODEL, tp_rank=1, leader=leader, **place))
    workers[0].allocate_kv_caches({f"layer.{i}": SPEC for i in range(2)}, 8)
    fields = {name: getattr(SPEC, name) for name in SPEC.__struct_fields__} | spec
    other = FullAttentionSpec(**fields)
    workers[1].allocate_kv_caches({f"layer.{i}": other for i in range(layers)}, num_blocks)
    client = EngineClient(sidecars[0].socket)
    until = time.monotonic() + 20
    reason = ""
    while words not in reason and time.monotonic() < until:
        with pytest.raises(AgentError, match="waiting for ranks") as caught:
            client.wait_ready(0.2)
        reason = str(caught.value)
    assert words in reason
    client.close()
    for worker in workers:
        worker.close()


def test_wrong_types_cost_nothing(stage: Stage) -> None:
    producer = Engine(stage.sidecars(1), "p")  # type: ignore[arg-type]
    ticket = producer.client.offer("kept", [1], 4)
    for call in (
        lambda: producer.client.offer(7, [1], 4),  # type: ignore[arg-type]
        lambda: producer.client.offer("r", [1], 4.0),  # type: ignore[arg-type]
        lambda: producer.client.fetch(9, ticket, [1]),  # type: ignore[arg-type]
        lambda: producer.client.fetch("r", ticket, [1], "4"),  # type: ignore[arg-type]
        lambda: producer.client.fetch("r", ticket, [1], -1),
        lambda: producer.client.cancel(7),  # type: ignore[arg-type]
    ):
        with pytest.raises(AgentError, match=r"must be|negative"):
            call()
    time.sleep(0.1)
    assert producer.client.step().is_empty(), "the offer that is open stays open"
    producer.close()


def test_a_scheduler_that_breaks_the_protocol_loses_its_leases_first(stage: Stage) -> None:
    """It takes the end of the connection for the sidecar's death, and uses its blocks again."""
    producer = Engine(stage.sidecars(1), "p")  # type: ignore[arg-type]
    consumer = Engine(stage.sidecars(1), "d")  # type: ignore[arg-type]
    ticket = producer.client.offer("kept", [1], 4)
    producer.client._socket.send(b"\xff\xff\xff\xff garbage")
    producer.sent("kept")
    consumer.client.fetch("kept", ticket, [2])
    reason = consumer.received("kept")
    assert reason is not None
    assert reason.startswith("revoked")
    producer.close()
    consumer.close()
