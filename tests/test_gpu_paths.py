"""The paths of GPU memory over the loopback fabric; a stand-in for CUDA records its calls.

`tests/test_gpu.py` is the same with a GPU.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from kvagent import (
    EmbeddedAgent,
    EngineClient,
    FullAttentionSpec,
    ModelInfo,
    WorkerClient,
    WorkerInfo,
)
from kvagent.agent import copies
from kvagent.core import estimate
from kvagent.core.regions import MemoryRange
from kvagent.cuda import mirror
from kvagent.errors import AgentError, CacheGoneError, ConfigError, FabricError, GeometryError
from kvagent.fabric.agent import NixlAgent
from kvagent.fabric.loopback import LoopbackFabric, LoopbackNetwork
from kvagent.fabric.nixl import NixlFabric
from tests.fake_cuda import FakeCuda, FakeEvent
from tests.harness import HND, NHD, Engine, check, random_fill
from tests.loopback import LONG, LoopbackSidecar, Stage

TOKENS = 40
SHAPE = {"heads": 4, "layers": 2, "num_blocks": 32}
HOST = {"kv_buffer": "host"}


@pytest.fixture
def cuda() -> FakeCuda:
    return FakeCuda()


@pytest.fixture
def engines(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Engine]]:
    """Makes an engine on sidecars of its own; keyword arguments are their settings."""
    monkeypatch.setattr(estimate, "STEP_SECONDS", 0.0)  # everything that can be staged is
    stage = Stage()
    made: list[Engine] = []

    def make(
        engine_id: str,
        device: str = "cuda:1",
        axes: tuple[str, ...] = NHD,
        tp: int = 1,
        **settings: Any,
    ) -> Engine:
        sidecars = stage.sidecars(tp, cuda=cuda, **settings)
        engine = Engine(
            sidecars,  # type: ignore[arg-type]
            engine_id,
            axes=axes,
            fill=random_fill(len(made)),
            device=device,
            cuda=cuda,
            **SHAPE,  # type: ignore[arg-type]
        )
        engine.sidecars = sidecars  # type: ignore[attr-defined]
        made.append(engine)
        return engine

    yield make
    for engine in made:
        engine.close()
    stage.close()


def sidecar(engine: Engine, rank: int = 0) -> LoopbackSidecar:
    return engine.sidecars[rank]  # type: ignore[attr-defined, no-any-return]


def kinds(engine: Engine) -> set[tuple[str, int]]:
    """What the engine's first rank has registered, but for the canary."""
    return {(each.kind, each.device) for each in sidecar(engine).fabric._ranges[1:]}


# ---------------------------------------------------------------- which path


PAIRS = {
    "gpu to gpu": (("cuda:1", {}), ("cuda:0", {})),
    "gpu to host": (("cuda:0", {}), ("cpu", {})),
    "host to gpu": (("cpu", {}), ("cuda:0", {})),
    "mirror to gpu": (("cuda:1", HOST), ("cuda:0", {})),
    "gpu to mirror": (("cuda:1", {}), ("cuda:0", HOST)),
    "mirror to mirror": (("cuda:1", HOST), ("cuda:0", HOST)),
    "mirror to host": (("cuda:1", HOST), ("cpu", HOST)),
}


@pytest.mark.parametrize("there", [NHD, HND], ids=["NHD", "HND"])
@pytest.mark.parametrize("pair", PAIRS)
def test_equal_bytes(engines: Callable[..., Engine], pair: str, there: tuple[str, ...]) -> None:
    (source, ours), (target, theirs) = PAIRS[pair]
    producer = engines("prefill", source, **ours)
    consumer = engines("decode", target, there, **theirs)
    for engine, device, settings in ((producer, source, ours), (consumer, target, theirs)):
        on_gpu = device != "cpu" and not settings
        assert kinds(engine) == {("vram", int(device[-1])) if on_gpu else ("dram", 0)}
    stats = check(producer, consumer, "whole", 0, TOKENS)
    assert stats["staged"] == (stats["bytes"] if there == HND else 0)
    check(producer, consumer, "partial", 5, TOKENS - 3)
    check(producer, consumer, "one token", 6, 7)


