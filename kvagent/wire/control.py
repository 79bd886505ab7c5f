"""What all control sockets of one sidecar share: the ZMQ context, their options, and drills.

A `[chaos]` section in the settings makes `send` lose, repeat, delay and reorder messages; without
one it only sends.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import defaultdict
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


class Control:
    """One per agent; `close` after every socket."""

    def __init__(self, chaos: ChaosConfig | None = None) -> None:
        """Raises `ConfigError` for a drill that names unknown messages."""
        self._context = zmq.asyncio.Context()
        self._context.set(zmq.MAX_SOCKETS, MAX_SOCKETS)
        self.chaos: ChaosPlan | None = None
        if chaos is not None and chaos.active:
            chaos.validate(KINDS)
            self.chaos = ChaosPlan(chaos)
            log.warning("chaos is on: control messages go wrong on purpose, seed %d", chaos.seed)
        self._held: dict[zmq.asyncio.Socket, list[asyncio.Event]] = defaultdict(list)
        """Messages that wait for the next one on their socket."""
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
        waiting = self._held.pop(socket, [])
        if fault is Fault.DELAY:
            self._keep(self._send_late(socket, frames, None, self.chaos.delay()))
        elif fault is Fault.REORDER:
            event = asyncio.Event()
            self._held[socket].append(event)
            self._keep(self._send_late(socket, frames, event, self.chaos.longest))
        elif fault is not Fault.DROP:
            await socket.send_multipart(frames)
            if fault is Fault.DUPLICATE:
                await socket.send_multipart(frames)
        for event in waiting:
            event.set()

    async def _send_late(
        self,
        socket: zmq.asyncio.Socket,
        frames: Sequence[bytes],
        event: asyncio.Event | None,
        longest: float,
    ) -> None:
        wait = event.wait() if event is not None else asyncio.sleep(longest + 1)
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(wait, longest)
        # The socket may be closed by now, or its peer gone: then it is lost.
        with contextlib.suppress(zmq.ZMQError, asyncio.TimeoutError):
            await asyncio.wait_for(socket.send_multipart(frames), longest + 1)

    def _keep(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._late.add(task)
        task.add_done_callback(self._late.discard)

    async def close(self) -> None:
        for task in list(self._late):
            task.cancel()
        await asyncio.gather(*self._late, return_exceptions=True)
        self._context.destroy(linger=0)
