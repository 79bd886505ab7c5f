"""The prefill/decode proxy against fake engines, over real HTTP connections."""

from __future__ import annotations

import asyncio
import functools
import json
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest
import uvicorn
from hypothesis import given
from hypothesis import strategies as st
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from kvagent.errors import ConfigError
from kvagent.proxy import Limits, create_app, run_proxy
from kvagent.proxy.app import listen
from kvagent.proxy.request import CompletionRequest, read_ticket
from kvagent.proxy.servers import Pool

HANG = 10.0  # bound of everything that should happen "promptly"


# -- fake engines ----------------------------------------------------------------------------


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.listening = asyncio.Event()
        self.stop = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.listening.set()

    async def main_loop(self) -> None:
        await self.stop.wait()  # uvicorn's own looks ten times a second

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield  # several servers share the test's loop; none of them may take the signals


@asynccontextmanager
async def serve(apps: list[Starlette], listeners: list[socket.socket]) -> AsyncIterator[None]:
    """Serve each app on its listener."""
    config = functools.partial(
        uvicorn.Config,
        http="h11",
        ws="none",
        loop="asyncio",
        log_config=None,
        timeout_graceful_shutdown=1,
    )
    servers = [_Server(config(app)) for app in apps]
    tasks = [
        asyncio.create_task(server.serve([listener]))
        for server, listener in zip(servers, listeners, strict=True)
    ]
    try:
        for server in servers:
            await server.listening.wait()
        yield
    finally:
        for server in servers:
            server.stop.set()
        await asyncio.gather(*tasks)


def url_of(bound: socket.socket) -> str:
    return f"http://127.0.0.1:{bound.getsockname()[1]}"


@dataclass
class Engine:
    """A fake server: `handler` makes the answers, the rest is what it saw."""

    handler: Callable[[Engine, Request, dict[str, Any]], Awaitable[Response]]
    bodies: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    arrived: asyncio.Event = field(default_factory=asyncio.Event)
    client_gone: asyncio.Event = field(default_factory=asyncio.Event)
    go: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def app(self) -> Starlette:
        async def completions(request: Request) -> Response:
            body = await request.json()
            self.bodies.append(body)
            self.headers.append(dict(request.headers))
            self.arrived.set()
            return await self.handler(self, request, body)

        async def models(_: Request) -> Response:
            return JSONResponse({"object": "list", "data": [{"id": "m"}]})

        return Starlette(
            routes=[
                Route("/v1/completions", completions, methods=["POST"]),
                Route("/v1/chat/completions", completions, methods=["POST"]),
                Route("/v1/models", models),
            ]
        )


EVENTS = [
    b'data: {"choices":[{"text":"a"}]}\r\n\r\n',
    b": ping\n\n",
    b'data: {"choices":[{"text":"\xc3',  # a character cut in two
    b'\xa9"}]}\n',
    b"\n",
    b"data: [DONE]\n\n",
]


async def gives_ticket(engine: Engine, _: Request, body: dict[str, Any]) -> Response:
    ticket = {"remote_engine_id": "p", "kvagent": {"transfer_id": f"t{len(engine.bodies)}"}}
    return JSONResponse({"choices": [{"text": "x"}], "kv_transfer_params": ticket})


async def decodes(engine: Engine, _: Request, body: dict[str, Any]) -> Response:
    if not body.get("stream"):
        return JSONResponse({"id": engine.headers[-1]["x-request-id"], "prompt": body["prompt"]})

    async def events() -> AsyncIterator[bytes]:
        for event in EVENTS:
            yield event
            await asyncio.sleep(0)

    return StreamingResponse(events(), media_type="text/event-stream")


async def hangs(engine: Engine, request: Request, _: dict[str, Any]) -> Response:
    while (await request.receive())["type"] != "http.disconnect":
        pass
    engine.client_gone.set()
    return Response()


async def streams_for_ever(engine: Engine, _: Request, __: dict[str, Any]) -> Response:
    async def events() -> AsyncIterator[bytes]:
        try:
            yield EVENTS[0]
            await asyncio.Event().wait()
        finally:
            engine.client_gone.set()

    return StreamingResponse(events(), media_type="text/event-stream")


