"""Asks sidecars for their /status. What comes back is checked, and made fit for a terminal."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from typing import Annotated, Any

import httpx
import msgspec

from kvagent.config import split_address
from kvagent.errors import ConfigError

__all__ = ["Answer", "Failure", "Lost", "PeerRow", "Report", "Transfer", "ask_all", "url_of"]

TIMEOUT_SECONDS = 3.0
MAX_BYTES = 16 << 20
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]")

Number = Annotated[float, msgspec.Meta(ge=0)]


class Transfer(msgspec.Struct, frozen=True, kw_only=True):
    request_id: str
    peer: str
    state: str
    seconds: float
    bytes: int
    wanted_bytes: int


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    seconds_ago: float
    request_id: str
    peer: str
    cause: str
    text: str


class RankRow(msgspec.Struct, frozen=True, kw_only=True):
    bytes_per_second: float


class PeerRow(msgspec.Struct, frozen=True, kw_only=True):
    engine_id: str
    address: str
    transport: str
    unexpected: bool
    ranks: tuple[RankRow, ...]


class Throughput(msgspec.Struct, frozen=True, kw_only=True):
    step_seconds: float
    last_step_seconds: float
    read_bytes: tuple[int, ...]
    fetches_failed: tuple[int, ...]

    @property
    def rate(self) -> float:
        """Bytes per second, over the last step that is over and the one that is not."""
        recent = self.read_bytes[-2:]
        span = self.step_seconds * (len(recent) - 1) + self.last_step_seconds
        return sum(recent) / max(span, 0.5)


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """The part of /status that is shown."""

    version: str
    host: str
    uptime_seconds: float
    engine_id: str | None
    rank: int | None
    world_size: int | None
    role: str | None
    ready: bool
    not_ready: str
    fetches: dict[str, int]
    leases: dict[str, int]
    ledger: dict[str, int]
    parts_reading: int
    bytes_read: int
    in_flight_bytes: int
    transfers: tuple[Transfer, ...]
    failures: tuple[Failure, ...]
    throughput: Throughput
    peers: tuple[PeerRow, ...]


class Answer(msgspec.Struct, frozen=True):
    address: str
    report: Report
    raw: dict[str, Any]
    """All of /status, cards left out."""


class Lost(msgspec.Struct, frozen=True):
    """A sidecar that gave no answer, and why."""

    address: str
    why: str


def url_of(address: str) -> str:
    """The URL of /status from HOST:PORT or a URL. Raises `ConfigError`."""
    if "://" not in address:
        split_address(address, "address")
        address = f"http://{address}"
    return f"{address.rstrip('/').removesuffix('/status')}/status?cards=0"


async def ask_all(client: httpx.AsyncClient, addresses: Sequence[str]) -> list[Answer | Lost]:
    """One for each address, in order; asked at once. Raises `ConfigError` for a bad address."""
    return await asyncio.gather(*(_ask(client, each, url_of(each)) for each in addresses))


async def _ask(client: httpx.AsyncClient, address: str, url: str) -> Answer | Lost:
    try:
        body = bytearray()
        async with client.stream("GET", url, timeout=TIMEOUT_SECONDS) as answer:
            answer.raise_for_status()
            async for chunk in answer.aiter_bytes():
                body += chunk
                if len(body) > MAX_BYTES:
                    return Lost(address, "its /status is too long")
        raw = _clean(msgspec.json.decode(body))
        return Answer(address, msgspec.convert(raw, Report), raw)
    except httpx.TimeoutException:
        return Lost(address, f"no answer in {TIMEOUT_SECONDS:g} s")
    except httpx.InvalidURL as error:
        raise ConfigError(f"{address}: {error}") from error
    except httpx.HTTPError as error:
        return Lost(address, _plain(_why(error)))
    except msgspec.MsgspecError as error:
        return Lost(address, f"this is not the /status of a sidecar: {_plain(str(error))}")


def _why(error: httpx.HTTPError) -> str:
    """In the kernel's words, where it said something: httpx hides them."""
    causes: list[BaseException] = [error]
    words = str(error) or type(error).__name__
    for cause in causes:  # grows
        if isinstance(cause, ConnectionRefusedError):
            return "nobody listens there"
        if isinstance(cause, OSError) and cause.strerror:
            words = cause.strerror
        # Of several addresses of a host, the groups of Python 3.11 and of its backport.
        inner = (cause.__cause__, cause.__context__, *getattr(cause, "exceptions", ()))
        causes += [each for each in inner if each is not None and each not in causes]
    return words


def _clean(value: Any) -> Any:
    """The same, without characters that could steer a terminal."""
    if isinstance(value, str):
        return _plain(value)
    if isinstance(value, list):
        return [_clean(each) for each in value]
    if isinstance(value, dict):
        return {_plain(str(key)): _clean(each) for key, each in value.items()}
    return value


def _plain(text: str) -> str:
    return _CONTROL.sub("\N{REPLACEMENT CHARACTER}", text)
