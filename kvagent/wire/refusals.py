"""Peers that are refused again and again: when to say so, and when not to listen any more.

Bounded tables without a clock of their own. One who changes his name gets no more than a new one
would.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple

__all__ = ["Complaints", "Patience"]

MAX_NAMES = 1024


class _Line(NamedTuple):
    at: float
    left_out: int


class Complaints:
    """Of each peer one line in `period` seconds; of all of them together `most`."""

    def __init__(self, period: float = 60.0, most: int = 20) -> None:
        self._period, self._most = period, most
        self._lines: OrderedDict[str, _Line] = OrderedDict()
        self._since, self._said = float("-inf"), 0

    def worth_a_line(self, peer: str, now: float) -> int | None:
        """None: not now. Else how many of this peer's were left out since its last line."""
        if now - self._since >= self._period:
            self._since, self._said = now, 0
        line = self._lines.pop(peer, _Line(float("-inf"), 0))
        say = now - line.at >= self._period and self._said < self._most
        self._lines[peer] = _Line(now, 0) if say else line._replace(left_out=line.left_out + 1)
        if len(self._lines) > MAX_NAMES:
            self._lines.popitem(last=False)
        self._said += say
        return line.left_out if say else None


class Patience:
    """Each peer may be refused `burst` times at once and `rate` times a second."""

    def __init__(self, rate: float = 20.0, burst: float = 100.0) -> None:
        self._rate, self._burst = rate, burst
        self._spent: OrderedDict[bytes, tuple[float, float]] = OrderedDict()
        """When it was last refused, and how much of `burst` was used up then."""

    def refused(self, peer: bytes, now: float) -> None:
        self._spent[peer] = (now, self._used(peer, now) + 1.0)
        self._spent.move_to_end(peer)
        if len(self._spent) > MAX_NAMES:
            self._spent.popitem(last=False)

    def lost(self, peer: bytes, now: float) -> bool:
        """Whether nothing that this peer says is looked at for the moment."""
        return peer in self._spent and self._used(peer, now) > self._burst - 1.0

    def _used(self, peer: bytes, now: float) -> float:
        at, used = self._spent.get(peer, (now, 0.0))
        return max(0.0, used - (now - at) * self._rate)
