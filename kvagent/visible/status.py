"""/status: what this sidecar is and does, as JSON; the metrics and the page are made of it.

No secret is in it: no token, no fetch or part id with which a transfer could be ended or kept, and
no address of memory. Tables that grow with the load are cut off, and say how much was left out.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Iterable
from importlib.metadata import version
from itertools import islice
from typing import TYPE_CHECKING, Any

import msgspec

from kvagent.config import join_address
from kvagent.core.compare import EngineShape
from kvagent.core.lease import LeaseState
from kvagent.core.regions import RankLayout
from kvagent.fabric.witness import UNKNOWN
from kvagent.wire.keys import fingerprint

if TYPE_CHECKING:
    from kvagent.agent.agent import Agent
    from kvagent.agent.peers import Session, Source

__all__ = ["cards", "status", "why_not_ready"]

FIRST_ADDRESS = 1 << 32
"""Where the first memory range of a rank is said to lie in /status."""
MAX_ROWS = 200
"""Of transfers, of leases, of peers, and of keys."""
VERSION = version("kvagent")


def status(agent: Agent) -> dict[str, Any]:
    """Everything but `cards`."""
    me, leader, rank, watch = agent.rank.identity, agent.leader, agent.rank, agent.watch
    now = time.monotonic()
    chaos = agent.control.chaos
    why = why_not_ready(agent)
    sessions = sorted(rank.peers.sessions(), key=lambda session: -session.last_used)
    return {
        "version": VERSION,
        "host": socket.gethostname(),
        "uptime_seconds": now - watch.started,
        "engine_id": me.info.engine_id if me else None,
        "model": me.info.model.name if me else None,
        "rank": me.index if me else None,
        "tp_rank": me.info.tp_rank if me else None,
        "pp_rank": me.info.pp_rank if me else None,
        "world_size": me.world_size if me else None,
        "role": ("leader" if me.index == 0 else "follower") if me else None,
        "endpoint": rank.endpoint,
        "ready": not why,
        "not_ready": why,
        "draining": leader.draining,
        "epoch": leader.team.epoch,
        "ranks": _ranks(agent, now),
        "silent_ranks": leader.team.silent(now),
        "quiesced": leader.quiesced,
        "ledger": leader.ledger.counts(),
        "leases": leader.leases.counts(),
        "leases_ended": dict(leader.leases.ended),
        "lent": _lent(agent, now),
        "fetches": leader.fetches.counts(),
        "fetches_ended": dict(leader.fetches.ended),
        "transfers": _transfers(agent, now),
        "failures": watch.failures.show(now),
        "throughput": watch.throughput.show(now),
        "unacknowledged_reports": len(leader.outbox),
        "parts_reading": rank.reading(),
        "in_flight_bytes": sum(max(0, p.total - p.done) for p in rank.counts.running()),
        "bytes_read": rank.bytes_read,
        "read_bytes_by_transport": dict(rank.counts.by_transport),
        "descriptors_read": rank.counts.descriptors,
        "bytes_received": leader.borrower.bytes_received,
        "fences": rank.fences,
        "handshakes": rank.peers.handshakes,
        "handshakes_refused": rank.peers.refusals,
        "keys": _keys(agent),
        "messages_rejected": agent.peers.rejected,
        "telemetry_errors": watch.errors,
        "chaos": dict(chaos.done) | {"messages": chaos.messages} if chaos is not None else None,
        "expected_transport": list(agent.config.expected_transport),
        "unexpected_transports": sum(
            rank.peers.unexpected(source.remote.carried)
            for session in sessions
            for source in session.open_sources()
        ),
        "failing_peers": watch.health.failing(now),
        "peers": [_peer(agent, session, now) for session in sessions[:MAX_ROWS]],
        "peers_open": len(sessions),
    }


def _keys(agent: Agent) -> dict[str, Any] | None:
    """Fingerprints of public keys, as they are in the names of the files."""
    if not agent.control.has_keys:
        return None
    ring = agent.control.ring
    allowed = sorted(map(fingerprint, ring.allowed))
    return {
        "own": fingerprint(ring.own.public),
        "allowed": allowed[:MAX_ROWS],
        "allowed_keys": len(allowed),
        "problems": list(ring.problems[:MAX_ROWS]),
    }


def _ranks(agent: Agent, now: float) -> list[dict[str, Any]]:
    """The engine's, as its leader knows them; a follower knows itself."""
    me = agent.rank.identity
    if me is None:
        return []
    rows = [
        {
            "rank": me.index,
            "tp_rank": me.info.tp_rank,
            "pp_rank": me.info.pp_rank,
            "address": agent.rank.endpoint,
            "seen_seconds_ago": 0.0,
            "state": "here",
        }
    ]
    if me.index:
        return rows
    members = {member.index: member for member in agent.leader.team.followers()}
    silent = agent.leader.team.silent(now)
    for index in range(1, me.world_size):
        member = members.get(index)
        state = "silent" if index in silent else "here"
        rows.append(
            {
                "rank": index,
                "tp_rank": index % me.info.tp_size,
                "pp_rank": index // me.info.tp_size,
                "address": join_address(member.card.host, member.card.port) if member else "",
                "seen_seconds_ago": now - member.last_seen if member else None,
                "state": state if member else "missing",
            }
        )
    return rows