def answers(status: int, content: bytes = b"{}") -> Callable[..., Awaitable[Response]]:
    async def handler(*_: Any) -> Response:
        return Response(
            content, status, headers={"retry-after": "7"}, media_type="application/json"
        )

    return handler


def breaks_after(chunks: list[bytes], media_type: str) -> Callable[..., Awaitable[Response]]:
    """Sends the head and `chunks`, then loses the connection."""

    async def handler(*_: Any) -> Response:
        async def body() -> AsyncIterator[bytes]:
            for chunk in chunks:
                yield chunk
                await asyncio.sleep(0.02)
            raise RuntimeError("the fake engine dies here")

        return StreamingResponse(body(), media_type=media_type)

    return handler


@dataclass
class Cluster:
    client: httpx.AsyncClient
    prefill: list[Engine]
    decode: list[Engine]

    async def complete(self, **fields: Any) -> httpx.Response:
        body = {"model": "m", "prompt": "p", "max_tokens": 9, **fields}
        return await self.client.post("/v1/completions", json=body)


@asynccontextmanager
async def cluster(
    prefill: list[Any],
    decode: list[Any],
    *,
    dead_prefill: bool = False,
    dead_decode: bool = False,
    **limits: Any,
) -> AsyncIterator[Cluster]:
    """The proxy before engines with these handlers; dead servers refuse connections."""
    engines = [Engine(handler) for handler in (*prefill, *decode)]
    with ExitStack() as stack:
        listeners = [stack.enter_context(listen("127.0.0.1", 0)) for _ in range(len(engines) + 1)]
        unused = stack.enter_context(socket.socket())
        unused.bind(("127.0.0.1", 0))  # bound and not listening: connections are refused
        urls = [url_of(listener) for listener in listeners[1:]]
        proxy = create_app(
            [url_of(unused)] * dead_prefill + urls[: len(prefill)],
            [url_of(unused)] * dead_decode + urls[len(prefill) :],
            limits=Limits(**limits),
        )
        base = url_of(listeners[0])
        async with (
            serve([proxy, *[engine.app for engine in engines]], listeners),
            httpx.AsyncClient(base_url=base, verify=False, trust_env=False, timeout=HANG) as client,
        ):
            yield Cluster(client, engines[: len(prefill)], engines[len(prefill) :])


