"""The proxy's routes, and the process that serves them."""

from __future__ import annotations

import re
import secrets
import socket
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial

import httpx
import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from kvagent.errors import ConfigError
from kvagent.proxy.answer import (
    error_json,
    read_answer,
    request_headers,
)
from kvagent.proxy.exchange import Exchange
from kvagent.proxy.request import CompletionRequest
from kvagent.proxy.servers import Pool
from kvagent.proxy.upstream import Limits, ServerFailed, Upstreams, log_failure

_MODELS_TIMEOUT = 10.0
# Servers commonly close a connection after 5 s of silence. Dropping ours earlier keeps a request
# from being written into a connection that is closing at the other end.
_KEEPALIVE_SECONDS = 2.0
_SHUTDOWN_SECONDS = 10
_say = partial(print, flush=True)
_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")


def create_app(
    prefill: Sequence[str], decode: Sequence[str], *, limits: Limits | None = None
) -> Starlette:
    """The proxy as an ASGI application; its lifespan owns the connections to the servers.

    `prefill` and `decode` are base URLs (`http://host:port`), at least one of each. Raises
    `ConfigError`.
    """
    limits = limits or Limits()
    prefill_pool = Pool("prefill", prefill, limits.cooldown)
    decode_pool = Pool("decode", decode, limits.cooldown)

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        async with httpx.AsyncClient(
            timeout=httpx.Timeout(limits.decode_timeout, connect=limits.connect_timeout, pool=None),
            limits=httpx.Limits(keepalive_expiry=_KEEPALIVE_SECONDS),  # and as many as needed
            trust_env=False,  # the servers are the ones named, never by way of HTTP_PROXY
        ) as client:
            app.state.upstreams = Upstreams(client, prefill_pool, decode_pool, limits)
            yield

    return Starlette(
        routes=[
            Route("/v1/completions", _completions, methods=["POST"]),
            Route("/v1/chat/completions", _completions, methods=["POST"]),
            Route("/v1/models", _models),
            Route("/health", _health),
        ],
        exception_handlers={
            HTTPException: _http_error,
            ClientDisconnect: _nobody_there,
            Exception: _internal_error,
        },
        lifespan=lifespan,
    )


def run_proxy(
    prefill: Sequence[str],
    decode: Sequence[str],
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    limits: Limits | None = None,
    announce: Callable[[str], None] = _say,
) -> None:
    """Serve until SIGINT or SIGTERM.

    Port 0 takes a free one. `announce` is called with the proxy's URL once it listens. Raises
    `ConfigError` for URLs of no use and for an address that cannot be bound.
    """
    app = create_app(prefill, decode, limits=limits)
    with listen(host, port) as listener:
        shown = f"[{host}]" if listener.family == socket.AF_INET6 else host
        announce(f"http://{shown}:{listener.getsockname()[1]}")
        config = uvicorn.Config(
            app,
            http="h11",  # as httpx: no header that one end accepts is refused by the other
            log_level="warning",
            access_log=False,
            timeout_graceful_shutdown=_SHUTDOWN_SECONDS,
        )
        with suppress(KeyboardInterrupt):  # uvicorn raises it again after a clean shutdown
            uvicorn.Server(config).run(sockets=[listener])


def listen(host: str, port: int) -> socket.socket:
    """A listening TCP socket; raises `ConfigError`."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio turns Nagle's algorithm off only on sockets that say they are TCP, and what is
    # accepted inherits that: with protocol 0 every answer would wait 40 ms for a delayed ACK.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(2048)
    except (OSError, OverflowError) as error:
        listener.close()
        raise ConfigError(f"the proxy cannot listen on {host} port {port}: {error}") from error
    return listener


async def _completions(request: Request) -> Exchange:
    upstreams: Upstreams = request.app.state.upstreams
    body = await _read_body(request, upstreams.limits.max_body_bytes)
    try:
        completion = CompletionRequest(body)
    except ValueError as error:
        raise HTTPException(400, str(error)) from error
    request_id = _request_id(request)
    headers = request_headers(request.headers.raw, request_id)
    return Exchange(upstreams, request.url.path, headers, request_id, completion)


async def _models(request: Request) -> Response:
    """The models of a decode server; the next one is asked if the first does not answer."""
    upstreams: Upstreams = request.app.state.upstreams
    pool = upstreams.decode
    request_id = _request_id(request)
    headers = request_headers(request.headers.raw, request_id)
    failed = None
    for _ in range(2):
        server = pool.pick_any(time.monotonic(), avoid=failed)
        try:
            async with upstreams.client.stream(
                "GET", server.url + "/v1/models", headers=headers, timeout=_MODELS_TIMEOUT
            ) as upstream:
                answer = await read_answer(upstream)
        except httpx.TransportError as error:
            failure = ServerFailed.of(error)
            pool.failed(server, time.monotonic(), failure.detail)
            log_failure(pool, server, failure, request_id, "models")
            failed = server
        else:
            pool.succeeded(server)
            content_type = upstream.headers.get("content-type")
            return Response(answer.body, answer.status, media_type=content_type)
    raise HTTPException(502, "no decode server answers")


async def _health(request: Request) -> JSONResponse:
    """What requests found out about each server; 503 while every decode server cools down."""
    upstreams: Upstreams = request.app.state.upstreams
    now = time.monotonic()
    decode_up = upstreams.decode.available(now)
    all_up = decode_up and upstreams.prefill.available(now)
    state = {
        "status": "ok" if all_up else "decode-only" if decode_up else "unavailable",
        "prefill": [server.describe(now) for server in upstreams.prefill.servers],
        "decode": [server.describe(now) for server in upstreams.decode.servers],
    }
    return JSONResponse(state, 200 if decode_up else 503)


async def _read_body(request: Request, limit: int) -> bytes:
    too_large = HTTPException(413, f"the body is larger than {limit} bytes")
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > limit:
        raise too_large
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > limit:
            raise too_large
    return bytes(body)


def _request_id(request: Request) -> str:
    """The client's id if it is fit for a header and a log line, else a new one."""
    given = request.headers.get("x-request-id", "")
    return given if _REQUEST_ID.fullmatch(given) else secrets.token_hex(16)


def _http_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    body = error_json(error.status_code, error.detail)
    return Response(body, error.status_code, error.headers, media_type="application/json")


def _internal_error(_: Request, error: Exception) -> Response:
    return Response(error_json(500, "internal error"), 500, media_type="application/json")


def _nobody_there(_: Request, error: Exception) -> Response:
    return Response(status_code=499)  # nginx's code for it; nobody reads this answer
