"""The short names under which failures are counted and reported.

A cause is `name: text`. The name is one of a fixed set, so that it can be a metric's label; the
text is for people.
"""

from __future__ import annotations

from kvagent.core.lease import Verdict
from kvagent.errors import (
    BlockInUseError,
    BlockRangeError,
    FabricError,
    GeometryError,
    HandshakeError,
    KVAgentError,
    PeerGoneError,
    ProtocolError,
)
from kvagent.fabric.base import ReadCancelled

_NAMES: tuple[tuple[type[KVAgentError], str], ...] = (
    (ReadCancelled, "cancelled"),
    (PeerGoneError, "peer_gone"),
    (FabricError, "transport"),
    (BlockRangeError, "block_range"),
    (BlockInUseError, "block_in_use"),
    (GeometryError, "geometry"),
    (HandshakeError, "handshake"),
    (ProtocolError, "protocol"),
)

CAUSES = frozenset(
    {name for _, name in _NAMES}
    | {verdict.value for verdict in Verdict if verdict is not Verdict.HELD}
    | {
        "draining",
        "failed",
        "internal",
        "not_ready",
        "peer_dropped",
        "peer_restarted",
        "rank_lost",
        "rank_silent",
        "reset",
        "timed_out",
    }
)


def cause_text(error: KVAgentError) -> str:
    """`name: text` of an error."""
    for kind, name in _NAMES:
        if isinstance(error, kind):
            return f"{name}: {error}"
    return f"failed: {error}"
