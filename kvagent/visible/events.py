"""What the agent tells `Watch`."""

from __future__ import annotations

from dataclasses import dataclass

from kvagent.core.stats import FetchStats

__all__ = ["FetchEnd"]


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchEnd:
    """One fetch, at its end. `cause` is `name: text`, the first thing that went wrong, and empty
    when nothing did; `stage` and `rank` are where that was (`rank` None: not in one rank's read;
    `stage` "quiesced": this engine was, and the fetch had not begun).
    `nbytes` have arrived, of `wanted` (0: it was not known yet) at this sidecar's own rank."""

    request_id: str
    transfer_id: str
    fetch_id: str
    peer: str
    address: str
    num_tokens: int
    seconds: float
    cause: str = ""
    stage: str = ""
    rank: int | None = None
    nbytes: int = 0
    wanted: int = 0
    stats: FetchStats | None = None
    """When it is good."""
    traceparent: str = ""

    @property
    def name(self) -> str:
        """The cause's short name, "ok" for a good fetch."""
        return self.cause.split(":")[0] or "ok"
