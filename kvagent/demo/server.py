"""The engine's HTTP side, and its whole life: start, serve, stop.

    POST /v1/completions   GET /v1/models   GET /health

A client that goes away cancels its request.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import sys
import uuid
from collections.abc import AsyncGenerator, Callable, Sequence
from pathlib import Path

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request as HTTPRequest
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from kvagent.demo import api
from kvagent.demo.config import HND, EngineOptions, default_model
from kvagent.demo.engine import Engine
from kvagent.demo.request import Output, Request
from kvagent.demo.tokenizer import TextStream
from kvagent.errors import ConfigError, KVAgentError

__all__ = ["create_app", "serve_engine"]

logger = logging.getLogger(__name__)

_SHUTDOWN_SECONDS = 3
"""How long requests may go on when the server is told to stop."""


def serve_engine(
    model: str | Path | None = None,
    *,
    socket_template: str | None = None,
    tp: int = 1,
    host: str = "127.0.0.1",
    port: int = 8000,
    engine_id: str = "demo",
    served_name: str | None = None,
    num_blocks: int = 512,
    block_size: int = 16,
    axes: Sequence[str] = HND,
    kv_dtype: str = "float32",
    max_batch_tokens: int = 512,
    prefix_cache: bool = False,
    device: str = "auto",
) -> None:
    """Serves until SIGTERM or SIGINT. For the main thread of a process.

    `model` is a Hugging Face directory or a GGUF file, by default `default_model()`. For the
    other settings see `EngineOptions`. Port 0 takes a free one; the address is printed when the
    engine is ready. Raises `KVAgentError` when it cannot start, and when it broke down or lost a
    sidecar later: then start it again.
    """
    path = Path(model) if model is not None else default_model()
    options = EngineOptions(
        model=str(path),
        engine_id=engine_id,
        socket_template=socket_template,
        tp=tp,
        num_blocks=num_blocks,
        block_size=block_size,
        axes=tuple(axes),
        kv_dtype=kv_dtype,
        max_batch_tokens=max_batch_tokens,
        prefix_cache=prefix_cache,
        device=device,
    )
    # uvicorn hands a signal on to the handler that was there before, when it has stopped.
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    try:
        with _bind(host, port) as listener, contextlib.closing(Engine(options)) as engine:
            app = create_app(engine, served_name or path.stem)
            server = uvicorn.Server(
                uvicorn.Config(
                    app, log_level="warning", timeout_graceful_shutdown=_SHUTDOWN_SECONDS
                )
            )
            engine.start(on_failure=lambda: setattr(server, "should_exit", True))
            address, bound_port = listener.getsockname()[:2]
            shown = f"[{address}]" if ":" in address else address
            listener.listen()
            print(f"kvagent demo engine on http://{shown}:{bound_port}", flush=True)
            server.run(sockets=[listener])
            if engine.failed:
                raise KVAgentError("the engine has ended, see above; start it again")
    except KeyboardInterrupt:
        pass
    finally:
        signal.signal(signal.SIGTERM, before)


def create_app(engine: Engine, name: str) -> Starlette:
    """The routes; `name` is what the model is called."""

    async def completions(http: HTTPRequest) -> Response:
        try:
            body = api.decode_body(await http.body())
        except ValueError as problem:
            return JSONResponse(api.error(400, str(problem)), 400)
        if body.model not in (None, name):
            return JSONResponse(api.error(404, f"the model here is {name!r}"), 404)
        answer = _Answer(engine, body, name)
        try:
            answer.submit()
        except ValueError as problem:
            code = 503 if engine.failed else 400
            return JSONResponse(api.error(code, str(problem)), code)
        if body.stream:
            return StreamingResponse(answer.events(), media_type="text/event-stream")
        return await _unless_gone(http, answer)

    async def models(http: HTTPRequest) -> Response:
        return JSONResponse(api.models(name))

    async def health(http: HTTPRequest) -> Response:
        blocks = engine.scheduler.blocks
        state = {
            "status": "failed" if engine.failed else "ok",
            "num_blocks": blocks.num_blocks,
            "free_blocks": blocks.num_free,
            "requests": engine.scheduler.num_requests,
        }
        return JSONResponse(state, 503 if engine.failed else 200)

    return Starlette(
        routes=[
            Route("/v1/completions", completions, methods=["POST"]),
            Route("/v1/models", models),
            Route("/health", health),
        ]
    )


class _Answer:
    """One request on its way through the engine, as the event loop sees it."""

    def __init__(self, engine: Engine, body: api.CompletionBody, model: str) -> None:
        self._engine, self._body, self._model = engine, body, model
        self._outputs: asyncio.Queue[Output] = asyncio.Queue()
        tokenizer, prompt = engine.tokenizer, body.prompt
        sampling = body.sampling()
        self._request = Request(
            id=f"cmpl-{uuid.uuid4().hex}",
            prompt=tokenizer.encode(prompt) if isinstance(prompt, str) else prompt,
            sampling=sampling,
            stream=TextStream(tokenizer, sampling.stop),
            emit=self._emitter(),
            kv_transfer_params=body.kv_transfer_params or {},
        )

    def submit(self) -> None:
        """ValueError when the engine refuses it."""
        self._engine.submit(self._request)

    def abort(self) -> None:
        self._engine.abort(self._request.id)

    async def whole(self) -> Response:
        outputs = [output async for output in self._all()]
        if outputs[-1].finish_reason in ("abort", "error"):
            return JSONResponse(api.error(500, "the engine stopped"), 500)
        return JSONResponse(self._piece(outputs))

    async def events(self) -> AsyncGenerator[bytes, None]:
        async for output in self._all():
            if output.finish_reason in ("abort", "error"):
                yield api.sse(api.error(500, "the engine stopped"))
            else:
                yield api.sse(self._piece([output]))
        yield api.sse("[DONE]")

    async def _all(self) -> AsyncGenerator[Output, None]:
        """All outputs; whoever stops reading before the last one gives the request up."""
        finished = False
        try:
            while not finished:
                output = await self._outputs.get()
                finished = output.finish_reason is not None
                yield output
        finally:
            if not finished:
                self.abort()

    def _piece(self, outputs: Sequence[Output]) -> dict[str, object]:
        usage = (len(self._request.prompt), len(self._request.output))
        return api.answer(self._request.id, self._model, self._body, outputs, usage)

    def _emitter(self) -> Callable[[Output], None]:
        loop, put = asyncio.get_running_loop(), self._outputs.put_nowait

        def emit(output: Output) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody listens
                loop.call_soon_threadsafe(put, output)

        return emit


async def _unless_gone(http: HTTPRequest, answer: _Answer) -> Response:
    """The whole answer, or nothing for a client that has left."""
    whole = asyncio.ensure_future(answer.whole())
    gone = asyncio.ensure_future(_disconnected(http))
    try:
        await asyncio.wait((whole, gone), return_when=asyncio.FIRST_COMPLETED)
        if gone.done():
            answer.abort()
            return Response(status_code=499)
        return whole.result()
    finally:
        whole.cancel()
        gone.cancel()


async def _disconnected(http: HTTPRequest) -> None:
    while (await http.receive())["type"] != "http.disconnect":
        pass


def _bind(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise ConfigError(f"cannot listen on {host}:{port}: {error.strerror}") from error
    return listener
