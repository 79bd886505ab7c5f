"""The engines of the simulation: each has the tables that a leader has."""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass

from kvagent.bench.contact import BLOCKS, RANKS, model_layout, topologies
from kvagent.core.aggregator import KVOutputAggregator
from kvagent.core.fetch import Fetch as FetchRecord
from kvagent.core.fetch import FetchTable
from kvagent.core.lease import LeaseTable
from kvagent.core.ledger import Ledger
from kvagent.core.output import KVConnectorOutput
from kvagent.wire.messages import Fetch

__all__ = [
    "LEASE_SECONDS",
    "REQUEST_BLOCKS",
    "Consumer",
    "Nature",
    "Producer",
    "Running",
    "aggregate",
    "forget",
    "give_back",
    "take",
]

LEASE_SECONDS = 30.0
REQUEST_BLOCKS = 128
SLOW, CANCELLED, LOST = 50, 100, 200
"""One in so many requests; by number, so that few requests are the same mix as many."""


class Producer:
    """The leader of an engine that offers."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.ledger = Ledger()
        self.ledger.know(model_layout(0).groups)
        self.leases = LeaseTable(lease_seconds=LEASE_SECONDS, ledger=self.ledger)
        self.free = deque(range(BLOCKS))
        self.owned: dict[str, list[int]] = {}
        self.seq = 0


class Nature:
    """How one request goes: the same whatever the number of engines."""

    def __init__(self, number: int, seed: int) -> None:
        draw = random.Random(seed << 32 | number)
        slow = number % SLOW == 1
        seconds = draw.uniform(10, 25) if slow else draw.uniform(0.02, 0.5)
        self.reads = [seconds * draw.uniform(0.8, 1.2) for _ in range(RANKS)]
        """Seconds, by rank."""
        self.lost = number % LOST == 2
        self.cancel_after = draw.uniform(0, 0.3) if number % CANCELLED == 3 else None


@dataclass
class Running:
    """A fetch as its leader knows it."""

    record: FetchRecord
    message: Fetch
    producer: Producer
    reads: list[float]
    part_id: str
    renew_at: float = float("inf")
    stopped: bool = False


class Consumer:
    """The leader of an engine that fetches; rank 0 is its own, the others are followers."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.ledger = Ledger()
        self.ledger.know(model_layout(0).groups)
        self.fetches = FetchTable(self.ledger)
        self.aggregator = KVOutputAggregator(RANKS, world_size=RANKS, max_age=float("inf"))
        self.topologies = topologies(name)
        self.known: set[str] = set()
        self.running: dict[str, Running] = {}
        self.parts: dict[str, Running] = {}
        self.free = deque(range(BLOCKS))
        self.owned: dict[str, list[int]] = {}
        self.seq = 0


@dataclass(slots=True)
class RankReport:
    kv_connector_output: KVConnectorOutput | None = None


def take(engine: Producer | Consumer, request_id: str) -> list[int]:
    blocks = [engine.free.popleft() for _ in range(REQUEST_BLOCKS)]
    engine.owned[request_id] = blocks
    return blocks


def give_back(engine: Producer | Consumer, request_id: str) -> None:
    engine.free.extend(engine.owned.pop(request_id))


def aggregate(
    consumer: Consumer, part_id: str, rank: int, failure: str
) -> KVConnectorOutput | None:
    output = KVConnectorOutput(finished_recving={part_id})
    if failure:
        output.failed_recving = {part_id: failure}
    reports = [RankReport() for _ in range(RANKS)]
    reports[rank].kv_connector_output = output
    combined = consumer.aggregator.aggregate(reports)
    return None if combined is None else combined.kv_connector_output


def forget(consumer: Consumer, running: Running) -> None:
    consumer.fetches.remove(running.record)
    consumer.aggregator.forget(running.part_id)
    del consumer.running[running.record.fetch_id]
    del consumer.parts[running.part_id]
