"""What the soak and the processes of its engines say to each other, over pipes."""

from __future__ import annotations

from multiprocessing.connection import Connection
from typing import Any, Generic, TypeVar

import msgspec

T = TypeVar("T")


class Offer(msgspec.Struct, frozen=True, tag=True):
    """Fill blocks with `spans` and offer them `copies` times."""

    request: str
    spans: list[tuple[int, int]]
    copies: int = 1


class Fetch(msgspec.Struct, frozen=True, tag=True):
    request: str
    ticket: dict[str, Any]
    spans: list[tuple[int, int]]
    start_token: int = 0
    spare_blocks: int = 0


class Cancel(msgspec.Struct, frozen=True, tag=True):
    request: str


class Release(msgspec.Struct, frozen=True, tag=True):
    ticket: dict[str, Any]


class DropPeer(msgspec.Struct, frozen=True, tag=True):
    engine_id: str


class Check(msgspec.Struct, frozen=True, tag=True):
    """Look at every free block."""


class Join(msgspec.Struct, frozen=True, tag=True):
    """To a worker: join the sidecar, which may still be starting."""


Command = Offer | Fetch | Cancel | Release | DropPeer | Check | Join


class Up(msgspec.Struct, frozen=True, tag=True):
    """From a worker: joined; from a scheduler: attached and ready. `refusals` came before."""

    refusals: list[str]


class Offered(msgspec.Struct, frozen=True, tag=True):
    request: str
    tickets: list[dict[str, Any]]


class Refused(msgspec.Struct, frozen=True, tag=True):
    """The call raised `reason`, so nothing was begun; or there were no free blocks."""

    request: str
    reason: str


class Sent(msgspec.Struct, frozen=True, tag=True):
    request: str


class Received(msgspec.Struct, frozen=True, tag=True):
    """`reason` is None when it is good; then `compared` bytes were looked at."""

    request: str
    reason: str | None
    compared: int


class Wrong(msgspec.Struct, frozen=True, tag=True):
    """Something that must never be."""

    text: str
    nbytes: int = 0


class Checked(msgspec.Struct, frozen=True, tag=True):
    """`open` requests have not ended."""

    open: int


Event = Up | Offered | Refused | Sent | Received | Wrong | Checked


class Pipe(Generic[T]):
    """Sends anything, receives messages of `kinds`."""

    def __init__(self, connection: Connection, kinds: Any) -> None:
        self.connection = connection
        self._decoder: msgspec.msgpack.Decoder[T] = msgspec.msgpack.Decoder(kinds)

    def send(self, message: msgspec.Struct) -> None:
        self.connection.send_bytes(msgspec.msgpack.encode(message))

    def waits(self, seconds: float = 0.0) -> bool:
        """Whether there is something to receive, the end included."""
        return self.connection.poll(seconds)

    def receive(self) -> T:
        """Raises `EOFError` or `OSError` when the other side is gone."""
        return self._decoder.decode(self.connection.recv_bytes())
