"""The producer's side of the benchmark on another machine: `kvagent bench --serve HOST:PORT`.

It runs the producer's sidecars and raw ranks there and answers HTTP: which workload to set up,
offers (tickets come back), and what the raw ranks expose. Whoever reaches the port can make it
allocate memory and read that memory, so it is for a network that you trust, and for as long as
the benchmark runs. Nothing but the benchmark's own numbers is in the memory.
"""

from __future__ import annotations

import ipaddress
import socket
import threading
from collections.abc import Sequence
from typing import Any, TypeVar

import httpx
import msgspec
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route

from kvagent.bench.engines import Producer, Ticket
from kvagent.bench.measure import Far, LocalFar
from kvagent.bench.questions import Placed, Way
from kvagent.bench.shapes import Request, Workload
from kvagent.bench.world import Transport, World
from kvagent.config import split_address
from kvagent.errors import KVAgentError

__all__ = ["RemoteFar", "address_towards", "is_loopback", "serve"]

T = TypeVar("T")
ANSWER_SECONDS = 300.0


class Setup(msgspec.Struct, frozen=True, tag=True):
    workload: Workload


class Offers(msgspec.Struct, frozen=True, tag=True):
    requests: dict[str, Request]


class Settle(msgspec.Struct, frozen=True, tag=True):
    names: list[str]


class Raw(msgspec.Struct, frozen=True, tag=True):
    ordinary: bool


class ExposeAll(msgspec.Struct, frozen=True, tag=True):
    way: Way


class Close(msgspec.Struct, frozen=True, tag=True):
    pass


Call = Setup | Offers | Settle | Raw | ExposeAll | Close


def _do(far: Far, call: Call) -> object:
    match call:
        case Setup():
            far.setup(call.workload)
        case Offers():
            return far.offer(call.requests)
        case Settle():
            far.settle(call.names)
        case Raw():
            return far.raw(call.ordinary)
        case ExposeAll():
            return far.expose(call.way)
        case Close():
            far.close()
    return None


class RemoteFar:
    """A `Far` that asks `serve` elsewhere. `url`: "http://host:port"."""

    here: Producer | None = None

    def __init__(self, url: str) -> None:
        self._url = url
        self._client = httpx.Client(timeout=ANSWER_SECONDS, trust_env=False)

    def setup(self, workload: Workload) -> None:
        self._call(Setup(workload), None)

    def offer(self, requests: dict[str, Request]) -> list[Ticket]:
        return self._call(Offers(requests), list[Ticket])

    def settle(self, names: Sequence[str]) -> None:
        self._call(Settle(list(names)), None)

    def raw(self, ordinary: bool) -> list[Placed]:
        return self._call(Raw(ordinary), list[Placed])

    def expose(self, way: Way) -> list[bytes]:
        return self._call(ExposeAll(way), list[bytes])

    def close(self) -> None:
        self._call(Close(), None)

    def _call(self, call: Call, kind: type[T] | None) -> T:
        try:
            answer = self._client.post(self._url, content=msgspec.json.encode(call))
        except httpx.HTTPError as error:
            raise KVAgentError(f"--peer {self._url}: {error}") from error
        if answer.status_code != 200:
            raise KVAgentError(f"--peer {self._url}: {answer.text}")
        try:
            found: T = msgspec.json.decode(answer.content, type=kind)
        except msgspec.MsgspecError as error:
            raise KVAgentError(f"--peer {self._url}: {error}; is it the same version?") from error
        return found


def application(far: Far) -> Starlette:
    turn = threading.Lock()

    def answer(body: bytes) -> Response:
        try:
            with turn:
                done = _do(far, msgspec.json.decode(body, type=Call))
        except (KVAgentError, msgspec.MsgspecError) as error:
            return Response(str(error), status_code=400)
        return Response(msgspec.json.encode(done), media_type="application/json")

    async def call(request: HttpRequest) -> Response:
        # On the loop itself: the processes that it starts watch the thread that started them.
        return answer(await request.body())

    return Starlette(routes=[Route("/", call, methods=["POST"])])


def serve(address: str, transport: Transport) -> None:
    """Until SIGINT or SIGTERM."""
    host, port = split_address(address, "--serve")
    with World(transport, host="" if is_loopback(host) else host) as world:
        uvicorn.run(application(LocalFar(world)), host=host, port=port, log_level="warning")


def is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def address_towards(url: str) -> str:
    """This machine's address as the peer sees it; empty when that is this host."""
    host, port = httpx.URL(url).host, httpx.URL(url).port or 80
    if is_loopback(host):
        return ""
    try:
        with socket.create_connection((host, port), timeout=10) as connection:
            name: tuple[Any, ...] = connection.getsockname()
            return str(name[0])
    except OSError as error:
        raise KVAgentError(f"--peer {url}: {error}") from error
