"""What all control sockets of one sidecar share: the ZMQ context, their options, keys, and drills.

With a folder of keys (see `keys`) every connection is encrypted by CURVE, and authenticated both
ways; `start` watches the folder. Without one, it is neither.

A `[chaos]` section in the settings makes `send` lose, repeat, delay and reorder messages; without
one it only sends.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import OrderedDict
from collections.abc import Coroutine, Sequence
from typing import Any, Protocol

import zmq

from kvagent.core.chaos import ChaosConfig, ChaosPlan, Fault
from kvagent.wire.door import DOMAIN, Door
from kvagent.wire.keys import KeyPair, KeyRing, fingerprint, fresh_ring, load_ring, look
from kvagent.wire.messages import KINDS, MAX_PEER_BYTES, Peer
from kvagent.wire.sockets import LoopContext, LoopSocket

log = logging.getLogger("kvagent.control")

MAX_SOCKETS = 16384
"""Of ZMQ, whose default of 1,023 fewer peers would exhaust."""
CONNECT_MS = 2000
"""The kernel repeats a call to a host that is away after 1, 3, 7, ... 63 seconds: not so rarely."""
KEEPALIVE_SECONDS = 2
UNACKNOWLEDGED_MS = 6000
"""A connection to a host that is gone ends by the kernel's probes. Not by ZMQ's heartbeats: libzmq
4.3 aborts the process (stream_engine_base.cpp, `!_io_error`) when one is due on a connection that
broke while messages of it were still waiting for us, and that any stranger can bring about."""
HANDSHAKE_MS = 5000
"""A connection that is not made by then is closed: nobody holds descriptors for nothing."""
LOOK_SECONDS = 1.0
"""How often the folder of keys is looked at."""
MAX_REMEMBERED = 4096
"""Addresses whose key is remembered."""

Way = tuple[LoopSocket, tuple[bytes, ...]]
"""A socket and, if it is a ROUTER, the peer's identity: what goes the same way keeps its order."""


class KeyUser(Protocol):
    """A socket with connections that were made with keys which may change."""

    def keys_changed(self, *, own: bool) -> None:
        """Some keys are allowed no more; `own`: this sidecar's pair is another one."""


