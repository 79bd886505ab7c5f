"""The figures of /metrics: each made of /status when it is scraped, with its unit and its scope.

A counter by cause has every cause from the start, at 0: a series that begins with its first event
hides that event from Prometheus' rate().

Scope `engine`: the whole engine, counted at its leader (followers show zeros); `rank`: this
sidecar's own rank. Label values come from fixed sets, but for the ids of at most `MAX_PEERS` peers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from kvagent.agent.causes import CAUSES
from kvagent.core.lease import LeaseState

__all__ = ["FIGURES", "MAX_PEERS", "Figure", "Scope", "Status", "Values"]

MAX_PEERS = 64

Status = Mapping[str, Any]
"""What /status says."""
Scope = Literal["rank", "engine"]
Values = Mapping[tuple[str, ...], float]


class Figure(NamedTuple):
    """One number, or one for each label, made of /status."""

    name: str
    kind: Literal["gauge", "counter"]
    scope: Scope
    text: str
    values: Callable[[Status], Values]
    labels: tuple[str, ...] = ()


def _one(field: str) -> Callable[[Status], Values]:
    return lambda status: {(): float(status[field] or 0)}


def _each(field: str, *names: str) -> Callable[[Status], Values]:
    """A table of /status by its keys; only those in `names`, when there are any."""
    return lambda status: {
        (key,): value for key, value in status[field].items() if not names or key in names
    }


_OPEN = (LeaseState.OFFERED, LeaseState.CLAIMED)
_IDENTITY = ("version", "engine_id", "rank", "role")


def _text(value: object) -> str:
    return "" if value is None else str(value)


def _causes(status: Status) -> Values:
    """A peer's answer can be the beginning of a cause: what is not ours is `protocol`."""
    found: dict[tuple[str, ...], float] = {(cause,): 0 for cause in ("ok", *sorted(CAUSES))}
    for cause, count in status["fetches_ended"].items():
        found[(cause,) if (cause,) in found else ("protocol",)] += count
    return found


def _lease_ends(status: Status) -> Values:
    ended = status["leases_ended"]
    return {(state.value,): ended.get(state.value, 0) for state in LeaseState if state not in _OPEN}


def _shown(status: Status) -> Sequence[Status]:
    peers: Sequence[Status] = status["peers"]
    return peers[:MAX_PEERS]


def _peer_ranks(status: Status) -> Values:
    found: dict[tuple[str, ...], float] = {}
    for peer in _shown(status):
        for rank in peer["ranks"]:
            key = (peer["engine_id"], rank["transport"])
            found[key] = found.get(key, 0) + 1
    return found


def _peer_rates(status: Status) -> Values:
    found: dict[tuple[str, ...], float] = {}
    for peer in _shown(status):
        for rank in peer["ranks"]:
            if rank["bytes_per_second"]:
                key = (peer["engine_id"], rank["transport"])
                found[key] = min(found.get(key, math.inf), rank["bytes_per_second"])
    return found


