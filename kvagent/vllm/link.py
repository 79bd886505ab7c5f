"""The scheduler's connection to its leader sidecar, through the sidecar's deaths.

`Link` has the methods of `EngineClient` and keeps its contract: each request that was offered or
fetched comes out of `step()` once. When the sidecar is gone, calls raise and what was open is
reported as ended; a thread waits for the new sidecar, which the next call then uses.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping
from typing import Any

from kvagent.client.engine import EngineClient
from kvagent.core.output import KVConnectorOutput
from kvagent.errors import AgentError, KVAgentError

log = logging.getLogger("vllm.kvagent")

RETRY_SECONDS = 1.0


class Link:
    """For one thread, the scheduler's."""

    def __init__(self, path: str, ready_timeout: float) -> None:
        """Waits until the sidecars of all ranks are ready; `AgentError` says what is missing."""
        self._path = path
        self._ready_timeout = ready_timeout
        self._client = self._connect()
        self._next: EngineClient | None = None
        self._sending: set[str] = set()
        self._fetching: set[str] = set()
        self._over: KVConnectorOutput | None = None
        self._closing = False
        threading.Thread(target=self._keep, name="kvagent-link", daemon=True).start()

    def offer(self, request_id: str, block_ids: list[int], num_tokens: int) -> dict[str, Any]:
        """See `EngineClient.offer`."""
        ticket = self._newest().offer(request_id, block_ids, num_tokens)
        self._sending.add(request_id)
        return ticket

    def fetch(
        self, request_id: str, ticket: Mapping[str, Any], block_ids: list[int], start_token: int
    ) -> None:
        """See `EngineClient.fetch`."""
        self._newest().fetch(request_id, ticket, block_ids, start_token)
        self._fetching.add(request_id)

    def fetching(self, request_id: str) -> bool:
        """Whether `step()` has yet to report the end of this request's fetch."""
        return request_id in self._fetching

    def hold(self, ticket: Mapping[str, Any]) -> None:
        """See `EngineClient.hold`."""
        self._newest().hold(ticket)

    def release(self, ticket: Mapping[str, Any]) -> None:
        """See `EngineClient.release`."""
        self._newest().release(ticket)

    def cancel(self, request_id: str) -> None:
        """See `EngineClient.cancel`."""
        self._newest().cancel(request_id)

    def step(self) -> KVConnectorOutput:
        """See `EngineClient.step`; never raises."""
        client = self._newest()
        try:
            out = client.step()
        except AgentError:
            # The connection broke though the sidecar lives, and may still write. It ends our
            # transfers now, and a new client is ready when it has; until then nothing is reported.
            out = KVConnectorOutput()
        if self._over is not None:
            over, self._over = self._over, None
            out.finished_sending = (out.finished_sending or set()) | (
                over.finished_sending or set()
            )
            out.finished_recving = (out.finished_recving or set()) | (
                over.finished_recving or set()
            )
            out.failed_recving |= over.failed_recving
        if out.finished_sending:
            out.finished_sending &= self._sending  # a predecessor's may still be reported
            self._sending -= out.finished_sending
        if out.finished_recving:
            out.finished_recving &= self._fetching
            self._fetching -= out.finished_recving
        return out

    def close(self) -> None:
        self._closing = True
        self._client.close()

    def _newest(self) -> EngineClient:
        """The client of the sidecar that lives. What was open at the one before it is over."""
        if self._next is not None:
            self._client, self._next = self._next, None
            if self._sending or self._fetching:
                reason = "agent_lost: the sidecar of this engine was restarted"
                self._over = KVConnectorOutput(
                    finished_sending=set(self._sending),
                    finished_recving=set(self._fetching),
                    failed_recving=dict.fromkeys(self._fetching, reason),
                )
        return self._client

    def _connect(self) -> EngineClient:
        client = EngineClient(self._path)
        try:
            client.wait_ready(self._ready_timeout)
        except BaseException:
            client.close()
            raise
        return client

    def _keep(self) -> None:
        client = self._client
        while True:
            client.wait_lost()
            if self._closing:
                return
            log.error("the sidecar at %s is gone: prompts are computed here", self._path)
            client.close()
            while True:
                try:
                    client = self._connect()
                    break
                except KVAgentError as error:
                    log.debug("the sidecar at %s: %s", self._path, error)
                    time.sleep(RETRY_SECONDS)
                if self._closing:
                    return
            self._next = client
            log.info("the sidecar at %s is ready again", self._path)
