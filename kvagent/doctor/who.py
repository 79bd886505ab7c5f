"""Asks whoever answers at a control address who it is, without being a member of any engine."""

from __future__ import annotations

from kvagent.errors import ConfigError, KVAgentError
from kvagent.wire.control import Control
from kvagent.wire.messages import Presence, Who
from kvagent.wire.peer import PeerClient

__all__ = ["ask"]


async def ask(host: str, port: int, timeout: float, keys: str = "") -> Presence | str:
    """Its answer, or why there is none. `keys` is the folder of keys, or empty."""
    try:
        control = Control(keys=keys)
    except ConfigError as error:
        return str(error)
    try:
        client = PeerClient(control, host, port)
        try:
            answer = await client.call(Who(), timeout)
        finally:
            await client.close()
    except KVAgentError as error:
        return str(error)
    finally:
        await control.close()
    if isinstance(answer, Presence):
        return answer
    return f"{client} answered Who with {type(answer).__name__}"