def scenario(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    """Run an async test in a loop of its own, bounded against hangs."""

    @functools.wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        asyncio.run(asyncio.wait_for(test(*args, **kwargs), 3 * HANG))

    return run


# -- the way of a request --------------------------------------------------------------------


@scenario
async def test_the_ticket_goes_from_prefill_to_decode() -> None:
    async with cluster([gives_ticket], [decodes]) as c:
        answer = await c.client.post(
            "/v1/completions",
            json={
                "prompt": "hello",
                "max_tokens": 50,
                "max_completion_tokens": 50,
                "min_tokens": 5,
                "n": 1,
                "temperature": 0.25,
                "stream_options": {"include_usage": True},
                "kv_transfer_params": {"remote_host": "evil"},
            },
            headers={"x-request-id": "mine", "authorization": "Bearer k", "connection": "x-hop"},
        )
        prefill, decode = c.prefill[0], c.decode[0]
    assert answer.status_code == 200
    assert answer.json() == {"id": "mine", "prompt": "hello"}
    assert answer.headers["x-request-id"] == "mine"
    assert answer.headers["x-kvagent-prefill"] == "ok"
    assert float(answer.headers["x-kvagent-prefill-ms"]) > 0
    assert prefill.bodies == [
        {
            "prompt": "hello",
            "max_tokens": 1,
            "max_completion_tokens": 1,
            "n": 1,
            "temperature": 0.25,
            "stream": False,
            "kv_transfer_params": {
                "do_remote_decode": True,
                "do_remote_prefill": False,
                "remote_engine_id": None,
                "remote_block_ids": None,
                "remote_host": None,
                "remote_port": None,
            },
        }
    ]
    assert decode.bodies == [
        {
            "prompt": "hello",
            "max_tokens": 50,
            "max_completion_tokens": 50,
            "min_tokens": 5,
            "n": 1,
            "temperature": 0.25,
            "stream_options": {"include_usage": True},
            "kv_transfer_params": {"remote_engine_id": "p", "kvagent": {"transfer_id": "t1"}},
        }
    ]
    for seen in (prefill.headers[0], decode.headers[0]):
        assert seen["x-request-id"] == "mine"
        assert seen["authorization"] == "Bearer k"


@scenario
async def test_chat_takes_the_same_way_and_ids_are_minted() -> None:
    async def chats(*_: Any) -> Response:
        return JSONResponse({"choices": []})

    async with cluster([gives_ticket], [chats]) as c:
        body = {"messages": [{"role": "user", "content": "hi"}]}
        headers = {"x-request-id": "not fit for a log line"}
        answer = await c.client.post("/v1/chat/completions", json=body, headers=headers)
        ids = {c.prefill[0].headers[0]["x-request-id"], c.decode[0].headers[0]["x-request-id"]}
        assert c.prefill[0].bodies[0]["max_tokens"] == 1
        assert c.decode[0].bodies[0]["messages"] == body["messages"]
        assert "kvagent" in c.decode[0].bodies[0]["kv_transfer_params"]
    assert ids == {answer.headers["x-request-id"]}
    assert len(ids.pop()) == 32


@scenario
async def test_a_stream_passes_byte_for_byte() -> None:
    async with cluster([gives_ticket], [decodes]) as c:
        answer = await c.complete(stream=True)
        assert c.prefill[0].bodies[0]["stream"] is False
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert answer.headers["x-kvagent-prefill"] == "ok"
    assert answer.content == b"".join(EVENTS)


@scenario
async def test_events_are_not_held_back() -> None:
    async def waits_between(engine: Engine, *_: Any) -> Response:
        async def events() -> AsyncIterator[bytes]:
            yield EVENTS[0]
            await engine.go.wait()
            yield EVENTS[-1]

        return StreamingResponse(events(), media_type="text/event-stream")

    async with cluster([gives_ticket], [waits_between]) as c:
        body = {"prompt": "p", "stream": True}
        async with c.client.stream("POST", "/v1/completions", json=body) as answer:
            chunks = answer.aiter_raw()
            assert await anext(chunks) == EVENTS[0]
            c.decode[0].go.set()
            assert b"".join([chunk async for chunk in chunks]) == EVENTS[-1]


@scenario
async def test_round_robin() -> None:
    async with cluster([gives_ticket] * 2, [decodes] * 3) as c:
        for _ in range(6):
            assert (await c.complete()).status_code == 200
        assert [len(engine.bodies) for engine in c.prefill] == [3, 3]
        assert [len(engine.bodies) for engine in c.decode] == [2, 2, 2]


@scenario
async def test_fifty_requests_at_once() -> None:
    async def decodes_late(engine: Engine, request: Request, body: dict[str, Any]) -> Response:
        if len(engine.bodies) == 25:
            engine.go.set()
        await engine.go.wait()  # so all 50 are in flight together
        return await decodes(engine, request, body)

    async with cluster([gives_ticket] * 2, [decodes_late] * 2) as c:
        streams = [c.complete(prompt=str(i), stream=True) for i in range(0, 50, 2)]
        wholes = [c.complete(prompt=str(i)) for i in range(1, 50, 2)]
        results = await asyncio.gather(*streams, *wholes)
        tickets = [
            (body["prompt"], body["kv_transfer_params"]["kvagent"]["transfer_id"])
            for engine in c.decode
            for body in engine.bodies
        ]
    assert {answer.headers["x-kvagent-prefill"] for answer in results} == {"ok"}
    assert all(answer.content == b"".join(EVENTS) for answer in results[:25])
    assert [answer.json()["prompt"] for answer in results[25:]] == [str(i) for i in range(1, 50, 2)]
    assert len({prompt for prompt, _ in tickets}) == 50
    assert sorted(ticket for _, ticket in tickets) == sorted([f"t{i}" for i in range(1, 26)] * 2)


# -- clients that leave ----------------------------------------------------------------------


async def leave(c: Cluster, engine: Engine, **fields: Any) -> None:
    """Send a request, wait until `engine` has it, go away; the engine must see that."""
    request = asyncio.create_task(c.complete(**fields))
    await asyncio.wait_for(engine.arrived.wait(), HANG)
    request.cancel()
    await asyncio.gather(request, return_exceptions=True)
    await asyncio.wait_for(engine.client_gone.wait(), HANG)


@scenario
async def test_leaving_during_prefill() -> None:
    async with cluster([hangs], [decodes]) as c:
        await leave(c, c.prefill[0])
        health = (await c.client.get("/health")).json()
        assert c.decode[0].bodies == []
        assert health["status"] == "ok"  # a client that leaves is nobody's failure


@pytest.mark.parametrize("stream", [False, True])
@scenario
async def test_leaving_before_the_first_token(stream: bool) -> None:
    async with cluster([gives_ticket], [hangs]) as c:
        await leave(c, c.decode[0], stream=stream)
        assert len(c.decode[0].bodies) == 1
        assert (await c.client.get("/health")).json()["status"] == "ok"


@scenario
async def test_leaving_in_the_middle_of_a_stream() -> None:
    async with cluster([gives_ticket], [streams_for_ever]) as c:
        body = {"prompt": "p", "stream": True}
        async with c.client.stream("POST", "/v1/completions", json=body) as answer:
            assert await anext(answer.aiter_raw()) == EVENTS[0]
        await asyncio.wait_for(c.decode[0].client_gone.wait(), HANG)


@scenario
async def test_the_proxy_serves_on_after_clients_left() -> None:
    async def hangs_once(engine: Engine, request: Request, body: dict[str, Any]) -> Response:
        return await (hangs if len(engine.bodies) == 1 else decodes)(engine, request, body)

    async with cluster([gives_ticket], [hangs_once]) as c:
        await leave(c, c.decode[0])
        assert (await c.complete()).headers["x-kvagent-prefill"] == "ok"


# -- prefill servers that fail ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("handler", "reason"),
    [
        (answers(500), "status-500"),
        (answers(503), "status-503"),
        (answers(302), "status-302"),
        (answers(200, b"not json"), "malformed"),
        (answers(200, b'{"kv_transfer_params": 3}'), "malformed"),
        (answers(200, b"[" * 100_000), "malformed"),
        (answers(200, b'{"choices": []}'), "no-ticket"),
        (answers(200, b'{"kv_transfer_params": null}'), "no-ticket"),
        (hangs, "timeout"),
        (breaks_after([b"{"], "application/json"), "broken"),
    ],
)
@scenario
async def test_a_failed_prefill_falls_back(
    handler: Any, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    patience = 0.2 if handler is hangs else HANG
    async with cluster([handler], [decodes], prefill_timeout=patience, cooldown=60) as c:
        answer = await c.complete(kv_transfer_params={"remote_host": "evil"})
        assert answer.status_code == 200
        assert answer.headers["x-kvagent-prefill"] == f"fallback; reason={reason}"
        assert float(answer.headers["x-kvagent-prefill-ms"]) > 0
        assert c.decode[0].bodies == [{"model": "m", "prompt": "p", "max_tokens": 9}]
        again = await c.complete()
    # A server that gives no ticket is healthy; the others are not asked again at once.
    expected = reason if reason == "no-ticket" else "cooldown"
    assert again.headers["x-kvagent-prefill"] == f"fallback; reason={expected}"
    lines = [r.getMessage() for r in caplog.records if r.name == "kvagent.proxy"]
    assert [f"reason={reason} " in line for line in lines] == [True] * (reason != "no-ticket")


@scenario
async def test_a_dead_prefill_server_is_skipped() -> None:
    async with cluster([gives_ticket], [decodes], dead_prefill=True, cooldown=60) as c:
        notes = [(await c.complete()).headers["x-kvagent-prefill"] for _ in range(4)]
        health = await c.client.get("/health")
    assert notes == ["fallback; reason=connect", "ok", "ok", "ok"]
    assert health.status_code == 200
    dead, alive = health.json()["prefill"]
    assert (dead["state"], dead["failures"]) == ("cooling", 1)
    assert alive["state"] == "up"


@scenario
async def test_a_prefill_server_comes_back_after_its_cooldown() -> None:
    async def fails_once(engine: Engine, request: Request, body: dict[str, Any]) -> Response:
        handler = answers(503) if len(engine.bodies) == 1 else gives_ticket
        return await handler(engine, request, body)

    async with cluster([fails_once], [decodes], cooldown=0.05) as c:
        assert "status-503" in (await c.complete()).headers["x-kvagent-prefill"]
        await asyncio.sleep(0.1)
        assert (await c.complete()).headers["x-kvagent-prefill"] == "ok"


@pytest.mark.parametrize("status", [400, 404, 422, 429])
@scenario
async def test_a_bad_request_is_answered_by_the_prefill_server(status: int) -> None:
    said = b'{"error": {"message": "no such model"}}'
    async with cluster([answers(status, said)], [decodes]) as c:
        answer = await c.complete(stream=True)
        assert c.decode[0].bodies == []
        assert (await c.client.get("/health")).json()["status"] == "ok"
    assert (answer.status_code, answer.content) == (status, said)
    assert answer.headers["content-type"] == "application/json"
    assert answer.headers["retry-after"] == "7"
    assert answer.headers["x-kvagent-prefill"] == "refused"


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt": ["a", "b"]},
        {"prompt": [[1, 2], [3]]},
        {"n": 2},
        {"best_of": 3},
    ],
)
@scenario
async def test_a_batch_goes_to_decode_alone(fields: dict[str, Any]) -> None:
    async with cluster([gives_ticket], [decodes]) as c:
        answer = await c.complete(**fields)
        assert c.prefill[0].bodies == []
        assert c.decode[0].bodies == [{"model": "m", "prompt": "p", "max_tokens": 9, **fields}]
    assert answer.headers["x-kvagent-prefill"] == "fallback; reason=batch"
    assert "x-kvagent-prefill-ms" not in answer.headers


