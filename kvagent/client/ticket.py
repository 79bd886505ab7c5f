"""The ticket: what a producer's scheduler gives away so that a consumer can fetch.

A plain dict that survives JSON. Its outer keys are the ones that vLLM's routers pass through as
`kv_transfer_params`; the key `kvagent` holds what is ours. A ticket is good for one fetch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec

from kvagent.errors import BlockRangeError, TicketError
from kvagent.visible.trace import checked, current_traceparent
from kvagent.wire.codec import MAX_BLOCKS, BlockIds, pack_blocks, unpack_blocks
from kvagent.wire.messages import PROTOCOL, Ready

Name = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
Token = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{32}$", max_length=32)]


class Inner(msgspec.Struct, frozen=True, kw_only=True):
    transfer_id: Annotated[str, msgspec.Meta(min_length=1, max_length=64)]
    token: Token
    num_tokens: Annotated[int, msgspec.Meta(ge=1, le=MAX_BLOCKS << 16)]
    epoch: Name
    protocol: int
    lease_seconds: float
    deferred: bool = False
    """The bytes may not be there before the claim is granted: nothing is read before."""
    traceparent: Any = ""
    """W3C trace context of the request; anything that is none is taken for none."""


class Outer(msgspec.Struct, frozen=True, kw_only=True):
    remote_engine_id: Name
    remote_block_ids: list[Any]
    remote_host: Name
    remote_port: Annotated[int, msgspec.Meta(ge=1, le=65535)]
    kvagent: Inner


@dataclass(frozen=True, slots=True)
class Ticket:
    """A ticket that has been checked; `blocks` as `pack_blocks` makes them."""

    engine_id: str
    host: str
    port: int
    epoch: str
    transfer_id: str
    token: bytes
    num_tokens: int
    blocks: tuple[bytes, ...]
    traceparent: str = ""
    deferred: bool = False


def make_ticket(
    ready: Ready,
    request_id: str,
    transfer_id: str,
    token: bytes,
    block_ids: BlockIds,
    num_tokens: int,
    deferred: bool = False,
) -> dict[str, Any]:
    """The dict for `kv_transfer_params`. With OpenTelemetry in use, it names the span that the
    calling thread is in."""
    inner: dict[str, Any] = {
        "transfer_id": transfer_id,
        "token": token.hex(),
        "num_tokens": num_tokens,
        "epoch": ready.epoch,
        "protocol": PROTOCOL,
        "lease_seconds": ready.lease_seconds,
    }
    if deferred:
        inner["deferred"] = True
    if traceparent := current_traceparent():
        inner["traceparent"] = traceparent
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_engine_id": ready.engine_id,
        "remote_request_id": request_id,
        "remote_block_ids": _copied(block_ids),
        "remote_host": ready.host,
        "remote_port": ready.port,
        "tp_size": ready.tp_size,
        "kvagent": inner,
    }


def _copied(block_ids: BlockIds) -> list[Any]:
    """Lists that are the ticket's own: the engine's go on changing."""
    if type(block_ids) is list and (not block_ids or type(block_ids[0]) is int):
        return list(block_ids)
    lists = [group.tolist() for group in unpack_blocks(pack_blocks(block_ids))]
    return lists if len(lists) > 1 else lists[0]


def read_ticket(ticket: Mapping[str, Any]) -> Ticket:
    """Checks a ticket that came from outside; `TicketError` names what is wrong with it."""
    if not isinstance(ticket, Mapping) or "kvagent" not in ticket:
        raise TicketError(
            "this is not a kvagent ticket (no key 'kvagent'): was the prefill server started "
            "with kvagent, and does the router pass kv_transfer_params through unchanged?"
        )
    inner = ticket["kvagent"]
    if isinstance(inner, Mapping) and inner.get("protocol", PROTOCOL) != PROTOCOL:
        raise TicketError(f"ticket of protocol {inner['protocol']!r}, this is protocol {PROTOCOL}")
    try:
        outer = msgspec.convert(ticket, Outer)
        blocks = pack_blocks(outer.remote_block_ids)
        (outer.remote_engine_id + outer.remote_host).encode()
        (outer.kvagent.epoch + outer.kvagent.transfer_id).encode()
    except BlockRangeError as error:
        raise TicketError(f"malformed ticket: remote_block_ids: {error}") from error
    except (msgspec.ValidationError, UnicodeEncodeError) as error:
        raise TicketError(f"malformed ticket: {error}") from error
    return Ticket(
        engine_id=outer.remote_engine_id,
        host=outer.remote_host,
        port=outer.remote_port,
        epoch=outer.kvagent.epoch,
        transfer_id=outer.kvagent.transfer_id,
        token=bytes.fromhex(outer.kvagent.token),
        num_tokens=outer.kvagent.num_tokens,
        blocks=blocks,
        traceparent=checked(outer.kvagent.traceparent),
        deferred=outer.kvagent.deferred,
    )
