"""Reads by way of the staging buffer, and every way for one to fail, over the loopback fabric."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from kvagent.agent import copies as agent_copies
from kvagent.agent import staging as agent_staging
from kvagent.core import estimate
from kvagent.core.staged import StagedPart
from kvagent.core.staging import AREAS
from kvagent.errors import GeometryError
from tests.harness import HND, NHD, Engine, check, random_fill
from tests.loopback import LONG, LoopbackSidecar, Stage

TOKENS = 120
SHAPE = {"heads": 8, "layers": 4, "num_blocks": 67}
CHUNK = 8192
"""Area of a buffer that holds one block of all layers of a producer of one rank."""


class Gate:
    """Copies out of the buffer wait at it while it is closed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.open = threading.Event()
        self.open.set()
        self.reached = threading.Event()
        self.copies = 0
        copy = StagedPart.copy

        def wait(part: StagedPart, *arguments: Any) -> None:
            self.reached.set()
            assert self.open.wait(LONG)
            self.copies += 1
            copy(part, *arguments)

        monkeypatch.setattr(StagedPart, "copy", wait)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    made = Gate(monkeypatch)
    yield made
    made.open.set()


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Engine]]:
    """Makes an engine on sidecars of its own; keyword arguments are their settings. Everything
    that can be staged is: steps cost nothing."""
    monkeypatch.setattr(estimate, "STEP_SECONDS", 0.0)
    stage = Stage()
    made: list[Engine] = []

    def make(engine_id: str, axes: tuple[str, ...], tp: int = 1, **settings: Any) -> Engine:
        sidecars = stage.sidecars(tp, **settings)
        engine = Engine(sidecars, engine_id, axes=axes, fill=random_fill(len(made)), **SHAPE)  # type: ignore[arg-type]
        engine.sidecars = sidecars  # type: ignore[attr-defined]
        made.append(engine)
        return engine

    yield make
    for engine in made:
        engine.close()
    stage.close()


def sidecar(engine: Engine, rank: int = 0) -> LoopbackSidecar:
    return engine.sidecars[rank]  # type: ignore[attr-defined, no-any-return]


