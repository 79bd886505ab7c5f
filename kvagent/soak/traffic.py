"""Requests: what a router and its clients do, and what became of each.

A request has an offer at a producer and none, one or two fetches at consumers. Each of them must
end once: by a report, by a call that was refused, or because its own engine's scheduler died.
"""

from __future__ import annotations

import heapq
import random
import time
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count

from kvagent.soak.messages import (
    Cancel,
    Checked,
    Event,
    Fetch,
    Offer,
    Offered,
    Received,
    Refused,
    Release,
    Sent,
    Wrong,
)
from kvagent.soak.parts import Engine
from kvagent.soak.world import SETTINGS, World

KINDS = {
    "plain": 30,
    "prefix": 12,
    "start_token": 12,
    "cancel fetch": 8,
    "cancel offer": 8,
    "cancel both": 4,
    "late": 4,
    "twice": 5,
    "two copies": 5,
    "release": 4,
    "abandoned": 4,
    "cancel early": 2,
}
"""Kinds of requests, and how often."""
PREFIX_TOKENS = 128
STUCK_SECONDS = 60.0
"""Longer than any wait that is meant to end, faults included."""


@dataclass(slots=True)
class Half:
    """An offer or a fetch that has not ended."""

    engine: Engine
    request: str
    what: str
    since: float
    cancelled: bool = False
    pair: tuple[str, str] | None = None
    transfer: str = ""


@dataclass(slots=True)
class Plan:
    """What is to become of a request when its ticket is there."""

    kind: str
    consumer: Engine
    spans: list[tuple[int, int]]
    start_token: int


