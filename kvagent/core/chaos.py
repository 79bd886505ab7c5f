"""Which control messages go wrong, decided by a seed: for drills and for tests.

The plan looks at every message that a sidecar is about to send, questions and answers alike, in
the order in which they are sent, and says what becomes of it. The same settings give the same
faults to the same sequence of messages. Nothing is sent here.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Collection
from enum import Enum
from typing import Annotated

import msgspec

from kvagent.errors import ConfigError

__all__ = ["ChaosConfig", "ChaosPlan", "Fault", "FaultAt"]

Share = Annotated[float, msgspec.Meta(ge=0, le=1)]


class Fault(str, Enum):
    DROP = "drop"
    DUPLICATE = "duplicate"
    DELAY = "delay"
    REORDER = "reorder"  # held until the next one to the same peer has passed it


class FaultAt(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A fault for exactly one message, counted from 1."""

    message: Annotated[int, msgspec.Meta(ge=1)]
    fault: Fault


class ChaosConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The `[chaos]` section: shares of this sidecar's control messages that go wrong, for drills.
    All zero: off."""

    seed: int = 0
    """Decides which messages; a drill with the same seed can be replayed."""
    drop: Share = 0.0
    duplicate: Share = 0.0
    delay: Share = 0.0
    reorder: Share = 0.0
    delay_seconds: Annotated[float, msgspec.Meta(gt=0, le=60)] = 0.5
    """Most that a message is delayed; a reordered one that nothing follows waits as long."""
    kinds: tuple[str, ...] = ()
    """Only these messages (`claim`, `verdict`, ...) are counted and go wrong; empty: all."""
    at: tuple[FaultAt, ...] = ()
    """Faults for single messages, on top of the shares."""

    @property
    def active(self) -> bool:
        return bool(self.at) or self.drop + self.duplicate + self.delay + self.reorder > 0

    def validate(self, known: Collection[str]) -> None:
        """`known` are the kinds there are. Raises `ConfigError`."""
        # Shares as people write them (0.05 + 0.55 + 0.3 + 0.1) need not add up to 1 exactly.
        if self.drop + self.duplicate + self.delay + self.reorder > 1 + 1e-9:
            raise ConfigError("chaos: drop, duplicate, delay and reorder add up to more than 1")
        twice = [n for n, count in Counter(e.message for e in self.at).items() if count > 1]
        if twice:
            raise ConfigError(f"chaos.at: message {twice[0]} is there twice; it has one fault")
        for kind in self.kinds:
            if kind not in known:
                raise ConfigError(f"chaos.kinds: no message {kind!r}; there are {sorted(known)}")


class ChaosPlan:
    """`next(kind)` for every message, in the order of sending."""

    def __init__(self, config: ChaosConfig) -> None:
        self._config = config
        self._random = random.Random(config.seed)
        self._delays = random.Random(config.seed)  # of its own: `at` must not shift the rest
        self._at = {entry.message: entry.fault for entry in config.at}
        self.messages = 0
        """Messages that were looked at."""
        self.done: Counter[str] = Counter()
        """Faults so far, by kind."""

    def next(self, kind: str) -> Fault | None:
        config = self._config
        if config.kinds and kind not in config.kinds:
            return None
        self.messages += 1
        left = self._random.random()  # drawn always, for the same reason
        fault = self._at.get(self.messages)
        for choice, share in (
            (Fault.DROP, config.drop),
            (Fault.DUPLICATE, config.duplicate),
            (Fault.DELAY, config.delay),
            (Fault.REORDER, config.reorder),
        ):
            if fault is None and 0 <= left < share:
                fault = choice
            left -= share
        if fault is not None:
            self.done[fault.value] += 1
        return fault

    def delay(self) -> float:
        """Seconds for a message that is to be delayed."""
        return self._delays.uniform(0, self._config.delay_seconds)

    @property
    def longest(self) -> float:
        return self._config.delay_seconds
