"""HTTP beside the sidecar: /metrics, /healthz, /readyz and /status."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import msgspec
import uvicorn
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from kvagent.core.compare import EngineShape
from kvagent.core.regions import RankLayout
from kvagent.errors import ConfigError

if TYPE_CHECKING:
    from kvagent.agent.agent import Agent

FIRST_ADDRESS = 1 << 32
"""Where the first memory range of a rank is said to lie in /status."""


def status(agent: Agent) -> dict[str, Any]:
    """What /status says; also what the metrics are made of."""
    me, leader, rank = agent.rank.identity, agent.leader, agent.rank
    now = time.monotonic()
    chaos = agent.control.chaos
    return {
        "engine_id": me.info.engine_id if me else None,
        "rank": me.index if me else None,
        "world_size": me.world_size if me else None,
        "role": ("leader" if me.index == 0 else "follower") if me else None,
        "endpoint": rank.endpoint,
        "ready": not why_not_ready(agent),
        "not_ready": why_not_ready(agent),
        "draining": leader.draining,
        "epoch": leader.team.epoch,
        "silent_ranks": leader.team.silent(now),
        "quiesced": leader.quiesced,
        "ledger": leader.ledger.counts(),
        "leases": leader.leases.counts(),
        "leases_ended": dict(leader.leases.ended),
        "fetches": leader.fetches.counts(),
        "fetches_ended": dict(leader.fetches.ended),
        "unacknowledged_reports": len(leader.outbox),
        "parts_reading": rank.reading(),
        "bytes_read": rank.bytes_read,
        "bytes_received": leader.borrower.bytes_received,
        "handshakes": rank.peers.handshakes,
        "handshakes_refused": rank.peers.refusals,
        "messages_rejected": agent.peers.rejected,
        "chaos": dict(chaos.done) | {"messages": chaos.messages} if chaos is not None else None,
        "peers": [
            {"engine_id": s.engine_id, "address": str(s.client), "epoch": s.epoch}
            for s in rank.peers.sessions()
        ],
    }


def cards(agent: Agent) -> list[dict[str, Any]] | None:
    """Each rank's shape and layout, for `kvagent plan`; None unless this leads a complete engine.

    Geometry only. Nothing in it opens the memory, and the addresses are made up: /status has
    readers that need not learn where in a process its cache lies.
    """
    me, team = agent.rank.identity, agent.leader.team
    if me is None or me.index != 0 or not team.complete:
        return None
    ranks = [(me.shape, me.layout), *((m.shape, m.card.layout) for m in team.followers())]
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
    if me.index == 0:
        return agent.leader.team.missing() or agent.leader.team.silent_text(time.monotonic())
    joined = agent.follower is not None and agent.follower.joined
    return "" if joined else "the leader does not answer"


class _Metrics:
    """Reads the counters when it is scraped, on the agent's loop."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent

    def collect(self) -> Iterator[Metric]:
        values = status(self._agent)
        yield _gauge("kvagent_ready", "1 when this sidecar can take work", values["ready"])
        yield _labelled(
            GaugeMetricFamily(
                "kvagent_leases", "Leases of this engine, by state", labels=["state"]
            ),
            {k: values["leases"][k] for k in ("offered", "claimed", "parked", "tombstones")},
        )
        yield _labelled(
            CounterMetricFamily(
                "kvagent_leases_ended", "Leases that ended, by how", labels=["how"]
            ),
            values["leases_ended"],
        )
        yield _labelled(
            GaugeMetricFamily("kvagent_fetches", "Fetches under way, by state", labels=["state"]),
            values["fetches"],
        )
        yield _labelled(
            GaugeMetricFamily(
                "kvagent_blocks", "Blocks of this engine's cache, by state", labels=["state"]
            ),
            values["ledger"],
        )
        yield _labelled(
            CounterMetricFamily("kvagent_fetches_ended", "Fetches that ended", labels=["cause"]),
            values["fetches_ended"],
        )
        yield _counter("kvagent_read_bytes", "Bytes read by this rank", values["bytes_read"])
        yield _counter("kvagent_handshakes", "Handshakes begun", values["handshakes"])
        yield _counter(
            "kvagent_handshakes_refused", "Handshakes refused", values["handshakes_refused"]
        )
        yield _counter(
            "kvagent_messages_rejected",
            "Messages on the control socket that were not ours",
            values["messages_rejected"],
        )
        yield _gauge("kvagent_peers", "Engines with an open session", len(values["peers"]))


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(name, text, value=float(value))


def _counter(name: str, text: str, value: float) -> Metric:
    return CounterMetricFamily(name, text, value=float(value))


def _labelled(
    family: GaugeMetricFamily | CounterMetricFamily, values: dict[str, int]
) -> GaugeMetricFamily | CounterMetricFamily:
    for label, value in values.items():
        family.add_metric([label], value)
    return family


def app(agent: Agent) -> Starlette:
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Metrics(agent))

    async def metrics(_: Request) -> Response:
        return Response(generate_latest(registry), media_type="text/plain; version=0.0.4")

    async def healthz(_: Request) -> Response:
        return PlainTextResponse("ok\n")

    async def readyz(_: Request) -> Response:
        why = why_not_ready(agent)
        return PlainTextResponse(f"{why or 'ok'}\n", status_code=503 if why else 200)

    async def show(_: Request) -> Response:
        return JSONResponse(status(agent) | {"cards": cards(agent)})

    return Starlette(
        routes=[
            Route("/metrics", metrics),
            Route("/healthz", healthz),
            Route("/readyz", readyz),
            Route("/status", show),
        ]
    )


class _Uvicorn(uvicorn.Server):
    """Signals are the agent's business."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class Server:
    def __init__(self, server: _Uvicorn, task: asyncio.Task[None]) -> None:
        self._server = server
        self._task = task

    async def close(self) -> None:
        self._server.should_exit = True
        await asyncio.gather(self._task, return_exceptions=True)


async def serve(agent: Agent) -> Server:
    """Binds the configured address now, and serves until `close`."""
    address = agent.config.http_address()
    assert address is not None
    config = uvicorn.Config(
        app(agent),
        host=address[0],
        port=address[1],
        log_config=None,
        access_log=False,
        lifespan="off",
        timeout_graceful_shutdown=1,
    )
    try:
        sock = config.bind_socket()
    except (OSError, SystemExit) as error:
        raise ConfigError(
            f"cannot bind http {agent.config.http}; free the port or give another --http"
        ) from error
    server = _Uvicorn(config)
    return Server(server, asyncio.create_task(server.serve(sockets=[sock])))
