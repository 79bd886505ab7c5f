"""The ticket: what a producer's scheduler gives away so that a consumer can fetch.

A plain dict that survives JSON. Its outer keys are the ones that vLLM's routers pass through as
`kv_transfer_params`; the key `kvagent` holds what is ours. A ticket is good for one fetch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import msgspec

from kvagent.errors import TicketError
from kvagent.wire.codec import BlockIds, pack_blocks
from kvagent.wire.messages import PROTOCOL, Ready


class Inner(msgspec.Struct, frozen=True, kw_only=True):
    transfer_id: str
    token: str
    num_tokens: int
    epoch: str
    protocol: int
    lease_seconds: float


class Ticket(msgspec.Struct, frozen=True, kw_only=True):
    remote_engine_id: str
    remote_block_ids: list[int | list[int]]
    remote_host: str
    remote_port: int
    kvagent: Inner

    @property
    def token(self) -> bytes:
        return bytes.fromhex(self.kvagent.token)

    def blocks(self) -> tuple[bytes, ...]:
        return pack_blocks(cast("BlockIds", self.remote_block_ids))


def make_ticket(
    ready: Ready,
    request_id: str,
    transfer_id: str,
    token: bytes,
    block_ids: BlockIds,
    num_tokens: int,
) -> dict[str, Any]:
    """The dict for `kv_transfer_params`."""
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_engine_id": ready.engine_id,
        "remote_request_id": request_id,
        "remote_block_ids": block_ids,
        "remote_host": ready.host,
        "remote_port": ready.port,
        "tp_size": ready.tp_size,
        "kvagent": {
            "transfer_id": transfer_id,
            "token": token.hex(),
            "num_tokens": num_tokens,
            "epoch": ready.epoch,
            "protocol": PROTOCOL,
            "lease_seconds": ready.lease_seconds,
        },
    }


def read_ticket(ticket: Mapping[str, Any]) -> Ticket:
    """Checks a ticket that came from outside; `TicketError` names what is wrong with it."""
    if not isinstance(ticket, Mapping) or "kvagent" not in ticket:
        raise TicketError(
            "this is not a kvagent ticket (no key 'kvagent'): was the prefill server started "
            "with kvagent, and does the router pass kv_transfer_params through unchanged?"
        )
    try:
        parsed = msgspec.convert(ticket, Ticket)
    except msgspec.ValidationError as error:
        raise TicketError(f"malformed ticket: {error}") from error
    inner = parsed.kvagent
    if inner.protocol != PROTOCOL:
        raise TicketError(f"ticket of protocol {inner.protocol}, this is protocol {PROTOCOL}")
    try:
        good_token = len(parsed.token) == 16
    except ValueError:
        good_token = False
    if not good_token or not 0 < len(inner.transfer_id) <= 64:
        raise TicketError("malformed ticket: transfer_id and token are not ones that we made")
    if not 0 < parsed.remote_port < 65536 or inner.num_tokens < 1:
        raise TicketError("malformed ticket: remote_port or num_tokens out of range")
    return parsed
