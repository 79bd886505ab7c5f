"""Everything that makes this an engine with disaggregation: all calls of kvagent are here.

An engine of another make needs the same six places:

  1. each worker joins its sidecar and gets its cache memory from there   `join_sidecar`
  2. a finished prefill is offered, its blocks are kept                   `Transfers.offer`
  3. a request with a ticket fetches instead of computing                 `Transfers.fetch`
  4. a request that is given up is said to be                             `release`, `cancel`
  5. once a step, the scheduler asks what has finished                    `Transfers.poll`
  6. threads wait for the end of a sidecar: whoever supervises this
     engine starts it again, and it joins as at first                     `wait_lost`

And one rule: **blocks that were named in an offer or a fetch are not used for anything else until
`poll` reports that request**, whatever happens in between. A fetch that failed is no error: the
prompt is computed here, as if there had been no ticket.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec
import torch
from torch import Tensor

from kvagent import EngineClient, FullAttentionSpec, ModelInfo, WorkerClient, WorkerInfo
from kvagent.demo.config import EngineOptions, ModelConfig
from kvagent.demo.request import Request
from kvagent.errors import KVAgentError, TicketError

READY_TIMEOUT = 60.0
"""Seconds until the sidecars of all ranks must be there."""


def join_sidecar(
    options: EngineOptions,
    config: ModelConfig,
    revision: str,
    rank: int,
    leader: str | None,
    device: torch.device | str = "cpu",
) -> tuple[WorkerClient, dict[str, Tensor]]:
    """The connection of this rank's worker, and its cache tensors by layer name.

    The tensors are memory of the sidecar, on the host or on a GPU. It outlives this process, so a
    peer that is reading when we crash still reads what it was promised.
    """
    assert options.socket_template is not None
    worker = WorkerClient(options.socket_template.format(rank=rank))
    model = ModelInfo(
        name=config.name, revision=revision, dtype=options.kv_dtype, num_layers=config.num_layers
    )
    worker.join(
        WorkerInfo(
            engine_id=options.engine_id,
            tp_rank=rank,
            tp_size=options.tp,
            leader=leader,  # rank 0's `worker.endpoint`; None for rank 0 itself
            model=model,
        )
    )
    spec = FullAttentionSpec(
        block_size=options.block_size,
        num_kv_heads=config.num_kv_heads,  # of the whole model: our share follows from the rank
        head_size=config.head_size,
        dtype=options.kv_dtype,
        axes=options.axes,
    )
    specs = dict.fromkeys(layer_names(config), spec)
    return worker, worker.allocate_kv_caches(specs, options.num_blocks, device)


def connect_scheduler(options: EngineOptions) -> Transfers:
    """Waits until all ranks have joined; call it in rank 0 when they have been told to."""
    assert options.socket_template is not None
    client = EngineClient(options.socket_template.format(rank=0))
    client.wait_ready(timeout=READY_TIMEOUT)
    return Transfers(client, options.block_size)


def layer_names(config: ModelConfig) -> list[str]:
    """What both engines call their layers; layers are matched by name."""
    return [f"model.layers.{index}" for index in range(config.num_layers)]


@dataclass
class Progress:
    """What has finished: blocks that no peer reads any more, and requests whose fetch has ended,
    each with the reason why it failed (None: every byte is there)."""

    sent: list[list[int]] = field(default_factory=list)
    fetched: list[tuple[Request, str | None]] = field(default_factory=list)


class Transfers:
    """The scheduler's side; used from the engine's thread only."""

    def __init__(self, client: EngineClient, block_size: int) -> None:
        self._client = client
        self._block_size = block_size
        self._offered: dict[str, list[int]] = {}
        self._fetching: dict[str, Request] = {}
        self._lost: Progress = Progress()

    def offer(self, request: Request) -> Mapping[str, Any] | None:
        """The ticket for the prompt's KV. `request.blocks` are kept until `poll` returns them;
        None when the sidecar takes no offers now, and then they are the caller's."""
        try:
            ticket = self._client.offer(
                request.id, self._prompt_blocks(request), num_tokens=len(request.prompt)
            )
        except KVAgentError as error:
            request.kv_transfer["failed"] = str(error)
            return None
        self._offered[request.id] = request.blocks
        return ticket

    def fetch(self, request: Request, start_token: int) -> None:
        """Have the KV of the prompt, from `start_token` on, read into `request.blocks`."""
        self._fetching[request.id] = request
        try:
            check_ticket(request.kv_transfer_params, len(request.prompt))
            self._client.fetch(
                request.id,
                request.kv_transfer_params,
                self._prompt_blocks(request),  # from token 0; those before start_token are kept
                start_token=start_token,
            )
        except KVAgentError as error:  # nothing was started, so nothing will be reported
            self._lost.fetched.append((self._fetching.pop(request.id), str(error)))

    def release(self, request: Request) -> None:
        """The ticket is not needed: a full prefix hit, a refused request, one given up early."""
        try:
            self._client.release(request.kv_transfer_params)
        except KVAgentError:
            pass  # the lease at the producer ends by itself

    def cancel(self, request_id: str) -> None:
        """Nobody wants the request any more. `poll` still reports its end, maybe at once."""
        if request_id in self._offered or request_id in self._fetching:
            try:
                self._client.cancel(request_id)
            except KVAgentError:
                pass  # the sidecar is in trouble, and `poll` will tell

    def poll(self) -> Progress:
        """What has finished since the last call. Takes microseconds when nothing has."""
        progress, self._lost = self._lost, Progress()
        out = self._client.step()
        stats = msgspec.to_builtins(out.kv_connector_stats) or {}
        for request_id in out.finished_sending or ():
            if request_id in self._offered:
                progress.sent.append(self._offered.pop(request_id))
        for request_id in out.finished_recving or ():
            if request_id in self._fetching:
                request = self._fetching.pop(request_id)
                request.kv_transfer.update(stats.get("fetches", {}).get(request_id, {}))
                progress.fetched.append((request, out.failed_recving.get(request_id)))
        return progress

    @property
    def fetching(self) -> int:
        """Fetches whose end `poll` has yet to report."""
        return len(self._fetching) + len(self._lost.fetched)

    @property
    def offered(self) -> int:
        """Offers whose end `poll` has yet to report."""
        return len(self._offered)

    def wait_lost(self) -> None:
        """Returns when rank 0's sidecar is gone, or after `close`. For a thread of its own."""
        self._client.wait_lost()

    def close(self) -> None:
        self._client.close()

    def _prompt_blocks(self, request: Request) -> list[int]:
        return request.blocks[: -(-len(request.prompt) // self._block_size)]


def check_ticket(ticket: Mapping[str, Any], num_tokens: int) -> None:
    """Raises `TicketError` unless the ticket is for a prompt of this length."""
    ours = ticket.get("kvagent")
    offered = ours.get("num_tokens") if isinstance(ours, Mapping) else None
    if offered != num_tokens:
        raise TicketError(
            f"the ticket is for a prompt of {offered} tokens, this one has {num_tokens}"
        )
