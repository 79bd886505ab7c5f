"""A worker that comes back to the cache its predecessor left in the sidecar."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import msgspec
import pytest
import torch

from kvagent import EngineClient, ModelInfo, WorkerClient, WorkerInfo
from kvagent.errors import CacheGoneError, GeometryError
from tests.harness import Engine, Sidecar, check, random_fill, start
from tests.loopback import LONG


@pytest.fixture(scope="module")
def sidecars(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Sidecar]]:
    made = start(tmp_path_factory.mktemp("reattach"), ["p0", "p1", "c0"])
    yield made
    for sidecar in made:
        sidecar.close()


def info_of(worker: WorkerClient) -> WorkerInfo:
    assert worker._info is not None
    return worker._info


def again(engine: Engine, sidecar: Sidecar, rank: int) -> dict[str, torch.Tensor]:
    """The worker of a rank dies, and another one re-attaches."""
    info = info_of(engine.workers[rank])
    engine.workers[rank].close()
    worker = WorkerClient(sidecar.socket)
    worker.join(info, keep_cache=True)
    engine.workers[rank] = worker
    engine.caches[rank] = worker.allocate_kv_caches(
        dict.fromkeys(engine.caches[rank], engine.spec), engine.num_blocks
    )
    return engine.caches[rank]


def test_the_bytes_the_tickets_and_the_peers_stay(sidecars: list[Sidecar]) -> None:
    with (
        Engine(sidecars[:2], "prefill", fill=random_fill(1)) as producer,
        Engine(sidecars[2:], "decode") as consumer,
    ):
        check(producer, consumer, "first", 0, 40)
        ticket = producer.client.offer("before", [1, 2, 3], 12)
        for rank in range(2):
            before = [cache.clone() for cache in producer.caches[rank].values()]
            after = again(producer, sidecars[rank], rank)
            assert all(map(torch.equal, before, after.values()))
        consumer.client.fetch("before", ticket, [4, 5, 6])
        assert consumer.received("before") is None
        for layer in consumer.caches[0]:
            for head in range(consumer.heads):
                want = producer.tokens(layer, [1, 2, 3], head)
                assert torch.equal(consumer.tokens(layer, [4, 5, 6], head), want)
        for cache in producer.caches[1].values():
            cache += 1.0  # the tensors are the memory that peers read
        check(producer, consumer, "next", 5, 33)
        again(consumer, sidecars[2], 0)
        check(producer, consumer, "last", 0, 40)


def test_a_whole_engine_comes_back(sidecars: list[Sidecar]) -> None:
    """Its scheduler is a new one: old tickets end, the bytes stay."""
    with Engine(sidecars[2:], "decode") as consumer:
        producer = Engine(sidecars[:2], "prefill", fill=random_fill(2))
        stale = producer.client.offer("stale", [1, 2, 3], 12)
        producer.client.close()
        bytes_before = [cache.clone() for cache in producer.caches[0].values()]
        for rank in range(2):
            again(producer, sidecars[rank], rank)
        producer.client = EngineClient(sidecars[0].socket)
        producer.client.wait_ready(LONG)
        assert all(map(torch.equal, bytes_before, producer.caches[0].values()))
        consumer.client.fetch("stale", stale, [1, 2, 3])
        assert (consumer.received("stale") or "").startswith("revoked:")
        check(producer, consumer, "good", 0, 40)
        producer.close()


def test_what_is_not_the_old_one_is_refused(sidecars: list[Sidecar]) -> None:
    with Engine(sidecars[:2], "prefill") as engine:
        leader, other = info_of(engine.workers[0]), info_of(engine.workers[1])
        specs = dict.fromkeys(engine.caches[0], engine.spec)
        for worker in engine.workers:
            worker.close()

        for wrong in (
            msgspec.structs.replace(leader, engine_id="another"),
            msgspec.structs.replace(leader, model=ModelInfo(name="another", num_layers=2)),
            other,
        ):
            with (
                closing(WorkerClient(sidecars[0].socket)) as worker,
                pytest.raises(CacheGoneError, match="the cache here is of 'prefill' tp 0/2"),
            ):
                worker.join(wrong, keep_cache=True)
        with closing(WorkerClient(sidecars[0].socket)) as worker:
            worker.join(leader, keep_cache=True)
            with pytest.raises(GeometryError, match="has 32 blocks, not 31"):
                worker.allocate_kv_caches(specs, 31)
        fewer = {"layer.0": engine.spec, "layer.1": replace_heads(engine)}
        with closing(WorkerClient(sidecars[0].socket)) as worker:
            worker.join(leader, keep_cache=True)
            with pytest.raises(GeometryError, match=r"other specs \(layer.1\)"):
                worker.allocate_kv_caches(fewer, engine.num_blocks)
        with closing(WorkerClient(sidecars[0].socket)) as worker:
            worker.join(leader, keep_cache=True)  # whatever was refused, the cache is still there
            worker.allocate_kv_caches(specs, engine.num_blocks)


def replace_heads(engine: Engine) -> object:
    return msgspec.structs.replace(engine.spec, num_kv_heads=8)


def test_there_is_nothing_to_keep(sidecars: list[Sidecar], tmp_path: Path) -> None:
    with Engine(sidecars[2:], "decode") as engine:
        info = info_of(engine.workers[0])
        tensors = {}
        for name, cache in engine.caches[0].items():
            tensors[name] = torch.zeros_like(cache).share_memory_()
        specs = dict.fromkeys(tensors, engine.spec)
        engine.workers[0].close()
        with closing(WorkerClient(sidecars[2].socket)) as worker:
            worker.join(info)
            worker.register_kv_caches(tensors, specs)
        with (
            closing(WorkerClient(sidecars[2].socket)) as worker,
            pytest.raises(CacheGoneError, match="was the engine's own memory and went with it"),
        ):
            worker.join(info, keep_cache=True)
    with (
        closing(start(tmp_path, ["fresh"])[0]) as fresh,
        closing(WorkerClient(fresh.socket)) as worker,
        pytest.raises(CacheGoneError, match="keeps no cache; open a new WorkerClient"),
    ):
        worker.join(info, keep_cache=True)