# -- decode servers that fail ----------------------------------------------------------------


@pytest.mark.parametrize(
    "handler",
    [
        answers(500),
        answers(503),
        breaks_after([], "text/event-stream"),
        breaks_after([], "application/json"),
        hangs,
    ],
)
@pytest.mark.parametrize("stream", [False, True])
@scenario
async def test_decode_is_tried_once_more_without_the_ticket(handler: Any, stream: bool) -> None:
    patience = 1.0 if handler is hangs else HANG
    async with cluster([gives_ticket], [handler, decodes], decode_timeout=patience) as c:
        answer = await c.complete(stream=stream)
        assert "kv_transfer_params" in c.decode[0].bodies[0]
        assert "kv_transfer_params" not in c.decode[1].bodies[0]
    assert answer.status_code == 200
    assert answer.headers["x-kvagent-prefill"] == "fallback; reason=decode-retry"
    if stream:
        assert answer.content == b"".join(EVENTS)


@scenario
async def test_a_dead_decode_server_is_skipped() -> None:
    async with cluster([gives_ticket], [decodes], dead_decode=True, cooldown=60) as c:
        notes = [(await c.complete()).headers["x-kvagent-prefill"] for _ in range(3)]
        assert (await c.client.get("/v1/models")).json()["data"] == [{"id": "m"}]
    assert notes == ["fallback; reason=decode-retry", "ok", "ok"]


