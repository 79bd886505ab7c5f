"""The scheduler's half: which request is offered, fetched, released; and what has ended.

The life of a request that came with a ticket, on the decode side:

    new, held --blocks--> fetching --ended--> decode, or the prompt is computed here
     |                           |
     | aborted, or all but the   | aborted: cancel; vLLM frees the blocks when the fetch has ended
     | last token is cached here
     v
    released

On the prefill side a finished request is offered, and vLLM keeps its blocks until that has ended.
Every ticket is used once: a request that is preempted later computes its prompt.

Whole blocks are moved (see `geometry`), so an offer covers its last block to the end.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import msgspec
from vllm.v1.request import Request, RequestStatus

from kvagent.errors import KVAgentError, TicketError
from kvagent.vllm.link import Link
from kvagent.vllm.metadata import Ended
from kvagent.vllm.stats import KVAgentStats

log = logging.getLogger("vllm.kvagent")

COMPLETE = (RequestStatus.FINISHED_LENGTH_CAPPED, RequestStatus.FINISHED_STOPPED)
PROMPT_TOKENS = "remote_num_tokens"
"""The key of vLLM's kv_transfer_params that says how many tokens were computed."""


class SchedulerSide:
    """One per engine; all calls come from vLLM's scheduler."""

    def __init__(self, link: Link, block_size: int, *, produces: bool, consumes: bool) -> None:
        self._link = link
        self._block_size = block_size
        self._produces = produces
        self._consumes = consumes
        self._tickets: dict[str, Mapping[str, Any]] = {}
        """Of requests that have no blocks yet."""
        self._aborted: set[str] = set()
        """Requests whose fetch has yet to end, which is no failure then."""
        self._ended = Ended()
        self._stats = KVAgentStats()

    # ------------------------------------------------------------ decode side

    def new_request(self, request: Request) -> None:
        params = request.kv_transfer_params
        if not params or not params.get("do_remote_prefill"):
            return
        if request.abort_immediately:  # the API server refused it, and says so in this way
            self._release(params)
            return
        if not self._consumes:
            log.warning("request %s has a ticket, but kv_role is kv_producer", request.request_id)
            return
        try:
            self._check_ticket(params, request.num_prompt_tokens)
        except TicketError as error:
            log.warning("request %s is computed here: %s", request.request_id, error)
            self._stats.failed("ticket")
            self._release(params)
            return
        self._tickets[request.request_id] = params
        try:
            self._link.hold(params)  # it may wait for blocks longer than the lease
        except KVAgentError:
            pass  # the fetch will say it

    def matched_tokens(self, request: Request, num_computed_tokens: int) -> int:
        """Tokens to fetch beyond those that are cached here. The last one of a prompt is always
        computed, so it is not worth a fetch of its own."""
        if request.request_id not in self._tickets:
            return 0
        missing = request.num_prompt_tokens - num_computed_tokens
        return int(missing) if missing > 1 else 0

    def allocated(self, request: Request, block_ids: list[int], num_tokens: int) -> None:
        """The request has its blocks; `num_tokens`: how many tokens to fetch into them."""
        ticket = self._tickets.pop(request.request_id, None)
        if ticket is None:
            return
        if num_tokens == 0:
            self._release(ticket)
            self._stats.add("not_needed", 1)
            return
        start = request.num_prompt_tokens - num_tokens
        assert start % self._block_size == 0
        blocks = block_ids[: self._blocks_of(request.num_prompt_tokens)]
        try:
            self._link.fetch(request.request_id, ticket, blocks, start)
        except KVAgentError as error:  # nothing was started, so nothing will be reported
            self._fetch_failed(request.request_id, f"not_started: {error}")
            self._ended.received.add(request.request_id)

    # ------------------------------------------------------------ both sides

    def finished(self, request: Request, block_ids: list[int]) -> dict[str, Any] | None:
        """The ticket for a finished prefill, whose blocks then stay until `ended` has it in
        `sent`. None for any other request."""
        request_id = request.request_id
        ticket = self._tickets.pop(request_id, None)
        if ticket is not None:
            self._release(ticket)
            return None
        if self._link.fetching(request_id):
            self._aborted.add(request_id)
            try:
                self._link.cancel(request_id)
            except KVAgentError:
                pass  # the sidecar is in trouble, and `step` will tell
            return None
        params = request.kv_transfer_params
        if not params or not params.get("do_remote_decode") or request.status not in COMPLETE:
            return None
        if not self._produces:
            log.warning("request %s: nothing is offered, kv_role is kv_consumer", request_id)
            return None
        num_tokens = min(request.num_computed_tokens, request.num_prompt_tokens)
        blocks = block_ids[: self._blocks_of(num_tokens)]
        if not blocks:
            return None
        try:
            offered = self._link.offer(request_id, blocks, len(blocks) * self._block_size)
        except KVAgentError as error:
            log.warning("request %s is not offered: %s", request_id, error)
            self._stats.failed("offer")
            return None
        return {**offered, PROMPT_TOKENS: num_tokens}

    def ended(self) -> Ended:
        """What has ended since it was last asked for; the workers are to report it."""
        self._poll()
        ended, self._ended = self._ended, Ended()
        return ended

    def ended_well(self) -> tuple[set[str], set[str]]:
        """Requests sent, and requests received, of which the workers have nothing to say."""
        self._poll()
        sent, received = self._ended.sent, self._ended.received - self._ended.failed
        self._ended.sent = set()
        self._ended.received -= received
        return sent, received

    def take_stats(self) -> KVAgentStats | None:
        if self._stats.is_empty():
            return None
        stats, self._stats = self._stats, KVAgentStats()
        return stats

    def close(self) -> None:
        self._link.close()

    # ------------------------------------------------------------ inside

    def _poll(self) -> None:
        out = self._link.step()
        if out.finished_sending:
            self._ended.sent |= out.finished_sending
        if out.finished_recving:
            fetches = msgspec.to_builtins(out.kv_connector_stats or {}).get("fetches", {})
            for request_id in out.finished_recving:
                self._ended.received.add(request_id)
                if request_id in self._aborted:
                    self._aborted.remove(request_id)
                elif request_id in out.failed_recving:
                    self._fetch_failed(request_id, out.failed_recving[request_id])
                elif request_id in fetches:
                    self._stats.fetched(fetches[request_id])

    def _blocks_of(self, num_tokens: int) -> int:
        return -(-num_tokens // self._block_size)

    def _check_ticket(self, params: Mapping[str, Any], num_tokens: int) -> None:
        ours = params.get("kvagent")
        if not isinstance(ours, Mapping):
            raise TicketError(
                "its kv_transfer_params are not kvagent's; was the prefill server started with "
                "KVAgentConnector, and does the router pass them through unchanged?"
            )
        offered = (params.get(PROMPT_TOKENS), ours.get("num_tokens"))
        if offered != (num_tokens, self._blocks_of(num_tokens) * self._block_size):
            raise TicketError(
                f"its ticket is for a prompt of {offered[0]} tokens in blocks for {offered[1]}; "
                f"this prompt has {num_tokens}, in blocks of {self._block_size}"
            )

    def _fetch_failed(self, request_id: str, reason: str) -> None:
        log.warning("request %s: its KV was not fetched: %s", request_id, reason)
        self._ended.failed.add(request_id)
        self._stats.failed(reason.split(":")[0])

    def _release(self, ticket: Mapping[str, Any]) -> None:
        try:
            self._link.release(ticket)
        except KVAgentError:
            pass  # the lease at the producer ends by itself
