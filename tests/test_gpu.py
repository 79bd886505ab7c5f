"""GPU memory over real NIXL and CUDA; `tests/test_gpu_paths.py` is the same with a stand-in.

Each case has a twin on the host, so that what is written here is known to run without a GPU too.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch

from kvagent import EmbeddedAgent, FullAttentionSpec, ModelInfo, WorkerClient, WorkerInfo
from kvagent.errors import GeometryError
from tests.harness import BLOCKS_FIRST_HND, HND, NHD, Engine, Sidecar, check, random_fill, start
from tests.loopback import LONG

GPU = pytest.mark.gpu
DEVICES = ["cpu", pytest.param("cuda:0", marks=GPU)]
SHAPE = {"heads": 8, "head_size": 16, "block_size": 8, "layers": 2, "num_blocks": 33}
TOKENS = 120


@pytest.fixture(scope="module")
def sidecars(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Sidecar]]:
    yield from running(tmp_path_factory.mktemp("gpu"), ["p0", "p1", "c0"])


@pytest.fixture(scope="module")
def mirrored(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Sidecar]]:
    folder = tmp_path_factory.mktemp("mirrored")
    settings = folder / "settings.toml"
    settings.write_text('kv_buffer = "host"\n')
    yield from running(folder, ["m0"], "--config", str(settings))


def running(folder: Path, names: list[str], *options: str) -> Iterator[list[Sidecar]]:
    made = start(folder, names, *options)
    yield made
    for sidecar in made:
        sidecar.close()


def engine(machines: list[Sidecar], name: str, device: str, **more: Any) -> Engine:
    return Engine(machines, name, device=device, **{**SHAPE, **more})


def compare(producer: Engine, consumer: Engine) -> None:
    check(producer, consumer, "whole", 0, TOKENS)
    check(producer, consumer, "partial", 5, TOKENS - 3)
    check(producer, consumer, "one token", 50, 51)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("tp", "ours", "theirs"),
    [(1, NHD, NHD), (2, NHD, HND), (1, BLOCKS_FIRST_HND, NHD)],
    ids=["same", "tp2, permuted", "blocks first"],
)
def test_memory_of_the_sidecars(
    sidecars: list[Sidecar], device: str, tp: int, ours: tuple[str, ...], theirs: tuple[str, ...]
) -> None:
    fill = random_fill(1)
    with (
        engine(sidecars[:tp], "prefill", device, axes=ours, fill=fill) as producer,
        engine(sidecars[2:], "decode", device, axes=theirs) as consumer,
    ):
        compare(producer, consumer)


@pytest.mark.parametrize(
    ("source", "target"),
    [
        pytest.param("cuda:0", "cpu", marks=GPU),
        pytest.param("cpu", "cuda:0", marks=GPU),
        ("cpu", "cpu"),
    ],
)
@pytest.mark.parametrize("mirror", ["producer", "consumer"])
def test_mirrors_and_the_host(
    sidecars: list[Sidecar], mirrored: list[Sidecar], mirror: str, source: str, target: str
) -> None:
    here, there = (mirrored, sidecars[2:]) if mirror == "producer" else (sidecars[2:], mirrored)
    with (
        engine(here, "prefill", source, axes=NHD, fill=random_fill(2)) as producer,
        engine(there, "decode", target, axes=HND) as consumer,
    ):
        compare(producer, consumer)


@pytest.mark.parametrize("device", DEVICES)
def test_a_cache_outlives_its_worker(sidecars: list[Sidecar], device: str) -> None:
    with (
        engine(sidecars[:1], "prefill", device, fill=random_fill(3)) as producer,
        engine(sidecars[2:], "decode", device) as consumer,
    ):
        check(producer, consumer, "first", 0, TOKENS)
        before = {name: cache.clone() for name, cache in producer.caches[0].items()}
        info = producer.workers[0]._info
        assert info is not None
        producer.caches[0].clear()
        producer.workers[0].close()
        worker = producer.workers[0] = WorkerClient(sidecars[0].socket)
        worker.join(info, keep_cache=True)
        producer.caches[0] = worker.allocate_kv_caches(
            dict.fromkeys(before, producer.spec), producer.num_blocks, device
        )
        assert all(cache.equal(before[name]) for name, cache in producer.caches[0].items())
        check(producer, consumer, "last", 0, TOKENS)


@pytest.mark.gpu
def test_an_allocator_that_cannot_share(tmp_path: Path) -> None:
    environ = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    (sidecar,) = start(tmp_path, ["s"], env=environ)
    try:
        with closing(WorkerClient(sidecar.socket)) as worker:
            worker.join(WorkerInfo(engine_id="e", model=ModelInfo(name="m")))
            with pytest.raises(GeometryError, match="expandable_segments:True"):
                worker.allocate_kv_caches({"l": SPEC}, 4, "cuda:0")
    finally:
        sidecar.close()


# ---------------------------------------------------------------- embedded


SPEC = FullAttentionSpec(
    block_size=16, num_kv_heads=8, head_size=128, dtype="bfloat16", axes=("block", "kv", *NHD[2:])
)
BLOCKS = 128


@pytest.fixture
def agents() -> Iterator[Any]:
    made: list[EmbeddedAgent] = []

    def make(engine_id: str, device: str, **settings: Any) -> tuple[EmbeddedAgent, torch.Tensor]:
        cache = torch.zeros(BLOCKS, 2, 16, 8, 128, dtype=torch.bfloat16, device=device)
        agent = EmbeddedAgent(**settings)
        made.append(agent)
        agent.join(WorkerInfo(engine_id=engine_id, model=ModelInfo(name="m", num_layers=1)))
        agent.register_kv_caches({"l": cache}, {"l": SPEC})
        agent.wait_ready(LONG)
        return agent, cache

    yield make
    for agent in made:
        agent.close()


def received(agent: EmbeddedAgent, request_id: str) -> str | None:
    until = time.monotonic() + LONG
    while time.monotonic() < until:
        out = agent.step()
        if request_id in (out.finished_recving or ()):
            return out.failed_recving.get(request_id)
        time.sleep(0.0005)
    raise AssertionError("it did not end")


@pytest.mark.parametrize("device", DEVICES)
def test_the_engines_own_tensors(agents: Any, device: str) -> None:
    (producer, source), (consumer, target) = agents("prefill", device), agents("decode", device)
    source.normal_()
    if device != "cpu":
        torch.cuda.synchronize()
    here, there = [*range(3, 90, 2)], [*range(2, 46)]
    consumer.fetch("r", producer.offer("r", there, 44 * 16), here)
    assert received(consumer, "r") is None
    assert target[here].equal(source[there])  # by a kernel that was launched after the report
    others = [block for block in range(BLOCKS) if block not in here]
    assert not target[others].any()


@pytest.mark.gpu
@pytest.mark.parametrize("settings", [{}, {"kv_buffer": "host"}], ids=["device", "host"])
def test_an_offer_before_its_step_has_ended(agents: Any, settings: dict[str, str]) -> None:
    producer, source = agents("prefill", "cuda:0", **settings)
    consumer, target = agents("decode", "cuda:0")
    work = torch.randn(4096, 4096, device="cuda:0")
    for _ in range(200):
        work = torch.tanh(work @ work)
    source.fill_(3.0)
    event = torch.cuda.Event()
    event.record()
    begin = time.monotonic()
    ticket = producer.offer("r", [1, 2, 3], 48, event)
    taken = time.monotonic() - begin
    pending = not event.query()
    consumer.fetch("r", ticket, [4, 5, 6])
    assert received(consumer, "r") is None
    assert (target[4:7] == 3.0).all()
    assert taken < 1.0
    assert pending, "the step was too short to show anything"
