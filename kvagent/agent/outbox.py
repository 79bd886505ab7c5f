"""Reports for the scheduler, kept until it has acknowledged them.

What ends within one turn of the event loop goes out as one report. A scheduler that comes back
gets everything again that its predecessor did not acknowledge.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Callable

from kvagent.core.output import KVConnectorOutput
from kvagent.core.stats import FetchStats
from kvagent.wire.messages import Report

Send = Callable[[Report], None]


class Outbox:
    def __init__(self) -> None:
        self._seq = 0
        self._kept: deque[Report] = deque()
        self._next = KVConnectorOutput()
        self._offers: Counter[str] = Counter()
        self._scheduled = False
        self._send: Send | None = None

    def __len__(self) -> int:
        """Reports that nobody has acknowledged."""
        return len(self._kept)

    def attach(self, send: Send) -> None:
        """`send` is the new scheduler; it gets what its predecessor did not acknowledge."""
        self._send = send
        for report in self._kept:
            send(report)

    def detach(self) -> None:
        self._send = None

    def clear(self) -> None:
        """The engine started afresh: nothing of the old one concerns it."""
        self._kept.clear()
        self._next = KVConnectorOutput()
        self._offers.clear()

    def sent(self, requests: set[str], ended: Counter[str]) -> None:
        """The blocks of these requests may be reused by the producer's engine, unless it has made
        more offers of them than have `ended`."""
        self._offers += ended
        if ended:
            self._schedule_late()
        if requests:
            self._next.finished_sending = (self._next.finished_sending or set()) | requests

    def received(
        self, request_id: str, cause: str, stats: FetchStats | None, blocks: set[int]
    ) -> None:
        """A fetch ended: `cause` is "" when it is good; `blocks` must not be used otherwise."""
        self._next.finished_recving = (self._next.finished_recving or set()) | {request_id}
        if cause:
            self._next.failed_recving[request_id] = cause
            self._next.invalid_block_ids |= blocks
        if stats is not None:
            known = self._next.kv_connector_stats or {"fetches": {}}
            known["fetches"][request_id] = stats
            self._next.kv_connector_stats = known
        self._schedule()

    def acknowledge(self, seq: int) -> None:
        while self._kept and self._kept[0].seq <= seq:
            self._kept.popleft()

    def flush(self) -> None:
        self._scheduled = False
        if self._next.is_empty() and not self._offers:
            return
        self._seq += 1
        report = Report(seq=self._seq, output=self._next, offers=dict(self._offers))
        self._next, self._offers = KVConnectorOutput(), Counter()
        self._kept.append(report)
        if self._send is not None:
            self._send(report)

    def _schedule(self) -> None:
        if not self._scheduled:
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self.flush)

    def _schedule_late(self) -> None:
        """After what was sent meanwhile: the consumer waits for its answer, nobody for blocks."""
        if not self._scheduled:
            self._scheduled = True
            loop = asyncio.get_running_loop()
            loop.call_soon(loop.call_soon, self.flush)
