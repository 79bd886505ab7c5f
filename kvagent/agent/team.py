"""The leader's list of its engine's ranks: who is there, where, and which incarnation.

Followers say who they are once a second. One that has been silent for a while makes the engine
not ready. One that comes back as another incarnation (or whose sidecar is known to be dead) can
write nothing any more on behalf of the old one, and only then are its parts given up.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from kvagent.agent.identity import Identity
from kvagent.core.compare import EngineShape, differences, merge_shapes
from kvagent.core.layout import RankLayout
from kvagent.core.specs import CacheSpec, FullAttentionSpec, MambaSpec
from kvagent.core.topology import EngineTransferInfo
from kvagent.wire.control import Control
from kvagent.wire.messages import JoinLeader, Peer, RankCard, Refused, Welcome, Welcomed
from kvagent.wire.peer import PeerClient

log = logging.getLogger("kvagent.team")

SILENT_SECONDS = 5.0
MAX_PAST = 64


@dataclass(slots=True)
class Member:
    """A follower, as it last described itself."""

    index: int
    card: RankCard
    shape: EngineShape
    client: PeerClient
    last_seen: float
    lost: bool = False
    said_at: int = 0
    follows: bool = False
    """It takes parts of this leader only, and reads for no other."""


class Team:
    """`lost(index, why)` is called when a rank's old incarnation is known to be gone."""

    def __init__(self, control: Control, lost: Callable[[int, str], None]) -> None:
        self._control = control
        self._lost = lost
        self._members: dict[int, Member] = {}
        self._me: Identity | None = None
        self._refused: dict[int, str] = {}
        """Why a rank that wants to join may not."""
        self._generation = 0
        self._past: dict[int, deque[str]] = {}
        """By rank, incarnations that were replaced: what they say comes too late."""
        self._closing: list[PeerClient] = []
        self._was_complete = False
        self.changed: Callable[[], None] = lambda: None

    # ------------------------------------------------------------ who is there

    def set_leader(self, me: Identity | None) -> None:
        """This sidecar's own identity; None while it has no cache. Followers say hello again."""
        self._me = me
        for member in self._members.values():
            member.lost = True
            self._closing.append(member.client)
        self._members.clear()
        self._refused.clear()
        self._generation += 1
        self._notify()

    def join(self, message: JoinLeader, now: float) -> Peer:
        """A follower's sign of life."""
        me = self._me
        card = message.card
        if me is None:
            return Refused(code="not_ready", message="the leader has no cache yet")
        if message.engine_id != me.info.engine_id:
            return Refused(
                code="wrong_engine",
                message=f"this leads engine {me.info.engine_id!r}, not {message.engine_id!r}",
            )
        index = card.pp_rank * me.info.tp_size + card.tp_rank
        if not (card.tp_rank < me.info.tp_size and 0 < index < me.world_size):
            place = f"(tp {card.tp_rank}, pp {card.pp_rank})"
            return Refused(code="wrong_rank", message=f"rank {place} is not a follower here")
        problem = self._contradiction(me, card)
        if problem:
            self._refuse(index, problem)
            return Refused(code="contradiction", message=f"rank {index}: {problem}")
        found = tuple(differences(me.shape, message.shape, common=False))
        if found:
            text = f"rank {index} describes another cache than rank 0"
            self._refuse(index, "; ".join(map(str, found)))
            return Refused(code="mismatch", message=text, differences=found)
        card.layout.validate()
        self._refused.pop(index, None)
        known = self._members.get(index)
        if card.incarnation in self._past.get(index, ()):
            return Refused(code="past", message="another incarnation has taken that rank's place")
        if (
            known is not None
            and known.card.incarnation == card.incarnation
            and message.said_at <= known.said_at
        ):
            return Welcomed(leader=me.incarnation)  # sent again, or late
        follows = message.leader == me.incarnation and not (
            set(message.reading_for) - {me.incarnation}
        )
        if known is None and not message.attached:
            return Refused(code="detached", message="that rank's worker is gone")
        if known is None or known.card != card:
            if known is not None:
                self._closing.append(known.client)
                known.lost = True
            client = PeerClient(self._control, card.host, card.port)
            self._members[index] = Member(
                index, card, message.shape, client, now, said_at=message.said_at, follows=follows
            )
            self._generation += 1
            if known is not None and known.card.incarnation != card.incarnation:
                self._past.setdefault(index, deque(maxlen=MAX_PAST)).append(known.card.incarnation)
                self._lost(index, "restarted")
            log.info("rank %d is at %s", index, client)
            self._notify()
        else:
            known.last_seen, known.said_at, known.follows = now, message.said_at, follows
            self._notify_if_changed(now)
        return Welcomed(leader=me.incarnation)

    def _refuse(self, index: int, why: str) -> None:
        if self._refused.get(index) != why:
            self._refused[index] = why
            self._notify()

    def _contradiction(self, me: Identity, card: RankCard) -> str:
        """What a rank says of the engine that rank 0, or its own stage, says otherwise."""
        layout, info = card.layout, me.info
        place = (layout.tp_rank, layout.tp_size, layout.pp_rank, layout.pp_size)
        if place != (card.tp_rank, info.tp_size, card.pp_rank, info.pp_size):
            return (
                f"it joined as tp {layout.tp_rank}/{layout.tp_size}, pp {layout.pp_rank}/"
                f"{layout.pp_size}; rank 0 says tp size {info.tp_size}, pp size {info.pp_size}"
            )
        if card.mirrored != me.mirrored:
            return "kv_buffer is not what rank 0 has; all ranks must have the same"
        ours = {group.index: group for group in me.layout.groups}
        for group in layout.groups:
            leader = ours.get(group.index, group)
            for field in ("block_size", "num_blocks"):
                mine, theirs = getattr(leader, field), getattr(group, field)
                if mine != theirs:
                    return (
                        f"{field} of cache group {group.index} is {theirs}, rank 0 has {mine}; "
                        "all ranks share one block table"
                    )
        stage = [me.card(), *(member.card for member in self._members.values())]
        for other in stage:
            same = other.pp_rank == card.pp_rank and other.tp_rank != card.tp_rank
            differing = sorted(set(other.layout.layers) ^ set(layout.layers)) if same else []
            if differing:
                return f"its stage's ranks do not have the same layers: {', '.join(differing[:5])}"
        return ""

    def layouts(self) -> list[RankLayout]:
        """Of every rank that is there."""
        me = [] if self._me is None else [self._me.layout]
        return me + [member.card.layout for member in self._members.values()]

    def followers(self) -> list[Member]:
        return list(self._members.values())

    @property
    def complete(self) -> bool:
        return (
            self._me is not None
            and len(self._members) == self._me.world_size - 1
            and not self._busy()
        )

    def _busy(self) -> list[int]:
        return [member.index for member in self._members.values() if not member.follows]

    def missing(self) -> str:
        """Why `complete` is false, for people."""
        if self._me is None:
            return "rank 0 has no cache registered yet"
        absent = [i for i in range(1, self._me.world_size) if i not in self._members]
        if not absent:
            busy = self._busy()
            return f"ranks {busy} have not turned to this leader yet" if busy else ""
        refused = [
            f"rank {i} was refused: {self._refused[i]}" for i in absent if i in self._refused
        ]
        return "; ".join([f"waiting for ranks {absent} of {self._me.world_size}", *refused])

    def silent_text(self, now: float) -> str:
        """Names the silent followers for people; empty when there are none."""
        silent = self.silent(now)
        return f"ranks {silent} have been silent for {SILENT_SECONDS:g} s" if silent else ""

    def silent(self, now: float) -> list[int]:
        """Followers that have not been heard of for `SILENT_SECONDS`."""
        return [m.index for m in self._members.values() if now - m.last_seen > SILENT_SECONDS]

    # ------------------------------------------------------------ what others are told

    @property
    def epoch(self) -> str:
        """Changes whenever any rank of the engine is another incarnation."""
        me = self._me.incarnation[:16] if self._me else "none"
        return f"{me}.{self._generation}"

    def shape(self) -> EngineShape:
        """What the whole engine's cache means: all ranks' layers."""
        assert self._me is not None  # `complete` was asked
        return merge_shapes([self._me.shape, *(m.shape for m in self._members.values())])

    def welcome(self, lease_seconds: float) -> Welcome:
        """All there is to know about this engine, but no key to its memory."""
        me = self._me
        assert me is not None  # `complete` was asked
        cards = [me.card(), *(m.card for m in self._members.values())]
        cards.sort(key=lambda card: (card.pp_rank, card.tp_rank))
        return Welcome(
            epoch=self.epoch,
            info=transfer_info(me),
            ranks=tuple(cards),
            lease_seconds=lease_seconds,
        )

    # ------------------------------------------------------------ time

    def sweep(self, now: float) -> None:
        self._notify_if_changed(now)

    async def close_gone(self) -> None:
        """Closes the connections to incarnations that are no more."""
        closing, self._closing = self._closing, []
        for client in closing:
            await client.close()

    async def close(self) -> None:
        self._closing += [member.client for member in self._members.values()]
        self._members.clear()
        await self.close_gone()

    def _notify_if_changed(self, now: float) -> None:
        if self.complete != self._was_complete:
            self._notify()

    def _notify(self) -> None:
        self._was_complete = self.complete
        self.changed()


def transfer_info(me: Identity) -> EngineTransferInfo:
    """The classic summary of this engine, from its leader's layout."""
    layout = me.layout
    specs = [spec for spec in me.specs.values() if not isinstance(spec, MambaSpec)]
    attention = [spec for spec in specs if isinstance(spec, FullAttentionSpec)]
    family = layout.families[0]
    entries = math.prod(axis.extent for axis in family.axes if axis.name != "block")
    return EngineTransferInfo(
        remote_tp_size=me.info.tp_size,
        remote_block_len=entries * family.itemsize,
        remote_block_size=specs[0].block_size if specs else 1,
        remote_physical_blocks_per_logical=_kernel_blocks(specs[0]) if specs else 1,
        remote_pp_size=me.info.pp_size,
        remote_total_num_kv_heads=attention[0].num_kv_heads if attention else None,
    )


def _kernel_blocks(spec: CacheSpec) -> int:
    assert not isinstance(spec, MambaSpec)
    return spec.block_size // (spec.kernel_block_size or spec.block_size)
