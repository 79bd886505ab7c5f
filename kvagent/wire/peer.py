"""The sockets between sidecars: a ROUTER that answers calls, a DEALER that makes them.

A question or answer is two frames: a head (magic, protocol version, call number) and one msgpack
message. A ZMQ message holds as many of them as were said to one peer at the same time.
The version stands in the head, so that two sidecars of different versions can tell each other so
before either decodes anything else. A call is sent again until it is answered or its time is up;
the answering side must therefore be idempotent. No bytes that arrive here can stop the agent, and
a peer that is refused again and again is not listened to for a while.

When this sidecar's keys change, or a peer's are allowed no more, the server's connections end and
callers dial again.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import struct
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, NamedTuple, TypeVar

import zmq

from kvagent.errors import (
    ConfigError,
    HandshakeError,
    KVAgentError,
    PeerGoneError,
    ProtocolError,
)
from kvagent.wire.control import Control
from kvagent.wire.dial import Dialer
from kvagent.wire.messages import (
    PROTOCOL,
    Peer,
    Refused,
    decode_question,
    peer_codec,
)
from kvagent.wire.refusals import Complaints, Patience
from kvagent.wire.sockets import MAX_FRAMES, Bundle, LoopSocket

T = TypeVar("T")
log = logging.getLogger("kvagent.peer")

HEAD = struct.Struct("<3sBQ")  # magic, protocol version, call number
MAGIC = b"KVA"
MAX_TASKS = 8192
"""Calls answered at the same time; more are dropped, and their senders send again."""

MAX_CALLS = 2048
"""The same for one peer."""
RECEIVE_WINDOW = 32
"""Messages of one peer that may wait to be looked at; it is made to wait with the rest."""
BREATH = 64
BREATH_SECONDS = 0.005
"""After so many messages of peers that nobody listens to, the server does something else."""
REBIND_SECONDS = 0.01

Handler = Callable[[Peer], Peer | Coroutine[Any, Any, Peer]]
"""Answers at once, or takes its time."""


def endpoint(host: str, port: int) -> str:
    """A ZMQ address; an IPv6 host gets its brackets."""
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


class PeerServer:
    """Answers calls with `handler`; a `KVAgentError` of it is a refusal."""

    def __init__(self, control: Control, handler: Handler) -> None:
        self._control = control
        self._handler = handler
        self._tasks: set[asyncio.Task[Any]] = set()
        self._receiving: asyncio.Task[None] | None = None
        self._moving: asyncio.Task[None] | None = None
        self._answering: dict[bytes, set[int]] = {}
        """Calls of each peer that are being answered."""
        self._bundles: dict[tuple[LoopSocket, bytes], Bundle] = {}
        """Answers of this turn of the event loop."""
        self._patience = Patience()
        self._complaints = Complaints()
        self._ignored = 0
        self._address = ""
        self.rejected = 0
        self._socket = self._new_socket()

    def _new_socket(self) -> LoopSocket:
        socket = self._control.socket(zmq.ROUTER)
        socket.setsockopt(zmq.ROUTER_HANDOVER, 0)
        socket.setsockopt(zmq.RCVHWM, RECEIVE_WINDOW)
        return socket

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
        real = int(last.rsplit(":", 1)[1])
        self._address = endpoint(host, real)
        return real

    def start(self) -> None:
        self._receiving = asyncio.create_task(self._receive(), name="peer-server")
        self._control.key_users.add(self)

    def keys_changed(self, *, own: bool) -> None:
        """ZMQ cannot end a single connection: all of them end, and good peers dial again."""
        if self._moving is None or self._moving.done():
            self._moving = asyncio.create_task(self._move(), name="peer-server-keys")

    async def _move(self) -> None:
        """To a new socket on the same port."""
        assert self._receiving is not None  # it was started
        self._receiving.cancel()
        await asyncio.gather(self._receiving, return_exceptions=True)
        self._socket.close()
        self._answering = {}
        while True:
            self._socket = self._new_socket()
            try:
                self._socket.bind(self._address)
                break
            except zmq.ZMQError as error:  # libzmq frees the port in its own time
                self._socket.close()
                log.debug("%s: %s", self._address, error)
            await asyncio.sleep(REBIND_SECONDS)
        self._receiving = asyncio.create_task(self._receive(), name="peer-server")

    async def _receive(self) -> None:
        while True:
            try:
                frames = await self._socket.receive_frames()
                identity = frames[0].bytes
                if self._patience.lost(identity, time.monotonic()):
                    await self._ignore()
                    continue
                try:
                    self._accept(identity, [frame.bytes for frame in frames[1 : MAX_FRAMES + 2]])
                except ProtocolError as error:
                    self.rejected += 1
                    self._refuse(identity, _address_of(frames), str(error))
            except zmq.ZMQError as error:
                log.warning("control socket: %s", error)
                await asyncio.sleep(0.1)

    async def _ignore(self) -> None:
        self.rejected += 1
        self._ignored += 1
        if self._ignored % BREATH == 0:
            await asyncio.sleep(BREATH_SECONDS)

    def _refuse(self, identity: bytes, address: str, why: str) -> None:
        now = time.monotonic()
        self._patience.refused(identity, now)
        left_out = self._complaints.worth_a_line(address, now)
        if left_out is not None:
            more = f" [{left_out} more like it]" if left_out else ""
            log.warning("dropped a message from %s: %s%s", address, why, more)

    def _accept(self, identity: bytes, frames: Sequence[bytes]) -> None:
        """Looks at one message. Raises `ProtocolError`."""
        for head, body in _pairs(frames):
            self._asked(identity, head, body)

    def _asked(self, identity: bytes, head: bytes, body: bytes) -> None:
        magic, version, call = HEAD.unpack(head)
        if magic != MAGIC:
            raise ProtocolError("not a kvagent message")
        if version != PROTOCOL:
            text = f"peer protocol {version} here meets {PROTOCOL}; run the same kvagent on both"
            self._reply(self._socket, identity, call, Refused(code="protocol", message=text))
            return
        message = decode_question(body)
        open_calls = self._answering.get(identity, set())
        if call in open_calls:
            return  # asked again while the answer is on its way
        if len(self._tasks) >= MAX_TASKS or len(open_calls) >= MAX_CALLS:
            self.rejected += 1  # too much at once: they ask again
            return
        try:
            answer = self._handler(message)
        except Exception as error:
            answer = _refusal(message, error)
        if not asyncio.iscoroutine(answer):
            self._reply(self._socket, identity, call, answer)
            return
        open_calls.add(call)
        answering, socket = self._answering, self._socket
        answering[identity] = open_calls

        def there(task: asyncio.Task[Peer]) -> None:
            open_calls.discard(call)
            if not open_calls:
                answering.pop(identity, None)
            if not task.cancelled():
                error = task.exception()
                reply = task.result() if error is None else _refusal(message, error)
                self._reply(socket, identity, call, reply)

        self._spawn(answer).add_done_callback(there)

    def _spawn(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _reply(self, socket: LoopSocket, identity: bytes, call: int, message: Peer) -> None:
        """Over the connection that the question came by, if there still is one."""
        if isinstance(message, Refused):
            self._patience.refused(identity, time.monotonic())
        try:
            frames = [HEAD.pack(MAGIC, PROTOCOL, call), peer_codec.encode(message)]
            if self._control.chaos is not None:
                self._spawn(self._send_late(socket, [identity, *frames], message))
                return
            bundle = self._bundles.get((socket, identity))
            if bundle is None:
                bundle = self._bundles[socket, identity] = Bundle(
                    socket, [identity], lambda: self._bundles.pop((socket, identity), None)
                )
            bundle.add(frames)
        except (zmq.ZMQError, ProtocolError) as error:
            # The caller went away, or asked for more than an answer may hold.
            log.debug("answer not sent: %s", error)

    async def _send_late(self, socket: LoopSocket, frames: list[bytes], message: Peer) -> None:
        """As a drill has it."""
        try:
            await self._control.send(socket, frames, message)
        except zmq.ZMQError as error:
            log.debug("answer not sent: %s", error)

    async def close(self) -> None:
        self._control.key_users.discard(self)
        tasks = [*self._tasks, *filter(None, (self._moving, self._receiving))]
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
        self._bundle = Bundle(self._socket, [])
        self._dialer: Dialer | None = None
        try:
            if control.has_keys:
                self._dialer = Dialer(control, self._socket, endpoint(host, port))
            else:
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
        return await self.ask(message, timeout, again)

    def ask(self, message: Peer, timeout: float, again: float = 1.0) -> asyncio.Future[Peer]:
        """What `call` returns or raises, when it is there. Cancelling it ends the call."""
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[Peer] = loop.create_future()
        if self._socket.closed:
            answer.set_exception(PeerGoneError(f"the connection to {self} was closed"))
            return answer
        call = next(self._calls)
        try:
            frames = [HEAD.pack(MAGIC, PROTOCOL, call), peer_codec.encode(message)]
        except ProtocolError as error:  # more than a message may hold
            answer.set_exception(error)
            return answer
        self._open[call] = answer
        question = _Question(message, frames, answer, loop.time() + timeout, timeout, again)
        insisting: asyncio.Task[None] | None = None

        def insist() -> None:
            nonlocal insisting
            insisting = asyncio.create_task(self._insist(question))

        if self._control.chaos is None and self._socket.writable:
            self._bundle.add(frames)
            insists: asyncio.Handle = loop.call_later(min(again, timeout), insist)
        else:
            insists = loop.call_soon(insist)

        def over(_: asyncio.Future[Peer]) -> None:
            del self._open[call]
            insists.cancel()
            if insisting is not None:
                insisting.cancel()

        answer.add_done_callback(over)
        return answer

    async def _insist(self, question: _Question) -> None:
        """Sends again and again, until there is an answer or the time is up."""
        loop, answer = asyncio.get_running_loop(), question.answer
        while not answer.done() and (left := question.until - loop.time()) > 0:
            await self._transmit(question, left)
            wait = max(0.001, min(question.again, question.until - loop.time()))
            await asyncio.wait({answer}, timeout=wait)
        if answer.done():
            return
        trouble = "is the sidecar there, is its address right, and do both have keys?"
        if self._dialer is not None:
            trouble = self._dialer.trouble or "is the sidecar there, and is its address right?"
        answer.set_exception(
            PeerGoneError(
                f"{self} did not answer {type(question.message).__name__} within "
                f"{question.timeout:g} s; {trouble}"
            )
        )

    async def _transmit(self, question: _Question, left: float) -> None:
        """Sends once connected; whether it did, shows in `answer`. `close` sets that first."""
        sending = asyncio.ensure_future(
            self._control.send(self._socket, question.frames, question.message)
        )
        either: set[asyncio.Future[Any]] = {sending, question.answer}
        try:
            await asyncio.wait(either, timeout=left, return_when=asyncio.FIRST_COMPLETED)
        finally:
            if not sending.done():
                sending.cancel()
            elif not sending.cancelled() and (error := sending.exception()) is not None:
                log.debug("%s: not sent: %s", self, error)

    async def _read(self) -> None:
        while True:
            frames = await self._socket.receive()
            try:
                for head, body in _pairs(frames):
                    self._answered(head, body)
            except ProtocolError as error:
                log.debug("dropped an answer of %s: %s", self, error)

    def _answered(self, head: bytes, body: bytes) -> None:
        magic, version, call = HEAD.unpack(head)
        waiting = self._open.get(call)
        if magic != MAGIC or waiting is None or waiting.done():
            return  # an answer to a call that was answered or given up
        if version != PROTOCOL:
            text = f"peer protocol {version} at {self} meets {PROTOCOL} here"
            reply: Peer = Refused(code="protocol", message=text)
        else:
            reply = peer_codec.decode(body)
        if isinstance(reply, Refused):
            waiting.set_exception(HandshakeError(_explain(reply, self)))
        else:
            waiting.set_result(reply)

    async def is_dead(self) -> bool:
        """Whether the peer's host says that nobody listens there: the process is gone, and not
        only stopped or cut off."""
        try:
            _, writer = await asyncio.wait_for(asyncio.open_connection(self.host, self.port), 1.0)
        except ConnectionRefusedError:
            return True
        except (OSError, UnicodeError, asyncio.TimeoutError):  # or no name of a host
            return False
        writer.close()
        return False

    async def close(self) -> None:
        self._reader.cancel()
        await asyncio.gather(self._reader, return_exceptions=True)
        if self._dialer is not None:
            await self._dialer.close()
        for answer in list(self._open.values()):
            if not answer.done():
                answer.set_exception(PeerGoneError(f"the connection to {self} was closed"))
        self._socket.close()


class _Question(NamedTuple):
    """One call that is open."""

    message: Peer
    frames: list[bytes]
    answer: asyncio.Future[Peer]
    until: float
    timeout: float
    again: float


def _pairs(frames: Sequence[bytes]) -> list[tuple[bytes, bytes]]:
    """The heads and bodies of a message. Raises `ProtocolError`."""
    if not frames or len(frames) % 2 or len(frames) > MAX_FRAMES:
        raise ProtocolError(f"{len(frames)} frames are not heads and messages")
    pairs = list(zip(frames[::2], frames[1::2], strict=True))
    if any(len(head) != HEAD.size for head, _ in pairs):
        raise ProtocolError("not a head and a message")
    return pairs


def _refusal(message: Peer, error: BaseException) -> Peer:
    if isinstance(error, KVAgentError):
        return Refused(code="refused", message=str(error))
    log.error("the handler of %s failed", type(message).__name__, exc_info=error)
    return Refused(code="internal", message="internal error; see the peer's log")


def _explain(refused: Refused, client: PeerClient) -> str:
    text = f"{refused.code}: {client} refused: {refused.message}"
    fields = "; ".join(f"{d.field}: {d.local} there, {d.remote} here" for d in refused.differences)
    return f"{text}: {fields}" if fields else text


def _address_of(frames: Sequence[zmq.Frame]) -> str:
    """The host that a message came from, as libzmq says."""
    try:
        return str(frames[-1].get("Peer-Address"))
    except zmq.ZMQError:
        return "somewhere"
