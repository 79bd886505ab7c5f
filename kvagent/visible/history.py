"""The last minutes: how much was moved, and what failed. Pure: `now` comes from the caller."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from kvagent.visible.events import FetchEnd

__all__ = ["Failures", "Throughput"]

STEP_SECONDS = 5.0
STEPS = 120
MAX_FAILURES = 50


@dataclass(slots=True)
class _Step:
    """What happened in the steps of `STEP_SECONDS` that `number` counts."""

    number: int
    read: int = 0
    lent: int = 0
    good: int = 0
    failed: int = 0


class Throughput:
    """Counters that only rise, by time. `sample` them a few times a second."""

    def __init__(self, now: float) -> None:
        self._began = now
        self._steps: deque[_Step] = deque([_Step(0)], maxlen=STEPS)
        self._last: tuple[int, int, int, int] = (0, 0, 0, 0)

    def sample(self, now: float, *, read: int, lent: int, good: int, failed: int) -> None:
        """`read`: bytes that this rank has read; `lent`: leases completed; `good`, `failed`:
        fetches ended; all since the sidecar started."""
        step = self._step(now)
        totals = (read, lent, good, failed)
        more = [max(0, new - old) for new, old in zip(totals, self._last, strict=True)]
        self._last = totals
        step.read += more[0]
        step.lent += more[1]
        step.good += more[2]
        step.failed += more[3]

    def show(self, now: float) -> dict[str, object]:
        """Series of one number per step, the oldest first; the last step is not over yet."""
        self._step(now)
        return {
            "step_seconds": STEP_SECONDS,
            "last_step_seconds": (now - self._began) % STEP_SECONDS,
            "read_bytes": [step.read for step in self._steps],
            "leases_completed": [step.lent for step in self._steps],
            "fetches_good": [step.good for step in self._steps],
            "fetches_failed": [step.failed for step in self._steps],
        }

    def _step(self, now: float) -> _Step:
        number = int((now - self._began) // STEP_SECONDS)
        last = self._steps[-1]
        if number - last.number > STEPS:
            self._steps.clear()
            last = _Step(number)
            self._steps.append(last)
        while last.number < number:
            last = _Step(last.number + 1)
            self._steps.append(last)
        return last


class Failures:
    """The newest failed fetches."""

    def __init__(self) -> None:
        self._ends: deque[tuple[float, FetchEnd]] = deque(maxlen=MAX_FAILURES)

    def add(self, now: float, end: FetchEnd) -> None:
        if end.cause:
            self._ends.appendleft((now, end))

    def show(self, now: float) -> list[dict[str, object]]:
        """Newest first."""
        return [
            {
                "seconds_ago": now - at,
                "request_id": end.request_id,
                "transfer_id": end.transfer_id,
                "peer": end.peer,
                "address": end.address,
                "cause": end.name,
                "text": end.cause.partition(":")[2].strip() or end.cause,
                "stage": end.stage,
                "rank": end.rank,
                "bytes": end.nbytes,
                "wanted_bytes": end.wanted,
                "seconds": end.seconds,
            }
            for at, end in self._ends
        ]
