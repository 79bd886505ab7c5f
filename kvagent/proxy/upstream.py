"""What the proxy knows of the servers behind it, and how their failures are told."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import httpx

from kvagent.proxy.answer import Answer
from kvagent.proxy.servers import Pool, Server

logger = logging.getLogger("kvagent.proxy")


@dataclass(frozen=True)
class Limits:
    """What the proxy waits for and accepts; times in seconds."""

    connect_timeout: float = 3.0
    prefill_timeout: float = 300.0  # for the whole prefill
    decode_timeout: float = 600.0  # between two reads from the decode server
    cooldown: float = 5.0  # how long a server that failed is skipped
    max_body_bytes: int = 32 << 20


@dataclass(frozen=True)
class Upstreams:
    """The servers and the way to reach them."""

    client: httpx.AsyncClient
    prefill: Pool
    decode: Pool
    limits: Limits


class ServerFailed(Exception):
    """A server failed before any byte of its answer was passed on.

    `reason` is a word for the response header, `detail` a sentence for the log and the client;
    `answer` is what the server said, if it answered at all (a 5xx).
    """

    def __init__(self, reason: str, detail: str, answer: Answer | None = None) -> None:
        super().__init__(detail)
        self.reason = reason
        self.detail = detail
        self.answer = answer

    @classmethod
    def of(cls, error: httpx.TransportError | TimeoutError) -> ServerFailed:
        if isinstance(error, (httpx.ConnectError, httpx.ConnectTimeout)):
            reason = "connect"
        elif isinstance(error, (httpx.TimeoutException, TimeoutError)):
            reason = "timeout"
        else:
            reason = "broken"
        return cls(reason, f"{type(error).__name__} {error}".rstrip())

    @classmethod
    def status(cls, answer: Answer) -> ServerFailed:
        detail = f"HTTP {answer.status} {answer.body[:200].decode(errors='replace')}".rstrip()
        return cls(f"status-{answer.status}", detail, answer)


def log_failure(
    pool: Pool, server: Server, failure: ServerFailed, request_id: str, phase: str
) -> None:
    """The one line that a server's failure leaves in the log."""
    logger.warning(
        "upstream_failed request=%s kind=%s server=%s phase=%s reason=%s detail=%r",
        request_id,
        pool.kind,
        server.url,
        phase,
        failure.reason,
        failure.detail,
    )
