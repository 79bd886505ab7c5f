"""HTTP detail: whole answers, OpenAI's error shape, and which headers pass through."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import httpx
import msgspec
from starlette.types import Send

RawHeaders = list[tuple[bytes, bytes]]

# Headers of one connection, not of the message (RFC 9110, section 7.6.1).
_HOP_BY_HOP = frozenset(
    b"connection keep-alive proxy-authenticate proxy-authorization proxy-connection te trailer "
    b"transfer-encoding upgrade".split()
)
# The proxy writes these itself. `accept-encoding` because a ticket must be readable and a stream
# must pass as it is; `expect` is answered before the body is read.
_REQUEST_OWN = _HOP_BY_HOP | frozenset(
    b"host content-length content-type accept-encoding expect x-request-id".split()
)
# `date` and `server` are added by the HTTP server, the length by whoever sends the body.
_RESPONSE_OWN = _HOP_BY_HOP | frozenset(b"date server content-length x-request-id".split())


@dataclass(frozen=True)
class Answer:
    """A whole response, body included."""

    status: int
    headers: RawHeaders
    body: bytes

    async def send(self, send: Send, extra: RawHeaders) -> None:
        """Send it over ASGI, with `extra` headers."""
        length = (b"content-length", str(len(self.body)).encode())
        headers = [*self.headers, *extra, length]
        await send({"type": "http.response.start", "status": self.status, "headers": headers})
        await send({"type": "http.response.body", "body": self.body})


def error_json(status: int, message: str) -> bytes:
    """OpenAI's error object."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    error = {"message": message, "type": kind, "param": None, "code": status}
    return msgspec.json.encode({"error": error})


def error_answer(status: int, message: str) -> Answer:
    """An error of the proxy's own, in OpenAI's shape."""
    headers = [(b"content-type", b"application/json")]
    return Answer(status, headers, error_json(status, message))


async def read_answer(upstream: httpx.Response) -> Answer:
    """Read an upstream response to its end; raises `httpx.TransportError`."""
    body = b"".join([chunk async for chunk in upstream.aiter_raw()])
    return Answer(upstream.status_code, response_headers(upstream), body)


def request_headers(headers: Iterable[tuple[bytes, bytes]], request_id: str) -> RawHeaders:
    """The client's headers as they go to a server (names in lower case, as ASGI has them)."""
    return [
        *_without(headers, _REQUEST_OWN),
        (b"content-type", b"application/json"),
        (b"accept-encoding", b"identity"),
        (b"x-request-id", request_id.encode("ascii")),
    ]


def response_headers(upstream: httpx.Response) -> RawHeaders:
    """A server's headers as they go to the client, names in lower case."""
    lowered = [(name.lower(), value) for name, value in upstream.headers.raw]
    return _without(lowered, _RESPONSE_OWN)


def _without(headers: Iterable[tuple[bytes, bytes]], dropped: frozenset[bytes]) -> RawHeaders:
    headers = list(headers)
    for name, value in headers:
        if name == b"connection":  # it may name more headers of this connection
            dropped |= {token.strip().lower() for token in value.split(b",")}
    return [(name, value) for name, value in headers if name not in dropped]