class Control:
    """One per agent; `close` after every socket."""

    def __init__(self, chaos: ChaosConfig | None = None, keys: str = "") -> None:
        """`keys` is a folder, or empty. Raises `ConfigError` for keys that are not there or open to
        others, and for a drill that contradicts itself or names unknown messages."""
        self._folder = keys
        self._ring: KeyRing | None = load_ring(keys) if keys else None
        self._door: Door | None = None
        self._watching: list[asyncio.Task[None]] = []
        self._known: OrderedDict[str, bytes] = OrderedDict()
        self.key_users: set[KeyUser] = set()
        self.chaos: ChaosPlan | None = None
        if chaos is not None and chaos.active:
            chaos.validate(KINDS)
            self.chaos = ChaosPlan(chaos)
            log.warning("chaos is on: control messages go wrong on purpose, seed %d", chaos.seed)
        self._context = LoopContext()
        self._context.set(zmq.MAX_SOCKETS, MAX_SOCKETS)
        self._held: dict[Way, list[asyncio.Event]] = {}
        """Messages that wait for the next one on their way."""
        self._late: set[asyncio.Task[None]] = set()

    def start(self) -> None:
        """From now on peers with allowed keys can connect, and changes of the keys are noticed."""
        if self._ring is not None:
            self._door = Door(self._context, lambda: self.ring.allowed)
            self._say(self.ring, "")
            self._watching = [
                asyncio.create_task(self._door.answer(), name="door"),
                asyncio.create_task(self._watch(look(self._folder)), name="keys"),
            ]

    def socket(self, kind: int) -> LoopSocket:
        """A ROUTER or DEALER; a ROUTER asks for keys when there are any, a DEALER is given them by
        `authenticate`. Raises `zmq.ZMQError` when there are too many."""
        socket = self._context.socket(kind)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.IPV6, 1)
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_PEER_BYTES)
        socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
        socket.setsockopt(zmq.TCP_KEEPALIVE_IDLE, KEEPALIVE_SECONDS)
        socket.setsockopt(zmq.TCP_KEEPALIVE_INTVL, KEEPALIVE_SECONDS)
        socket.setsockopt(zmq.TCP_KEEPALIVE_CNT, 2)
        socket.setsockopt(zmq.TCP_MAXRT, UNACKNOWLEDGED_MS)
        socket.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
        socket.setsockopt(zmq.CONNECT_TIMEOUT, CONNECT_MS)
        if self.has_keys and kind == zmq.ROUTER:
            socket.setsockopt(zmq.CURVE_SERVER, 1)
            socket.setsockopt(zmq.CURVE_SECRETKEY, self.own.secret)
            socket.setsockopt(zmq.ZAP_DOMAIN, DOMAIN)
            socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)  # without a door nobody comes in
        return socket

    # ------------------------------------------------------------ keys

    @property
    def has_keys(self) -> bool:
        return self._ring is not None

    @property
    def ring(self) -> KeyRing:
        assert self._ring is not None  # `has_keys` was asked
        return self._ring

    @property
    def own(self) -> KeyPair:
        return self.ring.own

    @property
    def denied(self) -> int:
        """Connections that were refused for their keys."""
        return self._door.denied if self._door is not None else 0

    def authenticate(self, socket: LoopSocket, server: bytes) -> None:
        """The next connection of a DEALER is to whoever has the key `server`."""
        socket.setsockopt(zmq.CURVE_PUBLICKEY, self.own.public)
        socket.setsockopt(zmq.CURVE_SECRETKEY, self.own.secret)
        socket.setsockopt(zmq.CURVE_SERVERKEY, server)

    def server_keys(self, address: str) -> list[bytes]:
        """The keys that the sidecar at `address` may have; the one that it had last comes first."""
        keys = self.ring.servers()
        last = self._known.get(address)
        return [last, *(key for key in keys if key != last)] if last in keys else keys

    def remember(self, address: str, key: bytes) -> None:
        self._known[address] = key
        self._known.move_to_end(address)
        if len(self._known) > MAX_REMEMBERED:
            self._known.popitem(last=False)

    async def _watch(self, seen: object) -> None:
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            try:
                now = await asyncio.to_thread(look, self._folder)
                if now != seen or self.ring.problems:
                    self._use(await asyncio.to_thread(fresh_ring, self._folder, self.ring))
                    seen = now
            except Exception:
                log.exception("keys in %s", self._folder)

    def _use(self, ring: KeyRing) -> None:
        old, self._ring = self.ring, ring
        for problem in ring.problems:
            if problem not in old.problems:
                log.warning("%s", problem)
        own = ring.own != old.own
        removed = old.allowed.keys() - ring.allowed.keys()
        added = ring.allowed.keys() - old.allowed.keys()
        if own or added or removed:
            names = {fingerprint(key): "added" for key in added}
            names |= {fingerprint(key): "removed" for key in removed}
            changes = "".join(f", {name} {how}" for name, how in sorted(names.items()))
            self._say(ring, (", own is new" if own else "") + changes)
        if own or removed:
            for user in list(self.key_users):
                user.keys_changed(own=own)

    def _say(self, ring: KeyRing, changes: str) -> None:
        allowed = sorted(fingerprint(key) for key in ring.allowed)
        shown = ", ".join(allowed[:8]) + (", ..." if len(allowed) > 8 else "")
        own = fingerprint(ring.own.public)
        log.info("keys: own %s; allowed: %d (%s)%s", own, len(allowed), shown, changes)
        if not allowed:
            log.warning("keys: none is allowed in %s: nobody can connect", self._folder)
        elif own not in allowed:
            log.warning(
                "keys: this sidecar's own key %s is not among the allowed ones; with one pair for "
                "all it has to be",
                own,
            )

    # ------------------------------------------------------------ sending

    async def send(self, socket: LoopSocket, frames: Sequence[bytes], message: Peer) -> None:
        """Sends `frames`, which hold `message`. Raises `zmq.ZMQError`."""
        if self.chaos is None:
            await socket.deliver(frames)
            return
        kind = str(message.__struct_config__.tag)
        fault = self.chaos.next(kind)
        if fault is not None:
            log.info("%s: %s, message %d", fault.value, kind, self.chaos.messages)
        way: Way = (socket, tuple(frames[:-2]))
        if fault is Fault.DELAY:
            self._keep(self._send_late(way, frames, asyncio.Event(), self.chaos.delay()))
        elif fault is Fault.REORDER:
            passed = asyncio.Event()
            self._held.setdefault(way, []).append(passed)
            self._keep(self._send_late(way, frames, passed, self.chaos.longest))
        elif fault is not Fault.DROP:
            await socket.deliver(frames)
            for passed in self._held.pop(way, ()):
                passed.set()
            if fault is Fault.DUPLICATE:
                await socket.deliver(frames)

    async def _send_late(
        self, way: Way, frames: Sequence[bytes], passed: asyncio.Event, longest: float
    ) -> None:
        """Sends when `passed` is set, or after `longest` seconds."""
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(passed.wait(), longest)
        if passed in self._held.get(way, ()):
            self._held[way].remove(passed)
            if not self._held[way]:
                del self._held[way]
        # The socket may be closed by now, or its peer gone: then it is lost.
        with contextlib.suppress(zmq.ZMQError, asyncio.TimeoutError):
            await asyncio.wait_for(way[0].deliver(frames), longest + 1)

    def _keep(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._late.add(task)
        task.add_done_callback(self._late.discard)

    async def close(self) -> None:
        tasks = [*self._late, *self._watching]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._door is not None:
            self._door.close()
        self._context.destroy(linger=0)
