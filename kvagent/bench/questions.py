"""What the benchmark asks of a raw rank (see `raw`), as messages.

NIXL comes in several ways. `nixl`: with the settings that a sidecar uses. `nixl_default`: the
public API, as it comes; its progress threads spin a core each, so agents are made for one
measurement and ended with it. `nixl_plain`: UCX as it comes, but threads like a sidecar's.
`nixl_ordinary`: like `nixl`, in memory on ordinary pages. `cma` is `process_vm_readv`, `tcp` one
plain stream.
"""

from __future__ import annotations

import msgspec

__all__ = [
    "BASE",
    "NIXL_WAYS",
    "Expose",
    "Exposed",
    "Lists",
    "Place",
    "Placed",
    "Question",
    "Read",
    "Sources",
    "Timing",
    "Way",
]

BASE = 4096
"""Where the memory is said to begin in the rows that travel; each process puts its own there."""

Way = str
NIXL_WAYS = ("nixl", "nixl_plain", "nixl_default", "nixl_ordinary")


class Place(msgspec.Struct, frozen=True, tag=True):
    """Take that much memory, and as much on ordinary pages, too, if asked. -> `Placed`"""

    nbytes: int
    host: str
    ordinary: bool


class Placed(msgspec.Struct, frozen=True):
    """`port`: where plain bytes can be had over TCP, at `host`."""

    pid: int
    address: int
    ordinary: int
    host: str
    port: int


class Expose(msgspec.Struct, frozen=True, tag=True):
    """Be ready to be read from in this way, or in none any more: "". -> `Exposed`"""

    way: Way


class Exposed(msgspec.Struct, frozen=True):
    metadata: bytes


class Lists(msgspec.Struct, frozen=True):
    """What to read from one rank: rows as of `BASE`, and the two index arrays (int32) of each
    request."""

    source: Placed
    local_rows: bytes
    remote_rows: bytes
    requests: list[tuple[bytes, bytes]]


class Sources(msgspec.Struct, frozen=True, tag=True):
    """What will be read. -> bool"""

    lists: list[Lists]


class Read(msgspec.Struct, frozen=True, tag=True):
    """Read everything in this way; `metadata` of each source; at most `depth` requests at once.
    `nbytes`: what a TCP stream, which knows no requests, has to bring. -> `Timing`"""

    way: Way
    metadata: list[bytes]
    depth: int
    nbytes: int


class Timing(msgspec.Struct, frozen=True):
    seconds: float


Question = Place | Expose | Sources | Read