def begin(producer: Engine, consumer: Engine, name: str) -> None:
    blocks = list(range(TOKENS // 4))
    consumer.client.fetch(name, producer.client.offer(name, blocks, TOKENS), blocks)


def end(consumer: Engine, name: str) -> str | None:
    return consumer.received(name, LONG)


def not_yet(consumer: Engine, name: str) -> None:
    with pytest.raises(AssertionError, match="not seen"):
        consumer.received(name, 0.3)


def state(consumer: Engine) -> list[Any]:
    return [cache.clone() for caches in consumer.caches for cache in caches.values()]


@pytest.mark.parametrize("area", [1 << 20, CHUNK, 4096, 2048], ids=str)
def test_equal_bytes(engines: Callable[..., Engine], area: int) -> None:
    """Areas of all blocks, of one block, and of a part of its layers."""
    producer = engines("prefill", NHD, 2)
    consumer = engines("decode", HND, 1, staging_bytes=AREAS * area)
    stats = check(producer, consumer, "whole", 0, TOKENS)
    assert stats["staged"] == stats["bytes"] == TOKENS * 8 * 8 * 4 * 2 * 4
    check(producer, consumer, "partial", 5, TOKENS - 3)
    stats = check(producer, consumer, "one token", 50, 51)
    assert stats["staged"] == 4 * stats["bytes"]


@pytest.mark.parametrize("settings", [{"staging_bytes": 0}, {"staging_run_bytes": 32}], ids=str)
def test_off(engines: Callable[..., Engine], settings: dict[str, int]) -> None:
    producer, consumer = engines("prefill", NHD), engines("decode", HND, **settings)
    assert check(producer, consumer, "r", 0, TOKENS)["staged"] == 0


def test_no_memory_for_the_buffer(
    engines: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    def none(nbytes: int) -> None:
        raise GeometryError("only 1 byte is available")

    monkeypatch.setattr(agent_copies, "HostMemory", none)
    producer, consumer = engines("prefill", NHD), engines("decode", HND)
    assert check(producer, consumer, "r", 0, TOKENS)["staged"] == 0


def test_a_copy_that_has_begun_is_waited_for(engines: Callable[..., Engine], gate: Gate) -> None:
    producer = engines("prefill", NHD)
    consumer = engines("decode", HND, staging_bytes=AREAS * CHUNK)
    gate.open.clear()
    begin(producer, consumer, "r")
    assert gate.reached.wait(LONG)
    consumer.client.cancel("r")
    not_yet(consumer, "r")
    gate.open.set()
    assert (end(consumer, "r") or "").startswith("cancelled:")
    before, copies = state(consumer), gate.copies
    assert copies <= AREAS, "copies went on after the cancellation"
    not_yet(consumer, "nothing else")
    assert gate.copies == copies
    assert all(a.equal(b) for a, b in zip(before, state(consumer), strict=True))
    check(producer, consumer, "next", 0, TOKENS)


def test_a_read_that_was_cancelled_is_not_copied(
    engines: Callable[..., Engine], gate: Gate
) -> None:
    producer = engines("prefill", NHD)
    consumer = engines("decode", HND, staging_bytes=AREAS * CHUNK)
    check(producer, consumer, "first", 0, TOKENS)
    before, copies = state(consumer), gate.copies
    sidecar(producer).hang()
    begin(producer, consumer, "r")
    not_yet(consumer, "r")
    consumer.client.cancel("r")
    not_yet(consumer, "r")
    sidecar(producer).resume()
    assert (end(consumer, "r") or "").startswith("cancelled:")
    assert gate.copies == copies
    assert all(a.equal(b) for a, b in zip(before, state(consumer), strict=True))


def test_a_worker_that_starts_afresh_waits_for_copies(
    engines: Callable[..., Engine], gate: Gate
) -> None:
    """The memory that they write into must not go first."""
    producer = engines("prefill", NHD)
    consumer = engines("decode", HND, staging_bytes=AREAS * CHUNK)
    gate.open.clear()
    begin(producer, consumer, "r")
    assert gate.reached.wait(LONG)
    rank = sidecar(consumer).agent.rank
    memory = rank.memory
    assert memory
    stopping = threading.Thread(target=sidecar(consumer).stage.run, args=(rank.reset(),))
    stopping.start()
    stopping.join(0.3)
    assert stopping.is_alive()
    assert rank.memory is memory
    gate.open.set()
    stopping.join(LONG)
    assert not stopping.is_alive()
    assert rank.memory == ()
    assert gate.copies <= AREAS


def test_failures_leave_no_area_taken(engines: Callable[..., Engine]) -> None:
    producer = engines("prefill", NHD)
    consumer = engines("decode", HND, staging_bytes=AREAS * CHUNK)
    fabric = sidecar(producer).fabric
    for number in range(2 * AREAS):
        fabric.faults.fail = {fabric.reads + 2}
        begin(producer, consumer, f"r{number}")
        assert "ordered to fail" in (end(consumer, f"r{number}") or "")
    fabric.faults.fail = set()
    stats = check(producer, consumer, "next", 0, TOKENS)
    assert stats["staged"] == stats["bytes"]


def test_a_hung_peer_does_not_hold_up_others(
    engines: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agent_staging, "PATIENCE", 0.05)
    one, other = engines("one", NHD), engines("other", NHD)
    consumer = engines("decode", HND, staging_bytes=AREAS * CHUNK)
    sidecar(one).hang()
    begin(one, consumer, "hung")
    not_yet(consumer, "hung")  # its reads have both areas, and what follows them is direct
    blocks = list(range(TOKENS // 4))
    local = [block + 33 for block in blocks]
    ticket = other.client.offer("r", blocks, TOKENS)
    consumer.client.fetch("r", ticket, local)
    assert end(consumer, "r") is None
    for layer in other.caches[0]:
        for head in range(other.heads):
            want = other.tokens(layer, blocks, head)
            assert consumer.tokens(layer, local, head).equal(want)
    sidecar(one).resume()
    assert end(consumer, "hung") is None


def test_after_a_fence_it_is_used_again(engines: Callable[..., Engine], gate: Gate) -> None:
    producer = engines("prefill", NHD)
    consumer = engines("decode", HND, staging_bytes=AREAS * CHUNK, fence_seconds=0.2)
    check(producer, consumer, "first", 0, TOKENS)
    sidecar(consumer).give_up_after(0.5)
    copies = gate.copies
    sidecar(producer).hang()
    begin(producer, consumer, "r")
    assert (end(consumer, "r") or "").startswith("timed_out")
    assert gate.copies == copies
    sidecar(producer).resume()
    stats = check(producer, consumer, "next", 0, TOKENS)
    assert stats["staged"] == stats["bytes"]
