"""HTTP beside the sidecar: /metrics, /healthz, /readyz, /status, and / for people.

What they say is made in `kvagent.visible`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Iterator
from typing import TYPE_CHECKING

import uvicorn
from prometheus_client import generate_latest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route
from uvicorn.protocols.http.h11_impl import H11Protocol

from kvagent.config import join_address
from kvagent.errors import ConfigError
from kvagent.visible.metrics import make_registry
from kvagent.visible.page import page, page_headers
from kvagent.visible.status import cards, status, why_not_ready

if TYPE_CHECKING:
    from kvagent.agent.agent import Agent

log = logging.getLogger("kvagent.http")

MAX_CONNECTIONS = 256
"""At once; more are closed."""
ANSWER_SECONDS = 10.0
"""Idle connections, between an answer and the next request, are closed by uvicorn after 5."""
NOT_CACHED = {"cache-control": "no-store", "x-content-type-options": "nosniff"}


def app(agent: Agent) -> Starlette:
    def failed() -> None:
        agent.watch.errors += 1

    registry = make_registry(agent.watch.histograms, lambda: status(agent), failed)

    async def metrics(_: Request) -> Response:
        return Response(generate_latest(registry), media_type="text/plain; version=0.0.4")

    async def healthz(_: Request) -> Response:
        return PlainTextResponse("ok\n")

    async def readyz(_: Request) -> Response:
        why = why_not_ready(agent)
        return PlainTextResponse(f"{why or 'ok'}\n", status_code=503 if why else 200)

    async def show(request: Request) -> Response:
        shown = status(agent)
        if request.query_params.get("cards") != "0":  # they are large, and rarely change
            shown["cards"] = cards(agent)
        return JSONResponse(shown, headers=NOT_CACHED)

    async def root(_: Request) -> Response:
        return Response(page(), media_type="text/html", headers=NOT_CACHED | page_headers())

    return Starlette(
        routes=[
            Route("/", root),
            Route("/metrics", metrics),
            Route("/healthz", healthz),
            Route("/readyz", readyz),
            Route("/status", show),
        ]
    )


class _Http(H11Protocol):
    """A connection that ends unless its first answer, and then each next one, is there in time.

    uvicorn itself waits for the rest of a request, and for a reader of its answer, for ever.
    """

    _end: asyncio.TimerHandle

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._end = self.loop.call_later(ANSWER_SECONDS, transport.abort)
        if len(self.connections) > MAX_CONNECTIONS:
            transport.abort()

    def on_response_complete(self) -> None:
        self._end.cancel()
        self._end = self.loop.call_later(ANSWER_SECONDS, self.transport.abort)
        super().on_response_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        self._end.cancel()
        super().connection_lost(exc)


class _Uvicorn(uvicorn.Server):
    """Signals are the agent's business."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class Server:
    """Serves at `address`, HOST:PORT, until `close`."""

    def __init__(self, address: str, server: _Uvicorn, task: asyncio.Task[None]) -> None:
        self.address = address
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
        http=_Http,
        ws="none",
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
    bound = join_address(*sock.getsockname()[:2])
    log.info("http://%s", bound)
    return Server(bound, server, asyncio.create_task(server.serve(sockets=[sock])))