@pytest.mark.parametrize(("ours", "theirs"), [(2, 1), (1, 2)])
def test_mirrors_of_several_ranks(
    engines: Callable[..., Engine], cuda: FakeCuda, ours: int, theirs: int
) -> None:
    producer = engines("prefill", tp=ours, **HOST)
    consumer = engines("decode", tp=theirs, **HOST)
    check(producer, consumer, "whole", 0, TOKENS)
    check(producer, consumer, "partial", 5, TOKENS - 3)
    assert len(cuda.named("pin")) == ours + theirs
    producer.close()


def test_a_read_that_fails_leaves_the_gpu_as_it_was(engines: Callable[..., Engine]) -> None:
    """What had arrived of it is in the mirror only."""
    producer, consumer = engines("prefill", "cpu"), engines("decode", "cuda:0", **HOST)
    check(producer, consumer, "first", 0, TOKENS)
    before = [cache.clone() for cache in consumer.caches[0].values()]
    fabric = sidecar(producer).fabric
    fabric.faults.fail = {fabric.reads + 1}
    blocks = list(range(TOKENS // 4))
    consumer.client.fetch("r", producer.client.offer("r", blocks, TOKENS), blocks)
    assert "ordered to fail" in (consumer.received("r", LONG) or "")
    assert all(map(torch.equal, before, consumer.caches[0].values()))
    check(producer, consumer, "next", 0, TOKENS)


def test_ranks_with_and_without_a_mirror_are_refused(
    engines: Callable[..., Engine], cuda: FakeCuda
) -> None:
    stage = sidecar(engines("other")).stage
    one, other = stage.sidecars(1, cuda=cuda, **HOST) + stage.sidecars(1, cuda=cuda)
    spec = FullAttentionSpec(block_size=4, num_kv_heads=2, head_size=8, dtype="float32", axes=NHD)
    workers = []
    leader = None
    for rank, machine in enumerate((one, other)):
        worker = WorkerClient(machine.socket, cuda=cuda)
        worker.join(
            WorkerInfo(
                engine_id="e", tp_rank=rank, tp_size=2, leader=leader, model=ModelInfo(name="m")
            )
        )
        leader = worker.endpoint
        worker.allocate_kv_caches({"l": spec}, 8, "cuda:0")
        workers.append(worker)
    client = EngineClient(one.socket)
    deadline = time.monotonic() + LONG
    while True:
        with pytest.raises(AgentError) as caught:
            client.wait_ready(0.2)
        if "kv_buffer is not what rank 0 has" in str(caught.value):
            break
        assert time.monotonic() < deadline, caught.value
    for each in (client, *workers):
        each.close()


def test_only_two_buffers() -> None:
    with pytest.raises(ConfigError, match="kv_buffer 'disk': device or host"):
        EmbeddedAgent(kv_buffer="disk")


# ---------------------------------------------------------------- order


def place(calls: list[tuple[Any, ...]], *call: Any) -> int:
    return next(i for i, each in enumerate(calls) if each[: len(call)] == call)


def test_the_context_is_bound_before_anything_is_registered(
    engines: Callable[..., Engine], cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    register = LoopbackFabric.register

    async def told(fabric: LoopbackFabric, ranges: Any) -> None:
        cuda.calls.append(("register", tuple((each.kind, each.device) for each in ranges)))
        await register(fabric, ranges)

    monkeypatch.setattr(LoopbackFabric, "register", told)
    engine = engines("prefill", "cuda:1")
    at = place(cuda.calls, "register", (("vram", 1),))
    binds = [call for call in cuda.calls[:at] if call[0] == "bind"]
    assert {device for _, device, _ in binds} == {1}
    # The fabric's own thread among them: over the loopback, that of the event loop.
    assert sidecar(engine).stage._thread.name in {thread for _, _, thread in binds}


def test_a_mirror_needs_no_context_in_the_fabric(
    engines: Callable[..., Engine], cuda: FakeCuda
) -> None:
    engine = engines("prefill", "cuda:1", **HOST)
    threads = {thread for _, _, thread in cuda.named("bind")}
    assert sidecar(engine).stage._thread.name not in threads


@pytest.mark.parametrize("flushes", [True, False])
def test_flush_comes_before_the_report(engines: Callable[..., Engine], flushes: bool) -> None:
    cuda = FakeCuda(flushes=flushes)
    producer = engines("prefill", "cpu")
    stage = sidecar(producer).stage
    (machine,) = stage.sidecars(1, cuda=cuda)
    consumer = Engine([machine], "decode", axes=NHD, device="cuda:0", cuda=cuda, **SHAPE)  # type: ignore[arg-type, list-item]
    before = len(cuda.named("flush"))
    check(producer, consumer, "r", 0, TOKENS)
    assert len(cuda.named("flush")) - before == flushes
    consumer.close()


def test_a_report_waits_for_the_flush(
    engines: Callable[..., Engine], cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    producer, consumer = engines("prefill"), engines("decode", "cuda:0")
    reached, open_ = threading.Event(), threading.Event()

    def flush(device: int) -> None:
        reached.set()
        assert open_.wait(LONG)

    monkeypatch.setattr(cuda, "flush", flush)
    consumer.client.fetch("r", producer.client.offer("r", [1, 2], 8), [3, 4])
    assert reached.wait(LONG)
    with pytest.raises(AssertionError, match="not seen"):
        consumer.received("r", 0.2)
    open_.set()
    assert consumer.received("r", LONG) is None


def test_permutation_runs_on_the_side_stream(
    engines: Callable[..., Engine], cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    permute = copies.permute

    def told(*arguments: Any) -> None:
        cuda.calls.append(("permute",))
        permute(*arguments)

    monkeypatch.setattr(copies, "permute", told)
    producer, consumer = engines("prefill"), engines("decode", "cuda:0", HND)
    del cuda.calls[:]
    check(producer, consumer, "r", 0, TOKENS)
    names = [call[0] for call in cuda.calls if call[0] != "bind"]
    # For each chunk: what was read is made visible, moved, and waited for; the report comes last.
    assert names[0] == "allocate"
    assert names[-1] == "flush"
    chunks, rest = divmod(len(names) - 2, 6)
    assert (chunks > 0, rest) == (True, 0)
    assert names[1:-1] == ["flush", "on", "permute", "permute", "off", "finish"] * chunks
    size = next(call[2] for call in cuda.calls if call[0] == "allocate")
    assert size == sidecar(consumer).agent.config.staging_bytes


def test_no_gpu_memory_for_the_buffer(
    engines: Callable[..., Engine], cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    producer, consumer = engines("prefill"), engines("decode", "cuda:0", HND)

    def none(device: int, nbytes: int) -> None:
        raise GeometryError(f"GPU {device} has 0 free")

    monkeypatch.setattr(cuda, "allocate", none)
    assert check(producer, consumer, "r", 0, TOKENS)["staged"] == 0


# ---------------------------------------------------------------- embedded


SPEC = FullAttentionSpec(
    block_size=4,
    num_kv_heads=2,
    head_size=8,
    dtype="float32",
    axes=("block", "kv", "token", "head", "channel"),
)


@pytest.fixture
def embedded(cuda: FakeCuda) -> Iterator[Callable[..., EmbeddedAgent]]:
    network = LoopbackNetwork()
    made: list[EmbeddedAgent] = []

    def make(engine_id: str, tensor: torch.Tensor, **settings: Any) -> EmbeddedAgent:
        agent = EmbeddedAgent(
            make_fabric=lambda name, _: LoopbackFabric(network, name, vram=True),
            cuda=cuda,
            **settings,
        )
        made.append(agent)
        agent.join(WorkerInfo(engine_id=engine_id, model=ModelInfo(name="m", num_layers=1)))
        agent.register_kv_caches({"l": tensor}, {"l": SPEC})
        agent.wait_ready(LONG)
        return agent

    yield make
    for agent in made:
        agent.close()


def ended(agent: EmbeddedAgent, request_id: str, seconds: float = LONG) -> str | None:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        out = agent.step()
        if request_id in (out.finished_recving or ()):
            return out.failed_recving.get(request_id)
        time.sleep(0.001)
    raise AssertionError("not seen")


def sent(agent: EmbeddedAgent, request_id: str) -> None:
    until = time.monotonic() + LONG
    while request_id not in (agent.step().finished_sending or ()):
        assert time.monotonic() < until
        time.sleep(0.001)


@pytest.mark.parametrize("settings", [{}, HOST], ids=["device", "host"])
def test_the_engines_own_tensors(
    embedded: Callable[..., EmbeddedAgent], cuda: FakeCuda, settings: dict[str, Any]
) -> None:
    big = cuda.tensor(1, 32, 2, 4, 2, 16)
    big.copy_(torch.randn(big.shape))
    target = cuda.tensor(0, 32, 2, 4, 2, 8)
    producer = embedded("prefill", big[..., 8:], **settings)
    consumer = embedded("decode", target, **settings)
    consumer.fetch("r", producer.offer("r", [5, 6], 7), [1, 2])
    assert ended(consumer, "r") is None
    assert target[1].equal(big[5, ..., 8:])
    assert target[2, :, :3].equal(big[6, :, :3, :, 8:])
    assert not target[2, :, 3:].any()
    assert not target[[0, *range(3, 32)]].any()
    sent(producer, "r")


@pytest.mark.parametrize("settings", [{}, HOST], ids=["device", "host"])
def test_nothing_is_read_before_the_event(
    embedded: Callable[..., EmbeddedAgent], cuda: FakeCuda, settings: dict[str, Any]
) -> None:
    source, target = cuda.tensor(1, 32, 2, 4, 2, 8), cuda.tensor(0, 32, 2, 4, 2, 8)
    producer, consumer = embedded("prefill", source, **settings), embedded("decode", target)
    event = FakeEvent()
    begin = time.monotonic()
    ticket = producer.offer("r", [5], 4, event)
    assert time.monotonic() - begin < 1.0
    assert ticket["kvagent"]["deferred"] is True
    consumer.fetch("r", ticket, [1])
    with pytest.raises(AssertionError, match="not seen"):
        ended(consumer, "r", 0.3)
    assert cuda.named("query")
    source[5] = 3.0  # what the step computes
    event.passed.set()
    assert ended(consumer, "r") is None
    assert (target[1] == 3.0).all()
    sent(producer, "r")
    if settings:  # the event has passed before the bytes are copied down
        assert place(cuda.calls, "passed") < place(cuda.calls, "on")


def test_an_event_that_takes_longer_than_a_claim_is_parked(
    embedded: Callable[..., EmbeddedAgent], cuda: FakeCuda
) -> None:
    source, target = cuda.tensor(1, 32, 2, 4, 2, 8), cuda.tensor(0, 32, 2, 4, 2, 8)
    producer = embedded("prefill", source)
    consumer = embedded("decode", target, call_timeout=0.5)
    assert producer._agent is not None
    producer._agent.leader.leases.park_seconds = 0.05
    event = FakeEvent()
    consumer.fetch("r", producer.offer("r", [5], 4, event), [1])
    with pytest.raises(AssertionError, match="not seen"):
        ended(consumer, "r", 1.2)
    event.passed.set()
    assert ended(consumer, "r") is None


def test_who_does_not_wait_for_the_claim_is_refused(
    embedded: Callable[..., EmbeddedAgent], cuda: FakeCuda
) -> None:
    """A ticket that lost its mark on the way would be read too early."""
    source, target = cuda.tensor(1, 32, 2, 4, 2, 8), cuda.tensor(0, 32, 2, 4, 2, 8)
    producer, consumer = embedded("prefill", source), embedded("decode", target)
    event = FakeEvent()
    ticket = producer.offer("r", [5], 4, event)
    del ticket["kvagent"]["deferred"]
    consumer.fetch("r", ticket, [1])
    event.passed.set()
    assert (ended(consumer, "r") or "").startswith("mismatch")


@pytest.mark.parametrize("how", ["cancel", "failure", "lease", "drain"])
def test_an_offer_that_never_becomes_ready(
    embedded: Callable[..., EmbeddedAgent], cuda: FakeCuda, how: str
) -> None:
    source, target = cuda.tensor(1, 32, 2, 4, 2, 8), cuda.tensor(0, 32, 2, 4, 2, 8)
    producer = embedded("prefill", source, lease_seconds=1 if how == "lease" else 30)
    consumer = embedded("decode", target)
    assert producer._agent is not None
    producer._agent.leader.leases.park_seconds = 0.1
    event = FakeEvent()
    ticket = producer.offer("r", [5], 4, event)
    consumer.fetch("r", ticket, [1])
    if how == "cancel":
        producer.cancel("r")
    elif how == "failure":
        event.failure = "an illegal memory access was encountered"
    elif how == "drain":
        assert producer.drain(0.1) == ("r",)
    sent(producer, "r")
    assert (ended(consumer, "r") or "").startswith("unknown")
    assert not target.any()


def test_a_cancelled_fetch_that_waits_for_its_claim(
    embedded: Callable[..., EmbeddedAgent], cuda: FakeCuda
) -> None:
    source, target = cuda.tensor(1, 32, 2, 4, 2, 8), cuda.tensor(0, 32, 2, 4, 2, 8)
    producer, consumer = embedded("prefill", source), embedded("decode", target)
    event = FakeEvent()
    consumer.fetch("r", producer.offer("r", [5], 4, event), [1])
    with pytest.raises(AssertionError, match="not seen"):
        ended(consumer, "r", 0.2)
    consumer.cancel("r")
    assert (ended(consumer, "r") or "").startswith("cancelled")
    event.passed.set()
    sent(producer, "r")  # the claim was released
    assert not target.any()


def test_a_held_ticket_waits_too(embedded: Callable[..., EmbeddedAgent], cuda: FakeCuda) -> None:
    source, target = cuda.tensor(1, 32, 2, 4, 2, 8), cuda.tensor(0, 32, 2, 4, 2, 8)
    producer, consumer = embedded("prefill", source), embedded("decode", target)
    event = FakeEvent()
    ticket = producer.offer("r", [5], 4, event)
    consumer.hold(ticket)
    source[5] = 2.0
    event.passed.set()
    consumer.fetch("r", ticket, [1])
    assert ended(consumer, "r") is None
    assert (target[1] == 2.0).all()


# ---------------------------------------------------------------- what is refused


def test_an_event_of_another_process(engines: Callable[..., Engine]) -> None:
    producer = engines("prefill")
    with pytest.raises(AgentError, match=r"event.synchronize\(\) before offer\(\)"):
        producer.client.offer("r", [1], 4, FakeEvent())


def test_an_event_for_a_cache_on_the_host(
    embedded: Callable[..., EmbeddedAgent], cuda: FakeCuda
) -> None:
    producer = embedded("prefill", torch.zeros(32, 2, 4, 2, 8))
    producer.offer("r", [1], 4, FakeEvent())
    sent(producer, "r")  # it ends at once, and the log says why


def test_memory_of_two_devices(embedded: Callable[..., EmbeddedAgent], cuda: FakeCuda) -> None:
    agent = EmbeddedAgent(
        make_fabric=lambda name, _: LoopbackFabric(LoopbackNetwork(), name, vram=True), cuda=cuda
    )
    agent.join(WorkerInfo(engine_id="e", model=ModelInfo(name="m")))
    tensors = {f"l{i}": cuda.tensor(i, 32, 2, 4, 2, 8) for i in range(2)}
    with pytest.raises(GeometryError, match="must lie on one device"):
        agent.register_kv_caches(tensors, dict.fromkeys(tensors, SPEC))
    agent.close()


def test_the_engines_own_gpu_memory_with_a_sidecar(
    engines: Callable[..., Engine], cuda: FakeCuda
) -> None:
    stage = sidecar(engines("other")).stage
    (machine,) = stage.sidecars(1, cuda=cuda)
    worker = WorkerClient(machine.socket, cuda=cuda)
    worker._in_process = False  # as over a path
    worker.join(WorkerInfo(engine_id="e", model=ModelInfo(name="m")))
    with pytest.raises(GeometryError, match=r"allocate_kv_caches\(..., device='cuda:1'\)"):
        worker.register_kv_caches({"l": cuda.tensor(1, 32, 2, 4, 2, 8)}, {"l": SPEC})
    with pytest.raises(GeometryError, match="device meta"):
        worker.allocate_kv_caches({"l": SPEC}, 4, "meta")
    worker.close()


def allocate_on(engines: Callable[..., Engine], cuda: FakeCuda, device: str) -> None:
    """A worker asks its sidecar for a cache on a GPU."""
    stage = sidecar(engines("other", "cpu")).stage
    (machine,) = stage.sidecars(1, cuda=cuda)
    worker = WorkerClient(machine.socket, cuda=cuda)
    try:
        worker.join(WorkerInfo(engine_id="e", model=ModelInfo(name="m")))
        worker.allocate_kv_caches({"l": SPEC}, 4, device)
    finally:
        worker.close()


def test_an_allocator_that_cannot_share(engines: Callable[..., Engine], cuda: FakeCuda) -> None:
    cuda.problem = "PYTORCH_CUDA_ALLOC_CONF has expandable_segments:True"
    with pytest.raises(GeometryError, match=r"cannot share GPU memory.*expandable_segments:True"):
        allocate_on(engines, cuda, "cuda:0")
    assert not cuda.named("allocate")


def test_a_gpu_that_the_sidecar_does_not_see(
    engines: Callable[..., Engine], cuda: FakeCuda
) -> None:
    cuda.find = FakeCuda(1).find  # type: ignore[method-assign]
    with pytest.raises(GeometryError, match="no GPU uuid-1"):
        allocate_on(engines, cuda, "cuda:1")


def test_no_memory_for_the_mirror(
    engines: Callable[..., Engine], cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The GPU's memory goes back, and the worker may ask again."""

    def none(nbytes: int) -> None:
        raise GeometryError(f"{nbytes} bytes of memory: only 1 are available")

    stage = sidecar(engines("other", "cpu")).stage
    (machine,) = stage.sidecars(1, cuda=cuda, **HOST)
    worker = WorkerClient(machine.socket, cuda=cuda)
    worker.join(WorkerInfo(engine_id="e", model=ModelInfo(name="m")))
    with monkeypatch.context() as patch:
        patch.setattr(mirror, "HostMemory", none)
        with pytest.raises(GeometryError, match="only 1 are available"):
            worker.allocate_kv_caches({"l": SPEC}, 4, "cuda:0")
    assert machine.agent.rank.device is None
    assert worker.allocate_kv_caches({"l": SPEC}, 4, "cuda:0")["l"].shape[0] == 4
    worker.close()


def test_memory_that_cannot_be_pinned_is_used_as_it_is(
    engines: Callable[..., Engine], cuda: FakeCuda, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(address: int, nbytes: int) -> None:
        raise FabricError("cuMemHostRegister_v2: CUDA_ERROR_OUT_OF_MEMORY (2)")

    cuda.pin = refuse  # type: ignore[method-assign]
    producer, consumer = engines("prefill", **HOST), engines("decode", "cuda:0")
    check(producer, consumer, "r", 0, TOKENS)
    assert "not page-locked" in caplog.text


# ---------------------------------------------------------------- what outlives the engine


def test_a_worker_comes_back_to_its_gpu_cache(
    engines: Callable[..., Engine], cuda: FakeCuda
) -> None:
    producer, consumer = engines("prefill", "cuda:1"), engines("decode", "cuda:0")
    check(producer, consumer, "first", 0, TOKENS)
    ticket = producer.client.offer("r", [5], 4)
    info = producer.workers[0]._info
    assert info is not None

    def again() -> WorkerClient:
        producer.workers[0].close()
        worker = producer.workers[0] = WorkerClient(sidecar(producer).socket, cuda=cuda)
        worker.join(info, keep_cache=True)
        return worker

    specs = dict.fromkeys(producer.caches[0], producer.spec)
    with pytest.raises(GeometryError, match="lies on GPU uuid-1"):
        again().allocate_kv_caches(specs, producer.num_blocks)
    before = {name: cache.clone() for name, cache in producer.caches[0].items()}
    opened = len(cuda.named("open"))
    producer.caches[0] = again().allocate_kv_caches(specs, producer.num_blocks, "cuda:1")
    assert len(cuda.named("open")) == opened + 1
    assert len(cuda.named("export")) == 2  # of the two engines, when they were made
    assert all(cache.equal(before[name]) for name, cache in producer.caches[0].items())
    consumer.client.fetch("r", ticket, [9])
    assert consumer.received("r", LONG) is None
    check(producer, consumer, "last", 0, TOKENS)


def test_embedded_gpu_memory_does_not_outlive_it(
    embedded: Callable[..., EmbeddedAgent], cuda: FakeCuda
) -> None:
    agent = embedded("e", cuda.tensor(0, 32, 2, 4, 2, 8))
    with pytest.raises(CacheGoneError, match="the engine's own memory"):
        agent.join(
            WorkerInfo(engine_id="e", model=ModelInfo(name="m", num_layers=1)), keep_cache=True
        )


def test_an_embedded_agent_allocates_too(cuda: FakeCuda) -> None:
    agent = EmbeddedAgent(
        make_fabric=lambda name, _: LoopbackFabric(LoopbackNetwork(), name, vram=True), cuda=cuda
    )
    agent.join(WorkerInfo(engine_id="e", model=ModelInfo(name="m")))
    caches = agent.allocate_kv_caches({"l": SPEC}, 32, "cuda:1")
    assert caches["l"].shape == (32, 2, 4, 2, 8)
    assert cuda.device_of(caches["l"]) == 1
    assert not cuda.named("open")  # CUDA opens no handle of its own process
    agent.close()


# ---------------------------------------------------------------- the real fabric


def test_the_fabrics_thread_is_bound_before_nixl_is_touched(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    order: list[tuple[str, str]] = []
    make = NixlFabric._make_worker

    def told(fabric: NixlFabric) -> Any:
        order.append(("nixl", threading.current_thread().name))
        return make(fabric)

    def bind() -> None:
        order.append(("bind", threading.current_thread().name))

    async def start_and_close() -> None:
        fabric = NixlFabric("e/0")
        await fabric.start(bind)
        await fabric.close()

    monkeypatch.setattr(NixlFabric, "_make_worker", told)
    asyncio.run(start_and_close())
    assert order == [("bind", "kvagent-fabric"), ("nixl", "kvagent-fabric")]


def test_a_context_that_cannot_be_bound() -> None:
    def bind() -> None:
        raise FabricError("cuDevicePrimaryCtxRetain: CUDA_ERROR_OUT_OF_MEMORY (2)")

    async def start() -> None:
        await NixlFabric("e/0").start(bind)

    with pytest.raises(FabricError, match="CUDA_ERROR_OUT_OF_MEMORY"):
        asyncio.run(start())


def test_what_nixl_is_told_of_gpu_memory() -> None:
    bindings = pytest.importorskip("nixl._bindings")
    told: list[Any] = []

    class Recorder:
        def registerMem(self, rows: Any, backends: Any) -> None:  # noqa: N802
            told.append(rows)

    agent = NixlAgent.__new__(NixlAgent)
    agent._agent, agent._backends = Recorder(), []
    agent.register([MemoryRange(1 << 30, 4096, "vram", 3), MemoryRange(1 << 20, 64)])
    host, gpu = told
    assert gpu.getType() == bindings.VRAM_SEG
    assert host.getType() == bindings.DRAM_SEG
    assert gpu[0] == (1 << 30, 4096, 3, b"")