FIGURES = (
    Figure(
        "kvagent_ready",
        "gauge",
        "rank",
        "1 when this sidecar takes work, else 0",
        _one("ready"),
    ),
    Figure(
        "kvagent_info",
        "gauge",
        "rank",
        "1; its labels say who this sidecar is",
        lambda status: {tuple(_text(status[key]) for key in _IDENTITY): 1},
        ("version", "engine", "rank", "role"),
    ),
    Figure(
        "kvagent_uptime_seconds",
        "gauge",
        "rank",
        "seconds since the sidecar started",
        _one("uptime_seconds"),
    ),
    Figure(
        "kvagent_fetches",
        "gauge",
        "engine",
        "fetches under way (consumer's side)",
        _each("fetches"),
        ("state",),
    ),
    Figure(
        "kvagent_fetches_ended",
        "counter",
        "engine",
        "fetches that ended; the good ones are `ok`",
        _causes,
        ("cause",),
    ),
    Figure(
        "kvagent_received_bytes",
        "counter",
        "engine",
        "bytes of good fetches, all ranks",
        _one("bytes_received"),
    ),
    Figure(
        "kvagent_leases",
        "gauge",
        "engine",
        "leases (producer's side); `parked`: claims that wait for their offer; `tombstones`: "
        "ended ones that are remembered",
        _each("leases", "offered", "claimed", "parked", "tombstones"),
        ("state",),
    ),
    Figure(
        "kvagent_leases_ended",
        "counter",
        "engine",
        "leases that ended; a rising `expired` means that blocks are held for nothing",
        _lease_ends,
        ("how",),
    ),
    Figure(
        "kvagent_blocks",
        "gauge",
        "engine",
        "blocks of the cache, each in one state; `quarantined`: its fetch failed, and a read may "
        "still write into it",
        _each("ledger"),
        ("state",),
    ),
    Figure(
        "kvagent_unacknowledged_reports",
        "gauge",
        "engine",
        "ends of requests that the scheduler's step() has not taken yet",
        _one("unacknowledged_reports"),
    ),
    Figure(
        "kvagent_silent_ranks",
        "gauge",
        "engine",
        "ranks that do not answer the leader",
        lambda status: {(): len(status["silent_ranks"])},
    ),
    Figure(
        "kvagent_failing_peers",
        "gauge",
        "engine",
        "engines that could not be read from at the last attempts",
        lambda status: {(): len(status["failing_peers"])},
    ),
    Figure(
        "kvagent_parts_reading",
        "gauge",
        "rank",
        "shares of fetches that are being read",
        _one("parts_reading"),
    ),
    Figure(
        "kvagent_in_flight_bytes",
        "gauge",
        "rank",
        "bytes of those shares that have not arrived yet",
        _one("in_flight_bytes"),
    ),
    Figure(
        "kvagent_read_bytes",
        "counter",
        "rank",
        "bytes read, by the transport that carried them",
        _each("read_bytes_by_transport"),
        ("transport",),
    ),
    Figure(
        "kvagent_read_descriptors",
        "counter",
        "rank",
        "descriptors read",
        _one("descriptors_read"),
    ),
    Figure(
        "kvagent_fences",
        "counter",
        "rank",
        "hung reads that were ended by destroying the agent that made them",
        _one("fences"),
    ),
    Figure(
        "kvagent_peers",
        "gauge",
        "rank",
        "engines with an open session",
        lambda status: {(): len(status["peers"])},
    ),
    Figure(
        "kvagent_peer_ranks",
        "gauge",
        "rank",
        f"ranks of a peer that are read from, by transport; the {MAX_PEERS} peers used last",
        _peer_ranks,
        ("peer", "transport"),
    ),
    Figure(
        "kvagent_peer_bytes_per_second",
        "gauge",
        "rank",
        "bytes per second of the first transfer from a peer, its slowest rank; the "
        f"{MAX_PEERS} peers used last",
        _peer_rates,
        ("peer", "transport"),
    ),
    Figure(
        "kvagent_unexpected_transports",
        "gauge",
        "rank",
        "ranks of peers that are read over another transport than `expected_transport`",
        _one("unexpected_transports"),
    ),
    Figure("kvagent_handshakes", "counter", "rank", "handshakes begun", _one("handshakes")),
    Figure(
        "kvagent_handshakes_refused",
        "counter",
        "rank",
        "handshakes that a peer, or this sidecar, refused",
        _one("handshakes_refused"),
    ),
    Figure(
        "kvagent_keys_allowed",
        "gauge",
        "rank",
        "public keys in the `allowed` folder; with 0 nobody can connect. Only with `keys`",
        lambda status: {(): status["keys"]["allowed_keys"]} if status["keys"] else {},
    ),
    Figure(
        "kvagent_messages_rejected",
        "counter",
        "rank",
        "messages on the control socket that were not ours",
        _one("messages_rejected"),
    ),
    Figure(
        "kvagent_telemetry_errors",
        "counter",
        "rank",
        "errors of telemetry itself; they fail no transfer",
        _one("telemetry_errors"),
    ),
)
