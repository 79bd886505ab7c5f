"""Engines whose transfers are big enough to be caught in the middle, and what the tests of faults
watch: the consumer's memory itself, and /status.

`python -m tests.faults SOCKET ENGINE_ID NUM_BLOCKS` is a consumer's engine in a process of its own,
so that tests can kill it. It says "ready", fetches the ticket that it reads from stdin (a line of
JSON), says "reading" when a part of it is there, and at the end the reason of its failure, or
"None". `tests.producer` is its counterpart.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import torch

from tests.harness import Engine, Sidecar
from tests.producer import BLOCK_BYTES, BLOCK_SIZE, HEADS, LAYERS, SPEC

BIG = (256 << 20) // BLOCK_BYTES
"""Blocks of a transfer that takes a while."""
SMALL = 16
EMPTY, MINE = 0.0, 5.0
"""What is in a consumer's blocks before a fetch, and what its engine writes there afterwards."""
GONE = ("peer_gone", "transport")
"""The causes of a fetch whose producer's sidecar died."""
TRANSPORTS: Mapping[str, Mapping[str, str]] = {"tcp": {"UCX_TLS": "tcp"}, "shm": {}}
"""The environment of sidecars that read over them."""

_ports = count(20_000 + os.getpid() * 16 % 12_000)
"""Below those that the system hands out, so that none goes between our look and the bind."""


class Watched(Sidecar):
    """A sidecar with HTTP; `settings` go into its TOML file."""

    def __init__(self, folder: Path, name: str, transport: str, **settings: float) -> None:
        self.http = _free_address()
        if transport == "shm":
            settings = {"piece_bytes": 1 << 14, **settings}  # otherwise it is over in an instant
        config = folder / f"{name}.toml"
        config.write_text("".join(f"{key} = {value}\n" for key, value in settings.items()))
        super().__init__(
            folder, name, "--http", self.http, "--config", str(config), env=TRANSPORTS[transport]
        )

    def status(self) -> dict[str, Any]:
        url = f"http://{self.http}/status"
        status: dict[str, Any] = httpx.get(url, params={"cards": "0"}, timeout=10).json()
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
        """No block is lent or written, no lease, no fetch, no read."""

        def idle(status: dict[str, Any]) -> bool:
            leases, ledger = status["leases"], status["ledger"]
            return not (
                leases["offered"]
                or leases["claimed"]
                or any(status["fetches"].values())
                or any(count for state, count in ledger.items() if state != "free")
                or status["parts_reading"]
            )

        self.until(idle)


def _free_address() -> str:
    for port in _ports:
        with socket.socket() as free:
            try:
                free.bind(("127.0.0.1", port))
            except OSError:
                continue
        return f"127.0.0.1:{port}"
    raise AssertionError("no port is free")


@contextmanager
def watched(
    folder: Path, names: Sequence[str], transport: str, **settings: float
) -> Iterator[list[Watched]]:
    """Sidecars that are started together, and killed: how they end is not what is tested here."""
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
    return Engine(sidecars, engine_id, layers=LAYERS, num_blocks=num_blocks, spec=SPEC, fill=fill)


def offer(producer: Engine, request_id: str, blocks: range) -> dict[str, Any]:
    return producer.client.offer(request_id, list(blocks), len(blocks) * BLOCK_SIZE)


def cause(reason: str | None) -> str | None:
    """The name in a failure's reason; None when the fetch was good."""
    return reason and reason.split(":")[0]


class Landing:
    """Blocks of a consumer's cache, `EMPTY` before a fetch writes into them."""

    def __init__(self, consumer: Engine, blocks: range) -> None:
        self.consumer = consumer
        self.blocks = blocks
        self._heads = [
            consumer.canonical(cache)[:, head, blocks.start : blocks.stop]
            for layer in consumer.caches[0]
            for rank in range(len(consumer.caches))
            for cache in [consumer.caches[rank][layer]]
            for head in range(HEADS // len(consumer.caches))
        ]
        """Views (kv, block, token, channel): the global heads of the first layer, of the next..."""
        self.write(EMPTY)

    def write(self, value: float) -> None:
        """What the request does that the blocks are handed to. A little everywhere comes first, so
        that a read that is still at work does not fall behind the writing."""
        for view in self._heads:
            view[:, :, ::4, :8].fill_(value)
        for view in self._heads:
            view.fill_(value)

    def keeps(self, value: float, seconds: float = 0.0) -> bool:
        """Whether `value` is all that is there, now and for a while."""
        end = time.monotonic() + seconds
        while all(bool((view == value).all()) for view in self._heads):
            if time.monotonic() >= end:
                return True
            time.sleep(0.05)
        return False

    def share(self, source: int = 0, sources: int = 1) -> float:
        """How much is no longer `EMPTY`, from samples, in a fraction of a millisecond; of the
        heads that the producer's rank `source` has."""
        held = HEADS // sources
        of_source = [
            view[:, ::8, -1, -1]
            for head, view in enumerate(self._heads)
            if head % HEADS // held == source
        ]
        return float((torch.stack(of_source) != EMPTY).float().mean())

    def until(self, share: float, sources: int = 1) -> None:
        """Returns as soon as that much of what each source has is there."""
        end = time.monotonic() + 30
        while any(self.share(source, sources) < share for source in range(sources)):
            assert time.monotonic() < end, "the read does not begin"

    def until_still(self) -> None:
        """Returns when nothing more comes, although more was asked for: the producer stands still,
        and what was under way in sockets has arrived."""
        end = time.monotonic() + 30
        there, since = self.share(), time.monotonic()
        while time.monotonic() < since + 0.5:
            assert time.monotonic() < end, "the read goes on"
            time.sleep(0.02)
            if self.share() != there:
                there, since = self.share(), time.monotonic()
        assert there < 1, "the read had ended"

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
    with engine([SimpleNamespace(socket=path)], engine_id, num_blocks) as consumer:
        landing = Landing(consumer, range(num_blocks))
        print("ready", flush=True)
        ticket = json.loads(sys.stdin.readline())
        consumer.client.fetch("request", ticket, list(landing.blocks))
        landing.until(0.05)
        print("reading", flush=True)
        print(consumer.received("request"), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
