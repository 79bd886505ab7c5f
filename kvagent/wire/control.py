"""What all control sockets of one sidecar share: the ZMQ context, their options, and drills.

A `[chaos]` section in the settings makes `send` lose, repeat, delay and reorder messages; without
one it only sends.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Coroutine, Sequence
from typing import Any

import zmq
import zmq.asyncio

from kvagent.core.chaos import ChaosConfig, ChaosPlan, Fault
from kvagent.wire.messages import KINDS, MAX_PEER_BYTES, Peer

log = logging.getLogger("kvagent.chaos")

MAX_SOCKETS = 16384
"""Of ZMQ, whose default of 1,023 fewer peers would exhaust."""
HEARTBEAT_MS = 2000
HEARTBEAT_TIMEOUT_MS = 6000

Way = tuple[zmq.asyncio.Socket, tuple[bytes, ...]]
"""A socket and, if it is a ROUTER, the peer's identity: what goes the same way keeps its order."""


class Control:
    """One per agent; `close` after every socket."""

    def __init__(self, chaos: ChaosConfig | None = None) -> None:
        """Raises `ConfigError` for a drill that contradicts itself or names unknown messages."""
        self.chaos: ChaosPlan | None = None
        if chaos is not None and chaos.active:
            chaos.validate(KINDS)
            self.chaos = ChaosPlan(chaos)
            log.warning("chaos is on: control messages go wrong on purpose, seed %d", chaos.seed)
        self._context = zmq.asyncio.Context()
        self._context.set(zmq.MAX_SOCKETS, MAX_SOCKETS)
        self._held: dict[Way, list[asyncio.Event]] = {}
        """Messages that wait for the next one on their way."""
        self._late: set[asyncio.Task[None]] = set()

    def socket(self, kind: int) -> zmq.asyncio.Socket:
        """A ROUTER or DEALER. Raises `zmq.ZMQError` when there are too many."""
        socket = self._context.socket(kind)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.IPV6, 1)
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_PEER_BYTES)
        socket.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, HEARTBEAT_TIMEOUT_MS)
        return socket

    async def send(
        self, socket: zmq.asyncio.Socket, frames: Sequence[bytes], message: Peer
    ) -> None:
        """Sends `frames`, which hold `message`. Raises `zmq.ZMQError`."""
        if self.chaos is None:
            await socket.send_multipart(frames)
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
            await socket.send_multipart(frames)
            for passed in self._held.pop(way, ()):
                passed.set()
            if fault is Fault.DUPLICATE:
                await socket.send_multipart(frames)

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
            await asyncio.wait_for(way[0].send_multipart(frames), longest + 1)

    def _keep(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._late.add(task)
        task.add_done_callback(self._late.discard)

    async def close(self) -> None:
        for task in list(self._late):
            task.cancel()
        await asyncio.gather(*self._late, return_exceptions=True)
        self._context.destroy(linger=0)
