"""Asks whoever answers at a control address who it is, without being a member of any engine."""

from __future__ import annotations

from kvagent.errors import HandshakeError
from kvagent.wire.control import Control
from kvagent.wire.messages import Presence, Who
from kvagent.wire.peer import PeerClient

__all__ = ["ask"]


async def ask(host: str, port: int, timeout: float, keys: str = "") -> Presence:
    """Its answer. `keys` is the folder of keys, or empty.

    Raises `ConfigError` for keys that cannot be used, `PeerGoneError` when nothing came,
    `HandshakeError` when it refused or said something else.
    """
    control = Control(keys=keys)
    try:
        client = PeerClient(control, host, port)
        try:
            answer = await client.call(Who(), timeout)
        finally:
            await client.close()
    finally:
        await control.close()
    if isinstance(answer, Presence):
        return answer
    raise HandshakeError(f"{client} answered Who with {type(answer).__name__}")
