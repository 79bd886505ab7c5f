"""A running engine as the planner sees it, from its leader's /status."""

from __future__ import annotations

from typing import Any

import httpx
import msgspec

from kvagent.core.compare import EngineShape, merge_shapes
from kvagent.core.regions import RankLayout
from kvagent.errors import ConfigError, GeometryError
from kvagent.planner.describe import Engine

__all__ = ["engine_of_status", "fetch_status"]

TIMEOUT_SECONDS = 10.0


class _Card(msgspec.Struct, frozen=True, kw_only=True):
    shape: EngineShape
    layout: RankLayout


class _Geometry(msgspec.Struct, frozen=True, kw_only=True):
    """The part of /status that is read here."""

    engine_id: str
    cards: tuple[_Card, ...]


def fetch_status(url: str) -> Engine:
    """Ask the sidecar at `url`, with or without /status at the end. Raises `ConfigError`."""
    full = url.rstrip("/")
    full = full if full.endswith("/status") else f"{full}/status"
    try:
        answer = httpx.get(full, timeout=TIMEOUT_SECONDS)
        answer.raise_for_status()
        status = answer.json()
    except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
        raise ConfigError(f"cannot read {full}: {error}") from error
    return engine_of_status(status, full)


def engine_of_status(status: Any, url: str) -> Engine:
    """The engine that a leader's status shows; `url` is for messages."""
    if not isinstance(status, dict) or "cards" not in status:
        raise ConfigError(f"{url} is not the status of a sidecar")
    if status["cards"] is None:
        if status.get("role") == "follower":
            why = f"rank {status.get('rank')} is a follower; ask the leader, rank 0"
        else:
            why = f"not ready: {status.get('not_ready')}"
        raise ConfigError(f"{url} shows no cache: {why}")
    try:
        found = msgspec.convert(status, _Geometry)
        layouts = sorted(
            (card.layout for card in found.cards),
            key=lambda layout: (layout.pp_rank, layout.tp_rank),
        )
        for layout in layouts:
            layout.validate()
        shape = merge_shapes(card.shape for card in found.cards)
    except (msgspec.ValidationError, GeometryError) as error:
        raise ConfigError(f"{url}: {error}") from error
    return Engine(found.engine_id, shape, tuple(layouts))
