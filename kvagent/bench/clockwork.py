"""Simulated time, and messages in it: what is sent is encoded, counted and decoded for real."""

from __future__ import annotations

import heapq
import itertools
import random
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from kvagent.wire.local import LENGTH
from kvagent.wire.messages import Local, Peer, decode_question, local_codec, peer_codec
from kvagent.wire.peer import HEAD

__all__ = ["LATENCY", "SCHEDULER", "Clockwork", "Outcome"]

T = TypeVar("T")

LATENCY = 100e-6
"""Seconds that a message takes, on average."""
SCHEDULER = "scheduler"


@dataclass
class Outcome:
    """`cpu`: seconds by who spends them; `messages` and `bytes`: by kind of message."""

    engines: int
    requests: int
    good: int = 0
    failed: Counter[str] = field(default_factory=Counter)
    simulated: float = 0.0
    contacts: int = 0
    messages: Counter[str] = field(default_factory=Counter)
    bytes: Counter[str] = field(default_factory=Counter)
    cpu: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))

    def summary(self) -> dict[str, float]:
        """Per request; contacts are counted apart, see `contact`."""
        each = 1 / self.requests
        lender, borrower = self.cpu["lender"] * each, self.cpu["borrower"] * each
        return {
            "engines": self.engines,
            "requests": self.requests,
            "good": self.good,
            "simulated_seconds": self.simulated,
            "contacts": self.contacts,
            "messages": sum(self.messages.values()) * each,
            "bytes": sum(self.bytes.values()) * each,
            "lender_us": lender * 1e6,
            "borrower_us": borrower * 1e6,
            "follower_us": self.cpu["follower"] * each * 1e6,
            "sweep_us": self.cpu["sweep"] * 1e6 / max(1, self.engines * self.simulated),
            "offers_per_second": 1 / lender,
            "fetches_per_second": 1 / borrower,
        }


class Clockwork:
    """A heap of events, and who spent how much processor time on what."""

    def __init__(self, outcome: Outcome, seed: int) -> None:
        self.outcome = outcome
        self.now = 0.0
        self.random = random.Random(seed)
        self.numbers = itertools.count()
        self._events: list[tuple[float, int, Callable[[], None]]] = []

    def run(self) -> Outcome:
        """Until nothing is left to happen."""
        while self._events:
            self.now, _, event = heapq.heappop(self._events)
            event()
        self.outcome.simulated = self.now
        return self.outcome

    def at(self, delay: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self.now + delay, next(self.numbers), event))

    def spend(self, who: str, call: Callable[..., T], *arguments: Any) -> T:
        """Calls it; the time is on `who`."""
        begin = time.thread_time()
        result = call(*arguments)
        self.outcome.cpu[who] += time.thread_time() - begin
        return result

    def _count(self, message: Any, nbytes: int) -> None:
        kind = str(message.__struct_config__.tag)
        self.outcome.messages[kind] += 1
        self.outcome.bytes[kind] += nbytes

    def send(
        self, sender: str, receiver: str, message: Peer, then: Callable[[Any], None], ask: bool
    ) -> None:
        """A message between sidecars; `then` gets what the receiver decodes."""
        data = self.spend(sender, peer_codec.encode, message)
        self._count(message, len(data) + HEAD.size)
        decode = decode_question if ask else peer_codec.decode

        def arrive() -> None:
            then(self.spend(receiver, decode, data))

        self.at(self.random.expovariate(1 / LATENCY), arrive)

    def ask(
        self,
        sender: str,
        receiver: str,
        question: Peer,
        handle: Callable[[Any], Peer],
        then: Callable[[Any], None],
    ) -> None:
        """A call: `handle` answers at the receiver, `then` gets the answer."""

        def answer(message: Any) -> None:
            self.send(receiver, sender, handle(message), then, ask=False)

        self.send(sender, receiver, question, answer, ask=True)

    def local(self, leader: str, message: Local, *, up: bool) -> Local:
        """Between a scheduler and its leader, over the unix socket; `up` is to the leader."""
        sender, receiver = (SCHEDULER, leader) if up else (leader, SCHEDULER)
        data = self.spend(sender, local_codec.encode, message)
        self._count(message, len(data) + LENGTH.size)
        return self.spend(receiver, local_codec.decode, data)