@scenario
async def test_a_5xx_to_a_ticket_does_not_take_the_server_out() -> None:
    async def refuses_tickets(engine: Engine, request: Request, body: dict[str, Any]) -> Response:
        handler = answers(500) if "kv_transfer_params" in body else decodes
        return await handler(engine, request, body)

    async with cluster([gives_ticket], [refuses_tickets]) as c:
        answer = await c.complete()
        assert (await c.client.get("/health")).json()["decode"][0]["state"] == "up"
    assert answer.status_code == 200  # the only server, asked again
    assert answer.headers["x-kvagent-prefill"] == "fallback; reason=decode-retry"


@scenario
async def test_the_last_server_error_is_passed_on() -> None:
    said = b'{"error": {"message": "out of memory"}}'
    async with cluster([gives_ticket], [answers(503, said)] * 2) as c:
        answer = await c.complete(stream=True)
        assert [len(engine.bodies) for engine in c.decode] == [1, 1]
    assert (answer.status_code, answer.content) == (503, said)


@scenario
async def test_no_decode_server_at_all() -> None:
    async with cluster([gives_ticket], [], dead_decode=True) as c:
        answer = await c.complete()
        models = await c.client.get("/v1/models")
        health = await c.client.get("/health")
    for failed in (answer, models):
        assert failed.status_code == 502
        assert failed.json()["error"]["type"] == "server_error"
    assert "ConnectError" in answer.json()["error"]["message"]
    assert health.status_code == 503
    assert health.json()["status"] == "unavailable"


