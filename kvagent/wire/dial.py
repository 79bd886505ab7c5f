"""Connects to a sidecar of which is known only that its key is one of those that are allowed.

CURVE must know the server's key before it connects. Nothing says which key a HOST:PORT has, so
they are tried one after the other, beginning with the one that was right there last, then our own
(a deployment may share one pair). A wrong key costs a round trip: the server ends the connection.
"""

from __future__ import annotations

import asyncio
import contextlib

import zmq
from zmq.utils.monitor import parse_monitor_message

from kvagent.wire.control import Control
from kvagent.wire.keys import fingerprint
from kvagent.wire.sockets import LoopSocket

__all__ = ["Dialer"]

PAUSE = 1.0
"""Seconds before a round of all keys is tried again."""
_FAILED = (
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)


class Dialer:
    """Keeps a DEALER connected to `address` until `close`. `trouble` says why it was refused last,
    in words; empty when it was not."""

    def __init__(self, control: Control, socket: LoopSocket, address: str) -> None:
        """Raises what `connect` does for something that is no address."""
        self._control, self._socket, self._address = control, socket, address
        # Else libzmq tries a wrong key again by itself, and when this loop is late, the event of
        # that is taken for an answer to the next key, which is given up untried.
        socket.setsockopt(zmq.RECONNECT_STOP, zmq.RECONNECT_STOP_HANDSHAKE_FAILED)
        self._monitor = socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | _FAILED)
        self._key: bytes | None = None
        self.trouble = ""
        try:
            for key in control.server_keys(address)[:1]:
                self._dial(key)
        except BaseException:
            self._close_monitor()
            raise
        self._task = self._start()
        control.key_users.add(self)

    def keys_changed(self, *, own: bool) -> None:
        """Dials again with another pair, or when the peer's key is allowed no more."""
        if own or self._key not in self._control.server_keys(self._address):
            self._hang_up()
            self._task.cancel()
            self._task = self._start()

    def _start(self) -> asyncio.Task[None]:
        return asyncio.create_task(self._keep(), name=f"dial-{self._address}")

    async def _keep(self) -> None:
        while True:
            connected = await self._round()
            self._hang_up()
            if not connected:
                await asyncio.sleep(PAUSE)

    async def _round(self) -> bool:
        """Tries each key; whether it found the right one, and had a connection for a while."""
        keys = self._control.server_keys(self._address)
        if not keys:
            self.trouble = "no key is in the allowed folder"
        for key in keys:
            if self._key != key:
                self._dial(key)
            connected = False
            while (event := await self._event()) == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._control.remember(self._address, key)
                self.trouble, connected = "", True
            if connected:
                return True
            if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
                self._control.remember(self._address, key)  # it is the right one
                mine = fingerprint(self._control.own.public)
                self.trouble = f"it refused the key of this sidecar ({mine})"
                return False
        else:
            if keys:
                self.trouble = "it had none of the allowed keys, or uses no keys"
        return False

    async def _event(self) -> int:
        return parse_monitor_message(await self._monitor.receive())["event"]

    def _dial(self, key: bytes) -> None:
        self._hang_up()
        self._control.authenticate(self._socket, key)
        self._socket.connect(self._address)
        self._key = key

    def _hang_up(self) -> None:
        if self._key is not None:
            with contextlib.suppress(zmq.ZMQError):  # it has hung up itself
                self._socket.disconnect(self._address)
            self._key = None

    async def close(self) -> None:
        self._control.key_users.discard(self)
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        self._close_monitor()

    def _close_monitor(self) -> None:
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
