"""One request, from its parsed body to the last byte of its answer.

    prefill --ticket----------> decode --first byte--> relay --> done
       |                          |                      |
       | failed: no ticket,       | failed: the next     | failed: an SSE error event,
       |   decode alone           |   server, no ticket  |   or 502 when it is no stream
       | 4xx: the client's answer | failed again: 502,   |
       |                          |   or the server's 5xx|

Nothing is sent to the client before the decode server's first body byte, which is what lets the
decode be repeated. A ticket is single use, so a repeated decode computes the prompt itself.

A client that goes away cancels whatever runs: the upstream connection closes, and the engine
behind it aborts the request. A decode engine that already has the ticket releases it then. A
ticket that has not reached a decode engine cannot be released through OpenAI's API, and the proxy
has no channel to the sidecars; its lease runs out, as it does for any consumer that dies.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack

import anyio
import httpx
from starlette.types import Receive, Scope, Send

from kvagent.proxy.answer import (
    Answer,
    RawHeaders,
    error_answer,
    error_json,
    read_answer,
    response_headers,
)
from kvagent.proxy.request import CompletionRequest, Ticket, read_ticket
from kvagent.proxy.servers import Pool, Server
from kvagent.proxy.upstream import ServerFailed, Upstreams, log_failure, logger


class Exchange:
    """An ASGI response that is made while it is sent; see the module's docstring."""

    def __init__(
        self,
        upstreams: Upstreams,
        path: str,
        headers: RawHeaders,
        request_id: str,
        request: CompletionRequest,
    ) -> None:
        self._up = upstreams
        self._path = path
        self._headers = headers
        self._request_id = request_id
        self._request = request
        self._phase = "prefill"
        self._prefill_note = "ok"
        self._prefill_ms: float | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with anyio.create_task_group() as group:

            async def cancel_when_client_leaves() -> None:
                while (await receive())["type"] != "http.disconnect":
                    pass
                if self._phase != "done":
                    logger.info("client_gone request=%s phase=%s", self._request_id, self._phase)
                group.cancel_scope.cancel()

            group.start_soon(cancel_when_client_leaves)
            await self._run(send)
            group.cancel_scope.cancel()

    async def _run(self, send: Send) -> None:
        prefilled = await self._prefill()
        if isinstance(prefilled, Answer):
            await self._send_whole(prefilled, send)
        else:
            self._phase = "decode"
            await self._decode(prefilled, send)

    # -- prefill -----------------------------------------------------------------------------

    async def _prefill(self) -> Ticket | Answer | None:
        """A ticket; or the client's answer, when its request is bad; or None: decode alone."""
        if self._request.is_batch:
            self._fall_back("batch")
            return None
        server = self._up.prefill.pick(time.monotonic())
        if server is None:
            self._fall_back("cooldown")
            return None
        started = time.perf_counter()
        try:
            prefilled = await self._prefill_on(server)
        except ServerFailed as failure:
            self._blame(self._up.prefill, server, failure)
            self._fall_back(failure.reason)
            return None
        finally:
            self._prefill_ms = (time.perf_counter() - started) * 1e3
        self._up.prefill.succeeded(server)
        if prefilled is None:  # its right: a prompt may be too short to be worth a transfer
            self._fall_back("no-ticket")
            return None
        return prefilled

    async def _prefill_on(self, server: Server) -> Ticket | Answer | None:
        try:
            with anyio.fail_after(self._up.limits.prefill_timeout):
                async with self._post(server, self._request.prefill_body()) as upstream:
                    answer = await read_answer(upstream)
        except (httpx.TransportError, TimeoutError) as error:
            raise ServerFailed.of(error) from error
        if 400 <= answer.status < 500:
            self._prefill_note = "refused"
            return answer
        if answer.status != 200:
            raise ServerFailed.status(answer)
        try:
            return read_ticket(answer.body)
        except ValueError as error:
            raise ServerFailed("malformed", str(error)) from error

    def _fall_back(self, reason: str) -> None:
        self._prefill_note = f"fallback; reason={reason}"

    # -- decode ------------------------------------------------------------------------------

    async def _decode(self, ticket: Ticket | None, send: Send) -> None:
        pool = self._up.decode
        server = pool.pick_any(time.monotonic())
        try:
            return await self._decode_on(server, ticket, send)
        except ServerFailed as failure:
            # A 5xx to a request with a ticket may be the fault of the transfer or of the prefill
            # engine, so it is not held against this server.
            if ticket is None or failure.answer is None:
                self._blame(pool, server, failure)
            else:
                log_failure(pool, server, failure, self._request_id, self._phase)
        if ticket is not None:
            self._fall_back("decode-retry")
        server = pool.pick_any(time.monotonic(), avoid=server)
        try:
            return await self._decode_on(server, None, send)
        except ServerFailed as failure:
            self._blame(pool, server, failure)
            message = f"two tries at decoding failed, the last with: {failure.detail}"
            return await self._send_whole(failure.answer or error_answer(502, message), send)

    async def _decode_on(self, server: Server, ticket: Ticket | None, send: Send) -> None:
        """Answer the client from this server; `ServerFailed` only while nothing was sent."""
        body = self._request.decode_body(ticket)
        async with AsyncExitStack() as stack:
            try:
                upstream = await stack.enter_async_context(self._post(server, body))
                if upstream.status_code >= 500:
                    raise ServerFailed.status(await read_answer(upstream))
                chunks = upstream.aiter_raw()
                first = await anext(chunks, b"")
            except httpx.TransportError as error:
                raise ServerFailed.of(error) from error
            self._up.decode.succeeded(server)
            relay = self._relay_stream if _is_sse(upstream) else self._relay_whole
            await relay(server, upstream, first, chunks, send)

    async def _relay_stream(
        self,
        server: Server,
        upstream: httpx.Response,
        first: bytes,
        chunks: AsyncIterator[bytes],
        send: Send,
    ) -> None:
        """Pass the events on as they come."""
        self._phase = "relay"
        headers = [*response_headers(upstream), *self._own_headers()]
        await send(
            {"type": "http.response.start", "status": upstream.status_code, "headers": headers}
        )
        await send({"type": "http.response.body", "body": first, "more_body": True})
        tail = first
        try:
            async for chunk in chunks:
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
                tail = (tail + chunk)[-4:]
        except httpx.TransportError as error:
            message = self._lost_midway(server, error)
            # An event that was cut short is ended first, or ours would become a part of it.
            gap = b"" if tail.endswith((b"\n\n", b"\r\n\r\n")) else b"\n\n"
            event = gap + b"data: " + error_json(502, message) + b"\n\n"
            await send({"type": "http.response.body", "body": event, "more_body": True})
        self._phase = "done"
        await send({"type": "http.response.body", "body": b""})

    async def _relay_whole(
        self,
        server: Server,
        upstream: httpx.Response,
        first: bytes,
        chunks: AsyncIterator[bytes],
        send: Send,
    ) -> None:
        """Pass the answer on once it is complete, so that a broken one can still become a 502."""
        try:
            body = first + b"".join([chunk async for chunk in chunks])
        except httpx.TransportError as error:
            answer = error_answer(502, self._lost_midway(server, error))
        else:
            answer = Answer(upstream.status_code, response_headers(upstream), body)
        await self._send_whole(answer, send)

    def _lost_midway(self, server: Server, error: httpx.TransportError) -> str:
        failure = ServerFailed.of(error)
        self._blame(self._up.decode, server, failure)
        return f"the decode server failed in the middle of its answer: {failure.detail}"

    # -- both --------------------------------------------------------------------------------

    def _post(self, server: Server, body: bytes) -> AbstractAsyncContextManager[httpx.Response]:
        url = server.url + self._path
        return self._up.client.stream("POST", url, content=body, headers=self._headers)

    async def _send_whole(self, answer: Answer, send: Send) -> None:
        self._phase = "done"
        await answer.send(send, self._own_headers())

    def _own_headers(self) -> RawHeaders:
        headers = [
            (b"x-request-id", self._request_id.encode("ascii")),
            (b"x-kvagent-prefill", self._prefill_note.encode("ascii")),
        ]
        if self._prefill_ms is not None:
            headers.append((b"x-kvagent-prefill-ms", b"%.1f" % self._prefill_ms))
        return headers

    def _blame(self, pool: Pool, server: Server, failure: ServerFailed) -> None:
        pool.failed(server, time.monotonic(), failure.detail)
        log_failure(pool, server, failure, self._request_id, self._phase)


def _is_sse(upstream: httpx.Response) -> bool:
    content_type: str = upstream.headers.get("content-type", "")
    return content_type.split(";")[0].strip().lower() == "text/event-stream"
