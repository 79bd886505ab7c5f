"""The short names under which failures are counted and reported.

A cause is `name: text`. The name is one of a fixed set, so that it can be a metric's label; the
text is for people: it speaks of engines, ranks and addresses, not of what the fabric calls them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TypeVar

from kvagent.config import join_address
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
from kvagent.wire.messages import RankCard

F = TypeVar("F", bound=FabricError)

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
    | {verdict.value for verdict in Verdict if verdict not in (Verdict.HELD, Verdict.COMING)}
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


def of_ranks(error: F, engine_id: str, cards: Sequence[RankCard]) -> F:
    """The same error, with ranks and addresses in place of the names of the fabric's agents.
    `cards` are the ranks that it may be about; a single one is named in any case."""
    text = str(error)
    for card in cards:
        place, where = f"{card.pp_rank}.{card.tp_rank}", rank_name(engine_id, card)
        agent = rf"{re.escape(engine_id)}/{re.escape(place)}/[0-9a-f]{{32}}(?:/\w+)?"
        text = re.sub(agent, lambda _, where=where: where, text)  # type: ignore[misc]
    if len(cards) == 1 and rank_name(engine_id, cards[0]) not in text:
        text = f"{rank_name(engine_id, cards[0])}: {text}"
    return type(error)(text)


def rank_name(engine_id: str, card: RankCard) -> str:
    """For people."""
    rank = f"rank (tp {card.tp_rank}, pp {card.pp_rank})"
    return f"{rank} of engine {engine_id} at {join_address(card.host, card.port)}"


def ago(seconds: float | None) -> str:
    """When a peer was last heard of; None: never."""
    return "never answered" if seconds is None else f"answered {seconds:.1f} s ago"
