"""The sockets between sidecars: a ROUTER that answers calls, a DEALER that makes them.

A message is two frames: a head (magic, protocol version, call number) and one msgpack message.
The version stands in the head, so that two sidecars of different versions can tell each other so
before either decodes anything else. A call is sent again until it is answered or its time is up;
the answering side must therefore be idempotent. No bytes that arrive here can stop the agent.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import struct
from collections.abc import Awaitable, Callable
from typing import Any

import zmq

from kvagent.errors import ConfigError, HandshakeError, PeerGoneError, ProtocolError
from kvagent.wire.control import Control
from kvagent.wire.messages import (
    PROTOCOL,
    Peer,
    Refused,
    decode_question,
    peer_codec,
)

log = logging.getLogger("kvagent.peer")

HEAD = struct.Struct("<3sBQ")  # magic, protocol version, call number
MAGIC = b"KVA"
MAX_TASKS = 8192
"""Calls answered at the same time; more are dropped, and their senders send again."""

MAX_CALLS = 2048
"""The same for one peer."""
RECEIVE_WINDOW = 32
"""Messages of one peer that may wait to be looked at; it is made to wait with the rest."""

Handler = Callable[[Peer], Awaitable[Peer]]


def endpoint(host: str, port: int) -> str:
    """A ZMQ address; an IPv6 host gets its brackets."""
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


class PeerServer:
    """Answers calls with `handler`, which may take its time and must not raise."""

    def __init__(self, control: Control, handler: Handler) -> None:
        self._control = control
        self._handler = handler
        self._tasks: set[asyncio.Task[None]] = set()
        self._loop_task: asyncio.Task[None] | None = None
        self._answering: dict[bytes, set[int]] = {}
        """Calls of each peer that are being answered."""
        self.rejected = 0
        self._socket = control.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.ROUTER_HANDOVER, 0)
        self._socket.setsockopt(zmq.RCVHWM, RECEIVE_WINDOW)

    def bind(self, host: str, port: int) -> int:
        """Binds before anything is published; returns the real port (0 asks for a free one)."""
        address = endpoint(host, port)
        try:
            if port == 0:
                self._socket.bind(address.rsplit(":", 1)[0] + ":*")
            else:
                self._socket.bind(address)
        except zmq.ZMQError as error:
            raise ConfigError(
                f"cannot bind the control port {host}:{port}: {error.strerror}; "
                "free the port or give another one with --bind HOST:PORT (port 0: any)"
            ) from error
        last = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        return int(last.rsplit(":", 1)[1])

    def start(self) -> None:
        self._loop_task = asyncio.create_task(self._run(), name="peer-server")

    async def _run(self) -> None:
        while True:
            try:
                frames = await self._socket.recv_multipart()
                self._accept(frames)
            except ProtocolError as error:
                self.rejected += 1
                log.debug("dropped a message: %s", error)
            except zmq.ZMQError as error:
                log.warning("control socket: %s", error)
                await asyncio.sleep(0.1)

    def _accept(self, frames: list[bytes]) -> None:
        if len(frames) != 3 or len(frames[1]) != HEAD.size:
            raise ProtocolError(f"{len(frames)} frames, not identity, head and message")
        magic, version, call = HEAD.unpack(frames[1])
        if magic != MAGIC:
            raise ProtocolError("not a kvagent message")
        identity = frames[0]
        if version != PROTOCOL:
            text = f"peer protocol {version} here meets {PROTOCOL}; run the same kvagent on both"
            self._spawn(self._send(identity, call, Refused(code="protocol", message=text)))
            return
        message = decode_question(frames[2])
        open_calls = self._answering.get(identity, set())
        if call in open_calls:
            return  # asked again while the answer is on its way
        if len(self._tasks) >= MAX_TASKS or len(open_calls) >= MAX_CALLS:
            raise ProtocolError("too many calls at once")
        open_calls.add(call)
        self._answering[identity] = open_calls
        self._spawn(self._answer(identity, call, message))

    def _spawn(self, work: Awaitable[None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _answer(self, identity: bytes, call: int, message: Peer) -> None:
        try:
            answer = await self._handler(message)
        except Exception:
            log.exception("the handler of %s failed", type(message).__name__)
            answer = Refused(code="internal", message="internal error; see the peer's log")
        finally:
            open_calls = self._answering[identity]
            open_calls.discard(call)
            if not open_calls:
                del self._answering[identity]
        await self._send(identity, call, answer)

    async def _send(self, identity: bytes, call: int, message: Peer) -> None:
        head = HEAD.pack(MAGIC, PROTOCOL, call)
        try:
            frames = [identity, head, peer_codec.encode(message)]
            await self._control.send(self._socket, frames, message)
        except (zmq.ZMQError, ProtocolError) as error:
            # The caller went away, or asked for more than an answer may hold.
            log.debug("answer not sent: %s", error)

    async def close(self) -> None:
        tasks = [*self._tasks, *([self._loop_task] if self._loop_task else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._socket.close()


class PeerClient:
    """Makes calls to one address. Closing it fails the calls that are open."""

    def __init__(self, control: Control, host: str, port: int) -> None:
        self.host, self.port = host, port
        self._control = control
        self._calls = itertools.count(1)
        self._open: dict[int, asyncio.Future[Peer]] = {}
        try:
            self._socket = control.socket(zmq.DEALER)
        except zmq.ZMQError as error:
            raise PeerGoneError(f"no socket for {host}:{port}: {error.strerror}") from error
        self._socket.setsockopt(zmq.IMMEDIATE, 1)  # nothing queues up for a peer that is gone
        self._socket.setsockopt(zmq.RECONNECT_IVL, 50)
        self._socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
        try:
            self._socket.connect(endpoint(host, port))
        except (zmq.ZMQError, UnicodeEncodeError) as error:
            self._socket.close()
            raise HandshakeError(f"{host!r}:{port} is not an address: {error}") from error
        self._reader = asyncio.create_task(self._read(), name=f"peer-{host}:{port}")

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    async def call(self, message: Peer, timeout: float, again: float = 1.0) -> Peer:
        """The answer to `message`, which is sent every `again` seconds for `timeout` seconds.

        Raises `PeerGoneError` when none came, `HandshakeError` when the peer refused.
        """
        if self._socket.closed:
            raise PeerGoneError(f"the connection to {self} was closed")
        call = next(self._calls)
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[Peer] = loop.create_future()
        self._open[call] = answer
        frames = [HEAD.pack(MAGIC, PROTOCOL, call), peer_codec.encode(message)]
        until = loop.time() + timeout
        try:
            while (left := until - loop.time()) > 0:
                await self._transmit(frames, message, answer, left)
                try:
                    reply = await asyncio.wait_for(
                        asyncio.shield(answer), max(0.001, min(again, until - loop.time()))
                    )
                except asyncio.TimeoutError:
                    continue
                if isinstance(reply, Refused):
                    raise HandshakeError(_explain(reply, self))
                return reply
        finally:
            self._open.pop(call, None)
            answer.cancel()
        raise PeerGoneError(
            f"{self} did not answer {type(message).__name__} within {timeout:g} s; "
            "is the sidecar there, and does it advertise an address that can be reached?"
        )

    async def _transmit(
        self, frames: list[bytes], message: Peer, answer: asyncio.Future[Peer], left: float
    ) -> None:
        """Sends once connected; whether it did, shows in `answer`. `close` sets that first."""
        sending = asyncio.ensure_future(self._control.send(self._socket, frames, message))
        either: set[asyncio.Future[Any]] = {sending, answer}
        try:
            await asyncio.wait(either, timeout=left, return_when=asyncio.FIRST_COMPLETED)
        finally:
            if not sending.done():
                sending.cancel()
            elif not sending.cancelled() and (error := sending.exception()) is not None:
                log.debug("%s: not sent: %s", self, error)

    async def _read(self) -> None:
        while True:
            frames = await self._socket.recv_multipart()
            try:
                if len(frames) != 2 or len(frames[0]) != HEAD.size:
                    raise ProtocolError(f"an answer of {len(frames)} frames")
                magic, version, call = HEAD.unpack(frames[0])
                waiting = self._open.get(call)
                if magic != MAGIC or waiting is None or waiting.done():
                    continue  # an answer to a call that was answered or given up
                if version != PROTOCOL:
                    text = f"peer protocol {version} at {self} meets {PROTOCOL} here"
                    waiting.set_result(Refused(code="protocol", message=text))
                else:
                    waiting.set_result(peer_codec.decode(frames[1]))
            except ProtocolError as error:
                log.debug("dropped an answer of %s: %s", self, error)

    async def is_dead(self) -> bool:
        """Whether the peer's host says that nobody listens there: the process is gone, and not
        only stopped or cut off."""
        try:
            _, writer = await asyncio.wait_for(asyncio.open_connection(self.host, self.port), 1.0)
        except ConnectionRefusedError:
            return True
        except (OSError, asyncio.TimeoutError):
            return False
        writer.close()
        return False

    async def close(self) -> None:
        self._reader.cancel()
        await asyncio.gather(self._reader, return_exceptions=True)
        for answer in self._open.values():
            if not answer.done():
                answer.set_exception(PeerGoneError(f"the connection to {self} was closed"))
        self._socket.close()


def _explain(refused: Refused, client: PeerClient) -> str:
    text = f"{refused.code}: {client} refused: {refused.message}"
    fields = "; ".join(f"{d.field}: {d.local} there, {d.remote} here" for d in refused.differences)
    return f"{text}: {fields}" if fields else text
