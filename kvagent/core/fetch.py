r"""The consumer's table of fetches: a state machine for each, written as one table.

Theory of operation. The leader feeds events in and carries out the actions that come back; the
machine knows nothing of sockets or of who the ranks are. Reading starts at once. One that lasts
is claimed, so that its lease can be renewed; most are over before that, and never are. Deferred
tickets are claimed first: their bytes are only sure to be there once the claim is granted.
When every rank is terminal, the producer is asked whether the lease held to the end; only its yes
makes a fetch good. If it knows of no such lease, its offer may still be on its way: a claim waits
for that, and then it is asked again. A failure is reported once, with its first cause, and never
while a rank may still write: `DRAINING` waits for all of them.

    CONNECTING --connected--> READING --ranks done, no claim open--> VALIDATING --held--> DONE
        |  \                     ^ |                                     |
        |   deferred:            | | first failure, cancel, deadline     | no, cancel, deadline
        |   CLAIMING --claim held+ |                                     |
        v      | (nothing posted)  v                                     v
      FAILED <-+--ranks done-- DRAINING                                FAILED

A pair of state and event that is not in the table is a late or repeated delivery, and changes
nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum

import numpy as np
import numpy.typing as npt

from kvagent.core.ledger import BlockState, Holding, Ledger

__all__ = ["Action", "Event", "Fetch", "FetchState", "FetchTable"]


class FetchState(str, Enum):
    CONNECTING = "connecting"
    CLAIMING = "claiming"
    READING = "reading"
    VALIDATING = "validating"
    DRAINING = "draining"
    DONE = "done"
    FAILED = "failed"


TERMINAL = (FetchState.DONE, FetchState.FAILED)


class Event(str, Enum):
    CONNECTED = "connected"  # the peer is known and fits
    CONNECT_FAILED = "connect_failed"
    LASTS = "lasts"  # it is not over yet
    CLAIM_HELD = "claim_held"
    CLAIM_REFUSED = "claim_refused"
    RANK_FAILED = "rank_failed"  # one rank failed, others may still read
    RANKS_DONE = "ranks_done"  # every rank is terminal
    LEASE_LOST = "lease_lost"  # a renewal was refused
    COMPLETE_HELD = "complete_held"
    COMPLETE_REFUSED = "complete_refused"
    COMPLETE_UNKNOWN = "complete_unknown"  # the producer has not heard of the transfer
    CANCEL = "cancel"
    DEADLINE = "deadline"


class Action(str, Enum):
    CLAIM = "claim"
    START_READS = "start_reads"
    STOP_READS = "stop_reads"  # post nothing more
    COMPLETE = "complete"
    RELEASE = "release"  # tell the producer that its blocks are not needed
    REPORT = "report"  # the terminal result, exactly once


@dataclass(slots=True)
class Fetch:
    """One fetch. `cause` is "" until something went wrong, then the first thing that did."""

    fetch_id: str
    request_id: str
    transfer_id: str
    token: bytes
    peer: str
    started: float
    deadline: float
    deferred: bool = False
    """Nothing may be read before the claim is granted."""
    state: FetchState = FetchState.CONNECTING
    claimed: bool = False
    """A claim was sent."""
    claim_held: bool = False
    ranks_done: bool = False
    cause: str = ""
    reading_since: float = 0.0
    validating_since: float = 0.0
    fenced: bool = False
    holding: Holding | None = None
    """The blocks that it writes."""

    @property
    def terminal(self) -> bool:
        return self.state in TERMINAL

    def on(self, event: Event, now: float, cause: str = "") -> list[Action]:
        """Feeds one event in; returns what is to be done, in order."""
        transition = _TABLE.get((self.state, event))
        return [] if transition is None else transition(self, now, cause)


def _connected(fetch: Fetch, now: float, _: str) -> list[Action]:
    if fetch.deferred:
        fetch.state = FetchState.CLAIMING
        return _claim(fetch, now, "")
    fetch.state = FetchState.READING
    fetch.reading_since = now
    return [Action.START_READS]


def _claim(fetch: Fetch, _: float, __: str) -> list[Action]:
    if fetch.claimed:
        return []
    fetch.claimed = True
    return [Action.CLAIM]


def _fail_now(fetch: Fetch, _: float, cause: str) -> list[Action]:
    fetch.cause = fetch.cause or cause
    fetch.state = FetchState.FAILED
    return [Action.RELEASE, Action.REPORT]


def _fail_refused(fetch: Fetch, _: float, cause: str) -> list[Action]:
    fetch.cause = fetch.cause or cause
    fetch.state = FetchState.FAILED
    return [Action.REPORT]


def _claim_granted(fetch: Fetch, now: float, _: str) -> list[Action]:
    fetch.state = FetchState.READING
    fetch.claim_held = True
    fetch.reading_since = now
    return [Action.START_READS]


def _claim_held(fetch: Fetch, now: float, _: str) -> list[Action]:
    fetch.claim_held = True
    return _validate(fetch, now) if fetch.ranks_done else []


def _claim_refused(fetch: Fetch, _: float, cause: str) -> list[Action]:
    # The lease is not ours, so there is nothing to release.
    fetch.cause = fetch.cause or cause
    if fetch.ranks_done:
        fetch.state = FetchState.FAILED
        return [Action.REPORT]
    fetch.state = FetchState.DRAINING
    return [Action.STOP_READS]


def _drain(fetch: Fetch, now: float, cause: str) -> list[Action]:
    fetch.cause = fetch.cause or cause
    if fetch.ranks_done:
        return _fail_now(fetch, now, cause)
    fetch.state = FetchState.DRAINING
    return [Action.STOP_READS, Action.RELEASE]


def _ranks_done(fetch: Fetch, now: float, cause: str) -> list[Action]:
    fetch.ranks_done = True
    if cause:
        return _fail_now(fetch, now, cause)
    return _validate(fetch, now) if fetch.claim_held or not fetch.claimed else []


def _validate(fetch: Fetch, now: float) -> list[Action]:
    fetch.state = FetchState.VALIDATING
    fetch.validating_since = now
    return [Action.COMPLETE]


def _not_known(fetch: Fetch, now: float, cause: str) -> list[Action]:
    return _claim(fetch, now, "") or _fail_refused(fetch, now, cause)


def _ask_again(fetch: Fetch, _: float, __: str) -> list[Action]:
    fetch.claim_held = True
    return [Action.COMPLETE]


def _drained(fetch: Fetch, _: float, cause: str) -> list[Action]:
    fetch.ranks_done = True
    fetch.cause = fetch.cause or cause
    fetch.state = FetchState.FAILED
    return [Action.REPORT]


def _good(fetch: Fetch, _: float, __: str) -> list[Action]:
    fetch.state = FetchState.DONE
    return [Action.REPORT]


_S, _E = FetchState, Event
_TABLE: dict[tuple[FetchState, Event], Callable[[Fetch, float, str], list[Action]]] = {
    (_S.CONNECTING, _E.CONNECTED): _connected,
    (_S.CONNECTING, _E.CONNECT_FAILED): _fail_now,
    (_S.CONNECTING, _E.CANCEL): _fail_now,
    (_S.CONNECTING, _E.DEADLINE): _fail_now,
    (_S.CLAIMING, _E.CLAIM_HELD): _claim_granted,
    (_S.CLAIMING, _E.CLAIM_REFUSED): _fail_refused,
    (_S.CLAIMING, _E.RANK_FAILED): _fail_now,
    (_S.CLAIMING, _E.CANCEL): _fail_now,
    (_S.CLAIMING, _E.DEADLINE): _fail_now,
    (_S.READING, _E.LASTS): _claim,
    (_S.READING, _E.CLAIM_HELD): _claim_held,
    (_S.READING, _E.CLAIM_REFUSED): _claim_refused,
    (_S.READING, _E.RANK_FAILED): _drain,
    (_S.READING, _E.RANKS_DONE): _ranks_done,
    (_S.READING, _E.LEASE_LOST): _claim_refused,
    (_S.READING, _E.CANCEL): _drain,
    (_S.READING, _E.DEADLINE): _drain,
    (_S.VALIDATING, _E.COMPLETE_HELD): _good,
    (_S.VALIDATING, _E.COMPLETE_REFUSED): _fail_refused,
    (_S.VALIDATING, _E.COMPLETE_UNKNOWN): _not_known,
    (_S.VALIDATING, _E.CLAIM_HELD): _ask_again,
    (_S.VALIDATING, _E.CLAIM_REFUSED): _fail_refused,
    (_S.VALIDATING, _E.CANCEL): _fail_now,
    (_S.VALIDATING, _E.DEADLINE): _fail_now,
    (_S.DRAINING, _E.RANKS_DONE): _drained,
}


_HELD = {
    _S.CONNECTING: BlockState.RESERVED,
    _S.CLAIMING: BlockState.RESERVED,
    _S.READING: BlockState.IN_FLIGHT,
    _S.VALIDATING: BlockState.IN_FLIGHT,
    _S.DRAINING: BlockState.QUARANTINED,
    _S.DONE: BlockState.FREE,
    _S.FAILED: BlockState.FREE,
}


class FetchTable:
    """All fetches that are not yet terminal. Not thread-safe."""

    def __init__(self, ledger: Ledger | None = None) -> None:
        self._ledger = ledger or Ledger()
        self._fetches: dict[str, Fetch] = {}
        self._by_request: dict[str, str] = {}
        self.ended: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._fetches)

    def __iter__(self) -> Iterator[Fetch]:
        return iter(list(self._fetches.values()))

    def add(self, fetch: Fetch) -> bool:
        """False, and nothing changed, when the request is being fetched already."""
        if fetch.request_id in self._by_request:
            return False
        assert fetch.fetch_id not in self._fetches
        self._fetches[fetch.fetch_id] = fetch
        self._by_request[fetch.request_id] = fetch.fetch_id
        return True

    def reserve(self, fetch: Fetch, written: Mapping[int, npt.NDArray[np.int32]]) -> None:
        """The blocks, by group, that the fetch will write. Raises `BlockInUseError`."""
        assert fetch.state is FetchState.CONNECTING
        fetch.holding = self._ledger.reserve(written)

    def feed(self, fetch: Fetch, event: Event, now: float, cause: str = "") -> list[Action]:
        """See `Fetch.on`; keeps the ledger too."""
        actions = fetch.on(event, now, cause)
        if fetch.holding is not None:
            fetch.holding.move(_HELD[fetch.state])
        return actions

    def get(self, fetch_id: str) -> Fetch | None:
        return self._fetches.get(fetch_id)

    def of_request(self, request_id: str) -> Fetch | None:
        return self._fetches.get(self._by_request.get(request_id, ""))

    def remove(self, fetch: Fetch) -> None:
        """Takes a terminal fetch out."""
        assert fetch.terminal
        self._fetches.pop(fetch.fetch_id, None)
        self._by_request.pop(fetch.request_id, None)
        self.ended[fetch.cause.split(":")[0] or "ok"] += 1

    def overdue(self, now: float) -> list[Fetch]:
        """Fetches past their deadline, draining ones included."""
        return [fetch for fetch in self._fetches.values() if now >= fetch.deadline]

    def counts(self) -> dict[str, int]:
        states = Counter(fetch.state.value for fetch in self._fetches.values())
        return {state.value: states[state.value] for state in FetchState if state not in TERMINAL}
