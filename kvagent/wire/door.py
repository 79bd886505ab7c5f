"""Who may connect: answers libzmq's questions about the keys of those who knock (ZAP, RFC 27).

libzmq asks before a connection exists, so that a stranger's messages are never read.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping

import zmq
from zmq.utils import z85

from kvagent.wire.keys import fingerprint
from kvagent.wire.refusals import Complaints
from kvagent.wire.sockets import LoopContext

log = logging.getLogger("kvagent.door")

ADDRESS = "inproc://zeromq.zap.01"
DOMAIN = b"kvagent"
VERSION = b"1.0"


class Door:
    """`allowed` gives the public keys that may come in, by Z85 text."""

    def __init__(self, context: LoopContext, allowed: Callable[[], Mapping[bytes, str]]):
        self._allowed = allowed
        self._complaints = Complaints()
        self.denied = 0
        self._socket = context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.bind(ADDRESS)

    async def answer(self) -> None:
        """Until it is cancelled."""
        while True:
            frames = await self._socket.receive()
            if len(frames) < 8:
                continue  # libzmq sends none like that
            who, empty, _, number, domain, address, _, mechanism, *credentials = frames
            key = _public(mechanism, credentials)
            good = domain == DOMAIN and key in self._allowed()
            if not good:
                self.denied += 1
                # An IPv4 address comes as that of an IPv6 socket.
                host = address.decode(errors="replace").removeprefix("::ffff:")
                self._complain(host, key)
            status = (b"200", b"", key) if good else (b"400", b"not allowed", b"")
            await self._socket.deliver([who, empty, VERSION, number, *status, b""])

    def _complain(self, address: str, key: bytes) -> None:
        left_out = self._complaints.worth_a_line(address, time.monotonic())
        if left_out is not None:
            log.warning(
                "refused a connection from %s: its key (%s) is not in the allowed folder%s",
                address,
                fingerprint(key) if key else "none",
                f" [{left_out} more like it]" if left_out else "",
            )

    def close(self) -> None:
        self._socket.close()


def _public(mechanism: bytes, credentials: list[bytes]) -> bytes:
    """The key as text; empty when there is none."""
    if mechanism != b"CURVE" or len(credentials) != 1 or len(credentials[0]) != 32:
        return b""
    return z85.encode(credentials[0])