@pytest.mark.parametrize(
    ("sent", "gap"), [(EVENTS[:1], b""), (EVENTS[:2], b""), (EVENTS[:3], b"\n\n")]
)
@scenario
async def test_a_broken_stream_ends_with_an_error_event(sent: list[bytes], gap: bytes) -> None:
    async with cluster([gives_ticket], [breaks_after(sent, "text/event-stream"), decodes]) as c:
        answer = await c.complete(stream=True)
        assert c.decode[1].bodies == []
    start = b"".join(sent) + gap + b"data: "
    assert answer.status_code == 200
    assert answer.content.startswith(start)
    assert answer.content.endswith(b"\n\n")
    assert json.loads(answer.content[len(start) :])["error"]["code"] == 502


@scenario
async def test_a_broken_whole_answer_is_a_502() -> None:
    async with cluster([gives_ticket], [breaks_after([b'{"a'], "application/json")]) as c:
        answer = await c.complete()
    assert answer.status_code == 502
    assert "middle of its answer" in answer.json()["error"]["message"]


@scenario
async def test_a_4xx_of_decode_is_passed_on() -> None:
    async with cluster([gives_ticket], [answers(422, b"why"), decodes]) as c:
        answer = await c.complete()
        assert c.decode[1].bodies == []
    assert (answer.status_code, answer.content) == (422, b"why")


# -- requests that are refused ---------------------------------------------------------------


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[1]", b'"x"', b'{"a":NaN}', b'{"a":1}x', b'{"a":' + b"[" * 100_000]
)
@scenario
async def test_malformed_json(body: bytes) -> None:
    async with cluster([gives_ticket], [decodes]) as c:
        answer = await c.client.post("/v1/completions", content=body)
        assert c.prefill[0].bodies == c.decode[0].bodies == []
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert error["message"].startswith("the body is not a JSON object")
    assert set(error) == {"message", "type", "param", "code"}


@pytest.mark.parametrize("chunked", [False, True])
@scenario
async def test_a_body_over_the_limit(chunked: bool) -> None:
    async def pieces() -> AsyncIterator[bytes]:
        for _ in range(16):
            yield b" " * 65536

    content = pieces() if chunked else b" " * (1 << 20)
    async with cluster([gives_ticket], [decodes], max_body_bytes=100_000) as c:
        answer = await c.client.post("/v1/completions", content=content)
        assert answer.status_code == 413
        assert answer.json()["error"]["type"] == "invalid_request_error"
        just_fits = "x" * 99_000
        assert (await c.complete(prompt=just_fits)).json()["prompt"] == just_fits


@scenario
async def test_unknown_paths_and_methods() -> None:
    async with cluster([gives_ticket], [decodes]) as c:
        missing = await c.client.get("/v1/nothing")
        wrong = await c.client.get("/v1/completions")
    assert (missing.status_code, wrong.status_code) == (404, 405)
    assert missing.json()["error"]["code"] == 404
    assert wrong.json()["error"]["code"] == 405


@pytest.mark.parametrize(
    "url", ["", "localhost:80", "ftp://x", "http://", "http://x:port", "http://x/v1", "http://x?a"]
)
def test_urls_of_no_use(url: str) -> None:
    with pytest.raises(ConfigError, match="--decode"):
        create_app(["http://p:1"], [url])


def test_at_least_one_server_of_each_kind() -> None:
    with pytest.raises(ConfigError, match="--prefill URL"):
        create_app([], ["http://d:1"])
    with pytest.raises(ConfigError, match="--decode URL"):
        create_app(["http://p:1"], [])


# -- the pure parts --------------------------------------------------------------------------


