"""Engines whose transfers are big enough to be caught in the middle, and what the tests of faults
watch: the consumer's memory itself, and /status.

`python -m tests.faults SOCKET ENGINE_ID NUM_BLOCKS` is a consumer's engine in a process of its own,
so that tests can kill it: it fetches the ticket that it reads from stdin (a line of JSON) and says
`reading` when a part of it is there.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import torch

from kvagent import FullAttentionSpec
from tests.harness import Engine, Sidecar

HEADS, BLOCK_SIZE, LAYERS = 4, 16, 4
SPEC = FullAttentionSpec(
    block_size=BLOCK_SIZE,
    num_kv_heads=HEADS,
    head_size=64,
    dtype="float32",
    axes=("kv", "block", "head", "token", "channel"),
)
BLOCK_BYTES = LAYERS * 2 * HEADS * BLOCK_SIZE * 64 * 4
BIG = (256 << 20) // BLOCK_BYTES
"""Blocks of a transfer that takes a while."""
SMALL = 16
EMPTY, MINE = 0.0, 5.0
"""What is in a consumer's blocks before a fetch, and what is written into them after it."""
TRANSPORTS: Mapping[str, Mapping[str, str]] = {"tcp": {"UCX_TLS": "tcp"}, "shm": {}}
"""The environment of a sidecar that reads over them."""

_ports = count(20_000 + os.getpid() * 16 % 12_000)
"""Below those that the system gives away, so that none is taken between our look and the bind."""


class Watched(Sidecar):
    """A sidecar with HTTP. `settings` are those of its TOML file."""

    def __init__(self, folder: Path, name: str, transport: str, **settings: float) -> None:
        self.http = _free_address()
        config = folder / f"{name}.toml"
        config.write_text("".join(f"{key} = {value}\n" for key, value in settings.items()))
        super().__init__(
            folder, name, "--http", self.http, "--config", str(config), env=TRANSPORTS[transport]
        )

    def status(self) -> dict[str, Any]:
        status: dict[str, Any] = httpx.get(f"http://{self.http}/status", timeout=10).json()
        return status

    def until(
        self, done: Callable[[dict[str, Any]], bool], timeout: float = 20.0
    ) -> dict[str, Any]:
        """The first /status for which `done` holds."""
        end = time.monotonic() + timeout
        while not done(status := self.status()):
            assert time.monotonic() < end, f"not within {timeout} s: {status}"
            time.sleep(0.01)
        return status

    def until_idle(self) -> None:
        """No lease, no fetch, no block in quarantine, no read."""
        self.until(
            lambda status: not (
                status["leases"]["blocks"] or any(status["fetches"].values())
            )
            and not status["parts_reading"]
        )


def _free_address() -> str:
    for port in _ports:
        with socket.socket() as free:
            free.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                free.bind(("127.0.0.1", port))
            except OSError:
                continue
        return f"127.0.0.1:{port}"
    raise AssertionError("no port is free")


def watched(
    folder: Path, names: Sequence[str], transport: str, **settings: float
) -> Iterator[list[Watched]]:
    """For fixtures: sidecars that are started together, and killed: how they end of themselves is
    not what these tests are about."""
    made = [Watched(folder, name, transport, **settings) for name in names]
    try:
        for sidecar in made:
            sidecar.wait()
        yield made
    finally:
        for sidecar in made:
            sidecar.kill()


def engine(
    sidecars: Sequence[Sidecar | SimpleNamespace],
    engine_id: str,
    num_blocks: int,
    fill: Callable[[torch.Tensor], object] | None = None,
) -> Engine:
    """One rank for each sidecar."""
    return Engine(
        sidecars, engine_id, layers=LAYERS, num_blocks=num_blocks, spec=SPEC, fill=fill
    )


def offer(producer: Engine, request_id: str, blocks: range) -> dict[str, Any]:
    return producer.client.offer(request_id, list(blocks), len(blocks) * BLOCK_SIZE)


class Landing:
    """Blocks of a consumer's cache, filled with `EMPTY` before a fetch writes into them."""

    def __init__(self, consumer: Engine, blocks: range) -> None:
        self.consumer = consumer
        self.blocks = blocks
        self._views = [
            consumer.canonical(cache)[:, :, blocks.start : blocks.stop]
            for caches in consumer.caches
            for cache in caches.values()
        ]
        self.write(EMPTY)

    def write(self, value: float) -> None:
        """What a request does that the blocks are handed to. At first a little everywhere, so that
        a read that still writes into them is not overtaken."""
        for view in self._views:
            view[:, :, :, ::4].fill_(value)
        for view in self._views:
            view.fill_(value)

    def keeps(self, value: float, seconds: float = 0.0) -> bool:
        """Whether `write(value)` is all that is there, now and for a while."""
        end = time.monotonic() + seconds
        while True:
            if not all(bool((view == value).all()) for view in self._views):
                return False
            if time.monotonic() >= end:
                return True
            time.sleep(0.05)

    def share(self, rank: int = 0, of: int = 1) -> float:
        """How much of it is no longer `EMPTY`, from samples; of the heads of the producer's `rank`
        of `of`. Takes a fraction of a millisecond."""
        there = total = 0
        for view in self._views:
            held = view.shape[1] // of
            sample = view[:, rank * held : (rank + 1) * held, ::8, -1, -1]
            there += int((sample != EMPTY).sum())
            total += sample.numel()
        return there / total

    def until(self, share: float, of: int = 1) -> None:
        """Returns as soon as that much of every producer's rank's part is there."""
        end = time.monotonic() + 30
        while min(self.share(rank, of) for rank in range(of)) < share:
            assert time.monotonic() < end, "the read does not begin"

    def equals(self, producer: Engine, blocks: range) -> bool:
        """Whether it holds every byte of the producer's `blocks`."""
        return all(
            torch.equal(
                self.consumer.tokens(layer, self.blocks, head).view(torch.int32),
                producer.tokens(layer, blocks, head).view(torch.int32),
            )
            for layer in producer.caches[0]
            for head in range(HEADS)
        )


def main(path: str, engine_id: str, num_blocks: int) -> None:
    consumer = engine([SimpleNamespace(socket=path)], engine_id, num_blocks)
    landing = Landing(consumer, range(num_blocks))
    print("ready", flush=True)
    consumer.client.fetch("request", json.loads(sys.stdin.readline()), list(range(num_blocks)))
    landing.until(0.05)
    print("reading", flush=True)
    print(consumer.received("request"), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