def _transfers(agent: Agent, now: float) -> list[dict[str, Any]]:
    """A leader's fetches; a follower's shares of fetches, whose requests it does not know."""
    me = agent.rank.identity
    if me is not None and me.index:
        return [
            _transfer("", "", each.peer, each.address, "reading", now - each.started, each)
            for each in islice(agent.rank.counts.running(), MAX_ROWS)
        ]
    return [
        _transfer(
            record.request_id,
            record.transfer_id,
            record.peer,
            join_address(message.host, message.port),
            record.state.value,
            now - record.started,
            own,
        )
        | {"cause": record.cause, "seconds_left": record.deadline - now}
        for record, message, own in agent.leader.borrower.transfers(MAX_ROWS)
    ]


def _transfer(
    request_id: str,
    transfer_id: str,
    peer: str,
    address: str,
    state: str,
    seconds: float,
    own: Any,
) -> dict[str, Any]:
    """`bytes` of `wanted_bytes` are there: of this sidecar's own rank."""
    return {
        "request_id": request_id,
        "transfer_id": transfer_id,
        "peer": peer,
        "address": address,
        "state": state,
        "seconds": seconds,
        "bytes": min(own.done, own.total),
        "wanted_bytes": own.total,
    }


def _lent(agent: Agent, now: float) -> list[dict[str, Any]]:
    return [
        {
            "request_id": lease.request_id,
            "transfer_id": lease.transfer_id,
            "state": lease.state.value,
            "consumer": lease.consumer if lease.state is LeaseState.CLAIMED else "",
            "expires_in_seconds": lease.expires_at - now,
        }
        for lease in islice(agent.leader.leases.live(), MAX_ROWS)
    ]


def _peer(agent: Agent, session: Session, now: float) -> dict[str, Any]:
    ranks = [_source(agent, source) for source in session.open_sources()]
    transports = sorted({rank["transport"] for rank in ranks}) or [UNKNOWN]
    return {
        "engine_id": session.engine_id,
        "address": str(session.client),
        "epoch": session.epoch,
        "idle_seconds": now - session.last_used,
        "transport": "+".join(transports),
        "unexpected": any(rank["unexpected"] for rank in ranks),
        "ranks": ranks,
    }


def _source(agent: Agent, source: Source) -> dict[str, Any]:
    carried = source.remote.carried
    return {
        "rank": f"tp {source.card.tp_rank}, pp {source.card.pp_rank}",
        "address": join_address(source.card.host, source.card.port),
        "transport": carried.transport if carried else UNKNOWN,
        "unexpected": agent.rank.peers.unexpected(carried),
        "why": carried.why if carried else "nothing was read yet, or the fabric does not say",
        "measured_bytes": carried.nbytes if carried else 0,
        "bytes_per_second": carried.rate if carried else 0.0,
    }


def cards(agent: Agent) -> list[dict[str, Any]] | None:
    """Each rank's shape and layout, for `kvagent plan`; None unless this leads a complete engine.

    Geometry only. Nothing in it opens the memory, and the addresses are made up: /status has
    readers that need not learn where in a process its cache lies.
    """
    me, team = agent.rank.identity, agent.leader.team
    if me is None or me.index != 0 or not team.complete:
        return None
    ranks: Iterable[tuple[EngineShape, RankLayout]] = [
        (me.shape, me.layout),
        *((m.shape, m.card.layout) for m in team.followers()),
    ]
    return [_card(shape, layout) for shape, layout in ranks]


def _card(shape: EngineShape, layout: RankLayout) -> dict[str, Any]:
    ranges, address = [], FIRST_ADDRESS
    for memory in layout.ranges:
        ranges.append(msgspec.structs.replace(memory, address=address))
        # A gap, so that nothing seems to be contiguous across ranges.
        address += (memory.nbytes // FIRST_ADDRESS + 2) * FIRST_ADDRESS
    shown = msgspec.structs.replace(layout, ranges=tuple(ranges))
    card: dict[str, Any] = msgspec.to_builtins({"shape": shape, "layout": shown})
    return card


def why_not_ready(agent: Agent) -> str:
    """Empty when this sidecar can take work."""
    me = agent.rank.identity
    if me is None:
        return "no engine has registered a cache"
    if agent.leader.draining:
        return "draining"
    if agent.leader.quiesced:
        return "quiesced until the engine calls resume()"
    if agent.rank.fabric is not None and agent.rank.fabric.trouble:
        return f"nothing can be read: {agent.rank.fabric.trouble}"
    if me.index:
        joined = agent.follower is not None and agent.follower.joined
        return "" if joined else "the leader does not answer"
    now, team = time.monotonic(), agent.leader.team
    connected = [session.engine_id for session in agent.rank.peers.sessions()]
    return (
        team.missing() or team.silent_text(now) or agent.watch.health.why_all_fail(now, connected)
    )
