"""Where the agent says what happened. Whatever goes wrong in here, a transfer does not notice."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from kvagent.visible.events import FetchEnd
from kvagent.visible.health import PeerHealth
from kvagent.visible.history import Failures, Throughput
from kvagent.visible.logs import log_end
from kvagent.visible.metrics import Histograms
from kvagent.visible.spans import trace_end

__all__ = ["Watch"]

log = logging.getLogger("kvagent.visible")


class Watch:
    """One per agent."""

    def __init__(self) -> None:
        now = time.monotonic()
        self.started = now
        self.errors = 0
        """Of telemetry itself."""
        self.health = PeerHealth()
        self.failures = Failures()
        self.throughput = Throughput(now)
        self.histograms = Histograms()
        self.listeners: list[Callable[[FetchEnd], None]] = [
            log_end,
            self._note_health,
            lambda end: self.failures.add(time.monotonic(), end),
            self.histograms.observe,
            trace_end,
        ]

    def _note_health(self, end: FetchEnd) -> None:
        if end.stage != "quiesced":  # the peer was not even asked
            self.health.ended(time.monotonic(), end.peer, end.name)

    def fetch_ended(self, end: FetchEnd) -> None:
        """Each listener is told, whatever the others do."""
        for listener in self.listeners:
            try:
                listener(end)
            except Exception:
                self.errors += 1
                log.exception("telemetry of fetch %s failed", end.fetch_id)

    def sample(self, *, read: int, lent: int, good: int, failed: int) -> None:
        """See `Throughput.sample`; from the agent's clock."""
        self.throughput.sample(time.monotonic(), read=read, lent=lent, good=good, failed=failed)
