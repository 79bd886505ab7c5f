"""What a finished read was: bytes, descriptors and where its time went."""

from __future__ import annotations

import msgspec


class ReadStats(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One rank's share of one fetch. `nbytes` are those that were wanted, `staged` those that were
    read into the staging buffer for some of them. Seconds; `wait` is the handshake and the queue
    before the first post, `post` the time inside NIXL's post call, `wire` from first post to last
    byte in its place."""

    nbytes: int = 0
    descriptors: int = 0
    staged: int = 0
    wait: float = 0.0
    post: float = 0.0
    wire: float = 0.0

    def merge(self, other: ReadStats) -> ReadStats:
        """Both ranks' shares as one: bytes add up, times are the slower rank's."""
        return ReadStats(
            nbytes=self.nbytes + other.nbytes,
            descriptors=self.descriptors + other.descriptors,
            staged=self.staged + other.staged,
            wait=max(self.wait, other.wait),
            post=max(self.post, other.post),
            wire=max(self.wire, other.wire),
        )


class FetchStats(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A whole fetch, all ranks. `seconds` is from the scheduler's message to the verdict."""

    bytes: int
    descriptors: int
    staged: int
    seconds: float
    wait: float
    post: float
    wire: float
    validate: float
