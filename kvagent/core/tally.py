"""Counts which ranks have reported which requests; each request comes out once.

The life of one request id:

    unknown --first report--> counting --enough ranks, taken--> done --newer ones--> unknown
                                 |
                                 `--too old--> unknown

* counting: the set of ranks that reported it, the number needed (fixed by the first report) and
  the first failure. Saying it twice adds nothing.
* done: it has come out. Late and repeated reports change nothing.
* `forget` takes an id to unknown from anywhere; without it, an id that is used again while it is
  done does not come out again.

Knows ranks only by their numbers, and time only as what the caller says it is.
"""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = ["Count", "Tally"]

MAX_DONE = 1 << 14
"""Done requests remembered, whatever their age: at least the last half of that many, and never
more."""


@dataclass
class Count:
    """One request that not enough ranks have reported yet."""

    expected: int
    ranks: set[int] = field(default_factory=set)
    failure: str | None = None
    since: float | None = None


class Tally:
    """The requests of one direction: who has reported what."""

    def __init__(self, max_age: float) -> None:
        self._max_age = max_age
        self.counts: dict[str, Count] = {}
        self._complete: set[str] = set()  # the ids in `counts` that can be taken
        # What is done goes by generations: a new one begins every `max_age`, or when this one is
        # full, and the one before the last is forgotten.
        self._done: set[str] = set()
        self._done_before: set[str] = set()
        self._done_since: float | None = None

    def report(self, request_id: str, rank: int, expected: int) -> None:
        """A rank has finished with the request."""
        count = self._find(request_id, expected)
        if count is not None:
            count.ranks.add(rank)
            if len(count.ranks) >= count.expected:
                self._complete.add(request_id)

    def fail(self, request_id: str, reason: str, expected: int) -> None:
        """A rank failed; the first reason is kept, since later failures tend to follow from it."""
        count = self._find(request_id, expected)
        if count is not None and count.failure is None:
            count.failure = reason

    def _find(self, request_id: str, expected: int) -> Count | None:
        """The count of the request, a new one when it is unknown, None when it is done."""
        if request_id in self._done or request_id in self._done_before:
            return None
        count = self.counts.get(request_id)
        if count is None:
            count = self.counts[request_id] = Count(expected)
        return count

    def take(self) -> dict[str, str | None]:
        """What has become complete since the last call: id -> why it failed, None if it did not."""
        taken = {request_id: self.counts.pop(request_id).failure for request_id in self._complete}
        self._complete.clear()
        for request_id in taken:
            if len(self._done) >= MAX_DONE // 2:
                self._next_generation()
            self._done.add(request_id)
        return taken

    def forget(self, request_id: str) -> None:
        self.counts.pop(request_id, None)
        for ids in (self._complete, self._done, self._done_before):
            ids.discard(request_id)

    def sweep(self, now: float) -> set[str]:
        """Start the age of what is new and drop what is too old, but nothing that is complete.
        Returns the dropped counts."""
        dropped = set()
        for request_id, count in self.counts.items():
            if count.since is None:
                count.since = now
            elif now - count.since > self._max_age and request_id not in self._complete:
                dropped.add(request_id)
        for request_id in dropped:
            del self.counts[request_id]

        if self._done_since is None:
            self._done_since = now
        elif now - self._done_since > self._max_age:
            self._next_generation()
            self._done_since = now
        return dropped

    def _next_generation(self) -> None:
        self._done_before, self._done = self._done, set()
