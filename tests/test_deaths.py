"""Either side may die: real processes, killed while a transfer runs, over shared memory and TCP."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from kvagent import EngineClient, WorkerClient, WorkerInfo
from tests.harness import START_SECONDS, Sidecar, start
from tests.producer import BLOCK_BYTES, LAYERS, MODEL, SPEC, pattern

NUM_BLOCKS = (256 << 20) // BLOCK_BYTES


class Producer:
    """`tests.producer` in its own process; `ticket` covers its whole cache."""

    def __init__(self, sidecar: Sidecar, engine_id: str, seed: int) -> None:
        command = [sys.executable, "-m", "tests.producer", sidecar.socket, engine_id]
        self.seed = seed
        self.process = subprocess.Popen(
            [*command, str(NUM_BLOCKS), str(seed)], stdout=subprocess.PIPE, text=True
        )
        assert self.process.stdout is not None
        self.ticket: dict[str, Any] = json.loads(self.process.stdout.readline())

    def kill(self) -> None:
        assert self.process.stdout is not None
        self.process.kill()
        self.process.wait()
        self.process.stdout.close()


class Consumer:
    """One rank in this process."""

    def __init__(self, sidecar: Sidecar) -> None:
        self.worker = WorkerClient(sidecar.socket, timeout=START_SECONDS)
        self.worker.join(WorkerInfo(engine_id="decode", model=MODEL))
        self.caches = self.worker.allocate_kv_caches(
            {f"layer.{i}": SPEC for i in range(LAYERS)}, num_blocks=NUM_BLOCKS
        )
        self.client = EngineClient(sidecar.socket)
        self.client.wait_ready(START_SECONDS)

    def fetch(self, request_id: str, ticket: dict[str, Any]) -> None:
        self.client.fetch(request_id, ticket, list(range(NUM_BLOCKS)))

    def end(self, request_id: str, timeout: float) -> str | None:
        """The reason of a failure, None when it is good."""
        until = time.monotonic() + timeout
        while time.monotonic() < until:
            out = self.client.step()
            if request_id in (out.finished_recving or ()):
                return out.failed_recving.get(request_id)
            time.sleep(0.002)
        raise AssertionError(f"{request_id} did not end within {timeout} s")

    def holds(self, seed: int) -> bool:
        return all(
            torch.equal(cache.view(torch.int32), pattern(seed, i, cache.shape).view(torch.int32))
            for i, cache in enumerate(self.caches.values())
        )

    def close(self) -> None:
        self.client.close()
        self.worker.close()


@pytest.fixture(params=["tcp", "shm"])
def sidecars(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[list[Sidecar]]:
    env = {"UCX_TLS": "tcp"} if request.param == "tcp" else {}
    config = tmp_path / "kvagent.toml"
    config.write_text("lease_seconds = 600.0\n")  # for machines that are slow to start engines
    names = ["prefill", "other", "decode"]
    made = start(tmp_path, names, "--config", str(config), env=env)
    yield made
    for sidecar in made:
        sidecar.close()


def test_killed_processes(sidecars: list[Sidecar]) -> None:
    prefill, other, decode = sidecars
    first, second = Producer(prefill, "prefill", 1), Producer(other, "other", 2)
    consumer = Consumer(decode)
    try:
        # The engine's process dies in the middle: its cache is the sidecar's, the fetch is good.
        consumer.fetch("engine-killed", first.ticket)
        time.sleep(0.02)
        first.kill()
        assert consumer.end("engine-killed", 30) is None
        assert consumer.holds(1)

        # The engine comes back on the same sidecar; then the sidecar dies in the middle.
        first = Producer(prefill, "prefill", 3)
        consumer.fetch("sidecar-killed", first.ticket)
        time.sleep(0.02)
        prefill.kill()
        began = time.monotonic()
        reason = consumer.end("sidecar-killed", 30)
        # It may have got everything before the kill; otherwise it must not be called good.
        if reason is None:
            assert consumer.holds(3)
        else:
            assert time.monotonic() - began < 10
            assert reason.split(":")[0] in ("peer_gone", "transport"), reason

        # The survivor serves others, and the dead one's successor.
        consumer.fetch("from-other", second.ticket)
        assert consumer.end("from-other", 30) is None
        assert consumer.holds(2)
        assert decode.process.poll() is None

        # A producer that is gone before the fetch begins fails it within the handshake's bound.
        consumer.fetch("gone", first.ticket)
        reason = consumer.end("gone", 30)
        assert reason is not None
    finally:
        consumer.close()
        first.kill()
        second.kill()
