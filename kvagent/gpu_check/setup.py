"""What is checked: sides, cases, and the messages between the check and its ranks' processes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

__all__ = ["Answer", "Case", "Command", "RankSetup", "Side", "cases"]

NHD = ("kv", "block", "token", "head", "channel")
HND = ("block", "kv", "head", "token", "channel")


class Side(msgspec.Struct, frozen=True, kw_only=True):
    """One engine. `device` is `cpu` or `cuda`; `env` is for its processes."""

    device: str
    axes: tuple[str, ...] = NHD
    block_size: int = 16
    tp: int = 1
    kv_buffer: str = "device"
    env: dict[str, str] = {}


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """A pair of engines. `sidecars`: their agents are processes of their own, which own the cache.
    `measure`: one large transfer too; `event`: an offer before its bytes are there."""

    name: str
    producer: Side
    consumer: Side
    sidecars: bool = False
    measure: bool = False
    event: bool = False


def cases(device: str) -> Iterator[Case]:
    """All that there are for a device; those that only a GPU makes different, on a GPU only."""
    gpu = device != "cpu"

    def side(**more: Any) -> Side:
        return Side(device=device, **more)

    yield Case(
        name="embedded, same layout",
        producer=side(),
        consumer=side(),
        measure=True,
        event=gpu,
    )
    yield Case(
        name="sidecars, same layout",
        producer=side(),
        consumer=side(),
        sidecars=True,
        measure=True,
    )
    yield Case(
        name="embedded, tokens outside to heads outside, blocks 16 to 8",
        producer=side(),
        consumer=side(axes=HND, block_size=8),
    )
    yield Case(
        name="sidecars, heads outside to tokens outside",
        producer=side(axes=HND),
        consumer=side(),
        sidecars=True,
    )
    yield Case(name="embedded, tp 2 to 1", producer=side(tp=2), consumer=side(axes=HND))
    yield Case(name="sidecars, tp 1 to 2", producer=side(), consumer=side(tp=2), sidecars=True)
    tcp = {"UCX_TLS": "tcp,cuda" if gpu else "tcp"}
    yield Case(
        name="embedded, over TCP",
        producer=side(env=tcp),
        consumer=side(env=tcp),
        measure=True,
    )
    if not gpu:
        return
    host, mirrored = Side(device="cpu"), side(kv_buffer="host")
    yield Case(name="embedded, GPU to host", producer=side(), consumer=host)
    yield Case(name="embedded, host to GPU", producer=host, consumer=side(axes=HND))
    yield Case(name="embedded, mirror to GPU", producer=mirrored, consumer=side(), event=True)
    yield Case(
        name="sidecars, GPU to mirror",
        producer=side(),
        consumer=side(kv_buffer="host", axes=HND),
        sidecars=True,
    )


class RankSetup(msgspec.Struct, frozen=True, kw_only=True):
    """What a rank's process is started with. `socket` is its sidecar's; empty: it embeds one."""

    engine_id: str
    rank: int
    side: Side
    socket: str
    leader: str | None
    parent: int
    heads: int = 8
    head_size: int = 128
    layers: int = 8
    num_tokens: int = 4096
    """Of the cache."""


class Command(msgspec.Struct, frozen=True, kw_only=True):
    """A line to a rank. Which fields matter follows from `do`."""

    do: str
    name: str = ""
    blocks: tuple[int, ...] = ()
    start: int = 0
    tokens: int = 0
    ticket: dict[str, Any] = {}
    late: bool = False
    """`offer`: with an event, before the bytes are there."""


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """A line from a rank. `failure` is empty when it could do what it was told."""

    failure: str = ""
    endpoint: str = ""
    ticket: dict[str, Any] = {}
    stats: dict[str, float] = {}
    digests: dict[str, str] = {}
    """By global head, of the tokens asked for, in every layer."""
    clean: bool = True
    """Whether nothing outside those tokens was written."""
    seconds: float = 0.0
    pending: bool = False
    """Whether the event had yet to pass when the offer was made."""