@dataclass
class Traffic:
    world: World
    producers: Sequence[Engine]
    consumers: Sequence[Engine]
    seed: int
    most: int = 12
    """Requests at once."""
    rate: float = 40.0
    """Requests per second."""
    good: Counter[tuple[str, str]] = field(default_factory=Counter)
    """By producer and consumer."""
    failed: Counter[str] = field(default_factory=Counter)
    """Fetches, by the cause in the report."""
    refused: Counter[str] = field(default_factory=Counter)
    """Calls that raised."""
    ended: Counter[str] = field(default_factory=Counter)
    """Offers reported, offers and fetches that ended with their own engine, cancels."""
    compared: int = 0
    wrong: list[str] = field(default_factory=list)
    wrong_bytes: int = 0
    listeners: list[Callable[[Half], None]] = field(default_factory=list)
    """Called with every good fetch."""
    running: bool = True

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)
        self._numbers = count(1)
        self._open: dict[tuple[str, str, str], Half] = {}
        self._plans: dict[str, Plan] = {}
        self._later: list[tuple[float, int, Callable[[], None]]] = []
        self._next = 0.0
        self._goods: Counter[str] = Counter()
        self.checked: dict[str, int] = {}
        """Open requests, by engine, as their schedulers said after a `Check`."""

    # ------------------------------------------------------------ making requests

    def tick(self) -> None:
        now = time.monotonic()
        while self._later and self._later[0][0] <= now:
            heapq.heappop(self._later)[2]()
        if self.running and now >= self._next and len(self._open) < 2 * self.most:
            self._next = now + self._random.expovariate(self.rate)
            self.begin()

    def begin(
        self, producer: Engine | None = None, consumer: Engine | None = None, kind: str = ""
    ) -> str:
        """One more request; what is not given is random."""
        choose = self._random
        kind = kind or choose.choices(list(KINDS), list(KINDS.values()))[0]
        producer = producer or choose.choice(self.producers)
        consumer = consumer or choose.choice(self.consumers)
        request = f"{producer.name}-{next(self._numbers)}"
        tokens = choose.randrange(1, 400)
        if choose.random() < (0.6 if kind.startswith("cancel") else 0.15):
            tokens = choose.randrange(400, 2500)
        spans = [(zlib.crc32(f"{request}/{self.seed}".encode()) | 1, tokens)]
        if kind == "prefix":
            prefix = zlib.crc32(f"{producer.name}/{choose.randrange(3)}".encode()) | 1
            spans = [(prefix, PREFIX_TOKENS), (spans[0][0], PREFIX_TOKENS + tokens)]
        start = 0
        if kind == "start_token" or (kind == "prefix" and choose.random() < 0.3):
            start = choose.randrange(spans[-1][1])
        self._plans[request] = Plan(kind, consumer, spans, start)
        if kind == "cancel early":
            consumer.say(Cancel(request))
        self._add(Half(producer, request, "offer", time.monotonic()))
        producer.say(Offer(request, spans, 2 if kind == "two copies" else 1))
        return request

    def _with_ticket(self, request: str, message: Offered) -> None:
        plan = self._plans.pop(request)
        choose = self._random
        lease = SETTINGS["lease_seconds"]
        others = [engine for engine in self.consumers if engine is not plan.consumer]
        for number, ticket in enumerate(message.tickets):
            name = f"{request}.{number}" if number else request
            consumer = choose.choice(others) if number and others else plan.consumer
            delay = choose.expovariate(50) if choose.random() < 0.5 else 0.0
            if plan.kind == "late":
                delay = lease + choose.uniform(-0.3, 1.0)
            if plan.kind == "release":
                self._after(delay, partial(plan.consumer.say, Release(ticket)))
                continue
            if plan.kind == "abandoned":
                continue
            self._after(delay, partial(self._fetch, consumer, name, plan, ticket))
            if plan.kind == "twice":
                consumer, name = choose.choice(self.consumers), f"{request}.again"
                delay = choose.expovariate(20)
                self._after(delay, partial(self._fetch, consumer, name, plan, ticket))

    def _fetch(self, consumer: Engine, name: str, plan: Plan, ticket: dict[str, object]) -> None:
        transfer = str(ticket["kvagent"]["transfer_id"])  # type: ignore[index]
        pair = (str(ticket["remote_engine_id"]), consumer.name)
        self._add(Half(consumer, name, "fetch", time.monotonic(), pair=pair, transfer=transfer))
        spare = self._random.choice((0, 0, 1))
        consumer.say(Fetch(name, ticket, plan.spans, plan.start_token, spare))
        producer = self.world.engines[pair[0]]
        for engine, what, kinds in (
            (consumer, "fetch", ("cancel fetch", "cancel both")),
            (producer, "offer", ("cancel offer", "cancel both")),
        ):
            if plan.kind in kinds:
                delay = self._random.expovariate(1) * self._random.choice((0.002, 0.01, 0.05))
                self._after(delay, partial(self._cancel, engine, name, what))

    def _cancel(self, engine: Engine, request: str, what: str) -> None:
        half = self._open.get((engine.name, request, what))
        if half is not None:
            half.cancelled = True
        self.ended["cancels sent"] += 1
        engine.say(Cancel(request))

    def give_up(self, engine: Engine, delay: float) -> None:
        """The clients of what `engine` takes part in are tired of waiting, `delay` from now."""

        def cancel() -> None:
            halves = [half for half in self._open.values() if half.pair and not half.cancelled]
            for half in halves:
                assert half.pair is not None
                if engine.name in half.pair:
                    self._cancel(half.engine, half.request, "fetch")

        self._after(delay, cancel)

    def _after(self, delay: float, what: Callable[[], None]) -> None:
        heapq.heappush(self._later, (time.monotonic() + delay, next(self._numbers), what))

    # ------------------------------------------------------------ what became of them

    def heard(self, engine: Engine, event: Event | None) -> None:
        match event:
            case None:
                born = engine.scheduler.started
                theirs = [h for h in self._open.values() if h.engine is engine and h.since < born]
                for half in theirs:
                    self._end(half)
                    self.ended["ended with their own engine"] += 1
            case Offered():
                self._with_ticket(event.request, event)
            case Refused():
                self._refused(engine, event)
            case Sent():
                if self._end_named(engine, event.request, "offer"):
                    self.ended["offers reported"] += 1
            case Received():
                self._received(engine, event)
            case Wrong():
                text = f"{clock()} {engine.name}: {event.text} ({event.nbytes} bytes)"
                self.wrong.append(text)
                self.wrong_bytes += event.nbytes
            case Checked():
                self.checked[engine.name] = event.open

    def _refused(self, engine: Engine, event: Refused) -> None:
        what = "offer" if engine in self.producers else "fetch"
        if self._end_named(engine, event.request, what) is not None:
            self.refused[f"{what}: {event.reason.split(':')[0]}"] += 1
        if what == "offer":
            self._plans.pop(event.request, None)

    def _received(self, engine: Engine, event: Received) -> None:
        half = self._end_named(engine, event.request, "fetch")
        if half is None:
            return
        if event.reason is not None:
            self.failed[event.reason.split(":")[0]] += 1
            return
        assert half.pair is not None
        self.compared += event.compared
        self.good[half.pair] += 1
        self._goods[half.transfer] += 1
        if self._goods[half.transfer] > 1:
            self.wrong.append(f"{event.request}: the ticket was good for two fetches")
        for listener in self.listeners:
            listener(half)

    def _add(self, half: Half) -> None:
        self._open[half.engine.name, half.request, half.what] = half

    def _end(self, half: Half) -> None:
        del self._open[half.engine.name, half.request, half.what]

    def _end_named(self, engine: Engine, request: str, what: str) -> Half | None:
        half = self._open.get((engine.name, request, what))
        if half is None:
            self.wrong.append(f"{engine.name}: {what} {request} ended, and was not open")
            return None
        self._end(half)
        return half

    # ------------------------------------------------------------ at the end

    def __len__(self) -> int:
        return len(self._open) + len(self._later)

    def stuck(self, seconds: float = STUCK_SECONDS) -> list[str]:
        """What has been open for longer than that."""
        before = time.monotonic() - seconds
        halves = (half for half in self._open.values() if half.since < before)
        return [f"{half.what} {half.request} at {half.engine.name}" for half in halves]


def clock() -> str:
    """The time of day, as in the logs of the sidecars."""
    return time.strftime("%H:%M:%S")
