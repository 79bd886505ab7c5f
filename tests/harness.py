"""Real sidecars in processes of their own, and engines made of clients in the test process.

A `Sidecar` is `kvagent serve`. An `Engine` joins one worker per sidecar and attaches a scheduler;
joining again starts the sidecars afresh, so that tests can share the processes.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from kvagent import (
    EngineClient,
    FullAttentionSpec,
    KVConnectorOutput,
    MLASpec,
    ModelInfo,
    WorkerClient,
    WorkerInfo,
)
from kvagent.cuda.calls import CudaCalls

START_SECONDS = 90.0
"""Generous: two cores start many processes that import torch."""


class Sidecar:
    """One `kvagent serve` process; `log` is the file that it writes to."""

    def __init__(
        self, folder: Path, name: str, *options: str, env: Mapping[str, str] | None = None
    ) -> None:
        self.socket = str(folder / f"{name}.sock")
        self.log = folder / f"{name}.log"
        command = [sys.executable, "-m", "kvagent", "serve", "--socket", self.socket, *options]
        with self.log.open("a") as log:
            self.process = subprocess.Popen(
                command, stdout=log, stderr=log, env={**os.environ, **(env or {})}
            )

    def wait(self) -> Sidecar:
        until = time.monotonic() + START_SECONDS
        while not os.path.exists(self.socket):
            assert self.process.poll() is None, self.log.read_text()
            assert time.monotonic() < until, "the sidecar did not start"
            time.sleep(0.02)
        return self

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def stop(self) -> None:
        """SIGSTOP."""
        self.process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            self.process.terminate()
            time.sleep(0.05)
            if self.process.poll() is None:
                self.process.terminate()  # the second one does not wait for open transfers
            try:
                self.process.wait(10)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()


def start(
    folder: Path, names: Sequence[str], *options: str, env: Mapping[str, str] | None = None
) -> list[Sidecar]:
    """Several sidecars, started together."""
    made = [Sidecar(folder, name, *options, env=env) for name in names]
    try:
        return [sidecar.wait() for sidecar in made]
    except BaseException:
        for sidecar in made:
            sidecar.close()
        raise


NHD = ("kv", "block", "token", "head", "channel")
HND = ("kv", "block", "head", "token", "channel")
BLOCKS_FIRST_NHD = ("block", "kv", "token", "head", "channel")
BLOCKS_FIRST_HND = ("block", "kv", "head", "token", "channel")


class Engine:
    """An engine of `len(sidecars)` tensor-parallel ranks; `caches[rank][layer]` are its tensors."""

    def __init__(
        self,
        sidecars: Sequence[Sidecar],
        engine_id: str,
        *,
        heads: int = 4,
        head_size: int = 8,
        block_size: int = 4,
        num_blocks: int = 32,
        layers: int = 2,
        dtype: str = "float32",
        axes: Sequence[str] = HND,
        model: ModelInfo | None = None,
        spec: FullAttentionSpec | MLASpec | None = None,
        fill: Callable[[torch.Tensor], object] | None = None,
        device: str = "cpu",
        cuda: CudaCalls | None = None,
    ) -> None:
        self.engine_id = engine_id
        self.spec = spec or FullAttentionSpec(
            block_size=block_size,
            num_kv_heads=heads,
            head_size=head_size,
            dtype=dtype,
            axes=tuple(axes),
        )
        self.axes = self.spec.axes
        self.heads = self.spec.num_kv_heads if isinstance(self.spec, FullAttentionSpec) else 1
        self.num_blocks = num_blocks
        self.workers: list[WorkerClient] = []
        self.caches: list[dict[str, torch.Tensor]] = []
        leader = None
        for rank, sidecar in enumerate(sidecars):
            worker = WorkerClient(sidecar.socket, timeout=START_SECONDS, cuda=cuda)
            worker.join(
                WorkerInfo(
                    engine_id=engine_id,
                    tp_rank=rank,
                    tp_size=len(sidecars),
                    leader=leader,
                    model=model or ModelInfo(name="test", num_layers=layers),
                )
            )
            leader = leader or worker.endpoint
            caches = worker.allocate_kv_caches(
                {f"layer.{i}": self.spec for i in range(layers)}, num_blocks, device
            )
            for tensor in caches.values():
                if fill is not None:
                    fill(tensor)
            self.workers.append(worker)
            self.caches.append(caches)
        self.client = EngineClient(sidecars[0].socket)
        self.client.wait_ready(START_SECONDS)
        self.seen: list[KVConnectorOutput] = []

    def until(
        self, done: Callable[[KVConnectorOutput], bool], timeout: float = 20.0
    ) -> KVConnectorOutput:
        """The first output for which `done` holds; all of them are kept in `seen`."""
        end = time.monotonic() + timeout
        while time.monotonic() < end:
            out = self.client.step()
            if not out.is_empty():
                self.seen.append(out)
                if done(out):
                    return out
            time.sleep(0.0005)
        raise AssertionError(f"not seen within {timeout} s; seen: {self.seen}")

    def received(self, request_id: str, timeout: float = 20.0) -> str | None:
        """Waits for the end of a fetch; the reason when it failed."""
        out = self.until(lambda o: request_id in (o.finished_recving or ()), timeout)
        return out.failed_recving.get(request_id)

    def sent(self, request_id: str, timeout: float = 20.0) -> None:
        """Waits until the blocks of an offer are free."""
        for out in self.seen:
            if request_id in (out.finished_sending or ()):
                return
        self.until(lambda o: request_id in (o.finished_sending or ()), timeout)

    def canonical(self, cache: torch.Tensor) -> torch.Tensor:
        """A view with the axes (kv, head, block, token, channel), whatever the layout."""
        axes = list(self.axes)
        for axis in ("head", "kv"):
            if axis not in axes:
                axes.insert(0, axis)
                cache = cache.unsqueeze(0)
        order = ("kv", "head", "block", "token", "channel")
        return cache.permute(*(axes.index(axis) for axis in order))

    def tokens(self, layer: str, block_ids: Sequence[int], head: int) -> torch.Tensor:
        """(kv, token, channel) of one global head, in the order of `block_ids`, from any rank
        that holds it. Plain indexing, independent of kvagent's plan."""
        size = len(self.caches)
        for rank, caches in enumerate(self.caches):
            first = rank * self.heads // size
            held = max(1, (rank + 1) * self.heads // size - first)
            if first <= head < first + held:
                cache = self.canonical(caches[layer])
                picked = cache[:, head - first, list(block_ids)]
                return picked.reshape(picked.shape[0], -1, picked.shape[-1])
        raise AssertionError(f"no rank holds head {head}")

    def close(self) -> None:
        self.client.close()
        for worker in self.workers:
            worker.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()


def random_fill(seed: int) -> Callable[[torch.Tensor], object]:
    """Different values in every tensor that it is called for."""
    generator = torch.Generator().manual_seed(seed)
    return lambda tensor: tensor.copy_(torch.randn(tensor.shape, generator=generator))


GUARD = -7.0
"""What a consumer's cache is filled with before a transfer."""


def check(
    producer: Engine, consumer: Engine, name: str, start_token: int, tokens: int
) -> dict[str, Any]:
    """One transfer into scattered blocks, every byte compared, those around it as well.

    Returns its statistics.
    """
    remote = _scattered(5, 3, -(-tokens // producer.spec.block_size), producer.num_blocks)
    local = _scattered(7, 2, -(-tokens // consumer.spec.block_size), consumer.num_blocks)
    for caches in consumer.caches:
        for cache in caches.values():
            cache.fill_(GUARD)
    ticket = producer.client.offer(name, remote, tokens)
    consumer.client.fetch(name, ticket, local, start_token)
    assert consumer.received(name) is None
    producer.sent(name)
    others = [block for block in range(consumer.num_blocks) if block not in local]
    for layer in producer.caches[0]:
        for head in range(producer.heads):
            want = producer.tokens(layer, remote, head)[:, start_token:tokens]
            got = consumer.tokens(layer, local, head)
            assert torch.equal(got[:, start_token:tokens], want)
            assert (got[:, :start_token] == GUARD).all()
            assert (got[:, tokens:] == GUARD).all()
        for caches in consumer.caches:
            assert (consumer.canonical(caches[layer])[:, :, others] == GUARD).all()
    stats: dict[str, Any] = consumer.seen[-1].kv_connector_stats["fetches"][name]
    return stats


def _scattered(step: int, first: int, count: int, num_blocks: int) -> list[int]:
    """`count` different block ids that are not in order; `step` and `num_blocks` are coprime."""
    return [(step * i + first) % num_blocks for i in range(count)]
