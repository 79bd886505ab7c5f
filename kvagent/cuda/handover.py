"""Objects that the two ends of an in-process connection hand to each other by number.

Messages are bytes; an event or a tensor is none. Each number is taken once.
"""

from __future__ import annotations

import threading
from itertools import count
from typing import Any

from kvagent.errors import ProtocolError

__all__ = ["Handover"]


class Handover:
    """Any thread may use it."""

    def __init__(self) -> None:
        self._numbers = count(1)
        self._given: dict[int, Any] = {}
        self._lock = threading.Lock()

    def give(self, thing: Any) -> int:
        """The number under which the other end takes it; never 0."""
        with self._lock:
            number = next(self._numbers)
            self._given[number] = thing
            return number

    def take(self, number: int) -> Any:
        with self._lock:
            if number not in self._given:
                raise ProtocolError(f"nothing was handed over as number {number}")
            return self._given.pop(number)