def test_pool_skips_what_failed_and_tries_it_once_when_due() -> None:
    pool = Pool("prefill", ["http://a", "http://b/"], cooldown=5)
    a, b = pool.servers
    assert (a.url, b.url) == ("http://a", "http://b")
    assert [pool.pick(0), pool.pick(0), pool.pick(0)] == [a, b, a]
    pool.failed(b, 0, "refused")
    assert [pool.pick(1), pool.pick(4.9)] == [a, a]
    assert b.describe(5)["state"] == "due"
    assert [pool.pick(5), pool.pick(5), pool.pick(9)] == [b, a, a]  # one trial
    assert pool.pick(10) is b  # the trial was abandoned: another one
    pool.failed(b, 11, "refused")
    assert [pool.pick(15), pool.pick(16)] == [a, b]
    pool.succeeded(b)
    assert [pool.pick(16), pool.pick(16)] == [a, b]
    assert b.describe(16) == {"url": "http://b", "state": "up"}


def test_pool_with_every_server_cooling() -> None:
    pool = Pool("decode", ["http://a", "http://b"], cooldown=5)
    a, b = pool.servers
    for server in pool.servers:
        pool.failed(server, 0, "refused")
    assert pool.pick(1) is None
    assert not pool.available(1)
    assert [pool.pick_any(1), pool.pick_any(1), pool.pick_any(1, avoid=a)] == [a, b, b]
    alone = Pool("decode", ["http://a"], cooldown=5)
    assert alone.pick_any(0, avoid=alone.servers[0]) is alone.servers[0]


_text = st.text('aé"\\\n\N{GRINNING FACE}', max_size=5)
_json = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | _text,
    lambda children: st.lists(children) | st.dictionaries(_text, children),
    max_leaves=8,
)
_KEYS = ["prompt", "n", "best_of", "stream", "max_tokens", "max_completion_tokens", "min_tokens"]


@given(st.dictionaries(st.sampled_from([*_KEYS, "kv_transfer_params", "x"]), _json))
def test_bodies_change_only_what_they_must(fields: dict[str, Any]) -> None:
    request = CompletionRequest(json.dumps(fields).encode())
    fields.pop("kv_transfer_params", None)
    assert json.loads(request.decode_body(None)) == fields
    ticket = read_ticket(b'{"kv_transfer_params": {"a": [1, {"b": 1e400}]}}')
    assert request.decode_body(ticket).endswith(b'"kv_transfer_params":{"a":[1, {"b": 1e400}]}}')
    changed = {"stream", "max_tokens", "max_completion_tokens", "min_tokens", "kv_transfer_params"}
    prefill = json.loads(request.prefill_body())
    assert {k: v for k, v in prefill.items() if k not in changed} == {
        k: v for k, v in fields.items() if k not in changed
    }
    assert (prefill["max_tokens"], prefill["stream"]) == (1, False)
    assert isinstance(request.is_batch, bool)


@pytest.mark.parametrize(
    ("fields", "batch"),
    [
        ({"prompt": "a"}, False),
        ({"prompt": ["a"]}, False),
        ({"prompt": [1, 2, 3]}, False),
        ({"prompt": [[1, 2, 3]]}, False),
        ({"prompt": []}, False),
        ({"prompt": "a", "n": 1, "best_of": None}, False),
        ({"prompt": "a", "n": "many"}, False),
        ({"prompt": ["a", "b"]}, True),
        ({"prompt": [[1], [2]]}, True),
        ({"messages": [], "n": 2}, True),
    ],
)
def test_what_is_a_batch(fields: dict[str, Any], batch: bool) -> None:
    assert CompletionRequest(json.dumps(fields).encode()).is_batch is batch


# -- the process -----------------------------------------------------------------------------


def test_run_proxy_announces_its_port_and_stops_on_sigterm() -> None:
    code = (
        "from kvagent.proxy import run_proxy; "
        "run_proxy(['http://127.0.0.1:9'], ['http://127.0.0.1:9'], port=0)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as proxy:
        try:
            assert proxy.stdout is not None
            url = proxy.stdout.readline().strip()
            with httpx.Client(trust_env=False, timeout=HANG) as client:
                assert client.get(f"{url}/health").json()["status"] == "ok"
            proxy.send_signal(signal.SIGTERM)
            assert proxy.wait(HANG) in (0, -signal.SIGTERM)
        finally:
            proxy.kill()


def test_run_proxy_says_when_it_cannot_listen() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1 port {port}"):
            run_proxy(["http://p:1"], ["http://d:1"], port=port)
