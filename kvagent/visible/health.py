"""Whether every engine that we fetch from fails us. Pure: `now` comes from the caller, in seconds.

A sidecar that can reach no peer should get no more work, and must not stay out for ever: without
work it would never find out that a peer is back. So a peer's failures are forgotten some time after
the last of them, and the next fetch is the test.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass

__all__ = ["UNREACHABLE", "PeerHealth"]

UNREACHABLE = frozenset({"peer_gone", "handshake", "transport", "timed_out"})
"""Causes that speak of the way to a peer, or of a peer that hangs. After any other one the peer has
answered."""
IN_A_ROW = 3
FORGET_SECONDS = 30.0
MAX_PEERS = 256


@dataclass(slots=True)
class _Record:
    failed: int = 0
    cause: str = ""
    at: float = 0.0


class PeerHealth:
    """A peer fails when its last `IN_A_ROW` fetches did, the last one not long ago."""

    def __init__(self) -> None:
        self._peers: OrderedDict[str, _Record] = OrderedDict()

    def ended(self, now: float, peer: str, cause: str) -> None:
        """A fetch from `peer` that had begun ended; `cause` is a name, "ok" for a good one."""
        record = self._peers.pop(peer, None) or _Record()
        if cause in UNREACHABLE:
            record.failed += 1
            record.cause = cause
        elif cause == "ok":
            record.failed = 0
        record.at = now
        self._peers[peer] = record
        if len(self._peers) > MAX_PEERS:
            self._peers.popitem(last=False)

    def failing(self, now: float) -> dict[str, str]:
        """The peers that fail, with the last cause of each."""
        return {
            peer: record.cause for peer, record in self._recent(now) if record.failed >= IN_A_ROW
        }

    def why_all_fail(self, now: float, connected: Iterable[str]) -> str:
        """For people; empty unless there are peers and each of them fails. `connected`: engines
        with an open session, which are peers even when nothing was fetched from them lately."""
        failing = self.failing(now)
        peers = {peer for peer, _ in self._recent(now)} | set(connected)
        if not failing or peers - failing.keys():
            return ""
        names = [f"{peer} ({cause})" for peer, cause in sorted(failing.items())]
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        return (
            f"the last {IN_A_ROW} or more fetches from every peer failed: "
            f"{', '.join(names[:3])}{more}"
        )

    def _recent(self, now: float) -> list[tuple[str, _Record]]:
        return [
            (peer, record)
            for peer, record in self._peers.items()
            if now - record.at < FORGET_SECONDS
        ]
