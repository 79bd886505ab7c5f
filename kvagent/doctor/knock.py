"""Who opens the door at HOST:PORT, before anything is asked: nobody, a stranger, or a sidecar.

A sidecar's control socket greets whoever connects with 64 bytes that say whether it wants keys
(ZMTP 3, RFC 23). That is all that is looked at, so that the answer holds whatever keys there are.
"""

from __future__ import annotations

import socket
import time
from enum import Enum

import msgspec

__all__ = ["Knock", "Reach", "knock"]

SECONDS = 5.0
GREETING_BYTES = 64
_MECHANISM = slice(12, 32)
_BEGINNING = b"\xff" + bytes(8) + b"\x7f" + b"\x03\x00"
"""Of our greeting, up to the version: after that, the other side says all of its own."""


class Reach(str, Enum):
    NO_NAME = "no_name"  # nobody knows the host's name
    REFUSED = "refused"  # nobody listens
    SILENT = "silent"  # no answer to the call at all
    NO_WAY = "no_way"  # the kernel knows no way there
    MUTE = "mute"  # connected, and nothing is said
    STRANGER = "stranger"  # connected, and it is no control socket
    OPEN = "open"  # a control socket without keys
    LOCKED = "locked"  # one with keys


class Knock(msgspec.Struct, frozen=True):
    """`words`: what was seen."""

    reach: Reach
    words: str


def knock(host: str, port: int, seconds: float = SECONDS) -> Knock:
    """Connects, and reads the greeting; each may take `seconds`, whatever the other side does."""
    try:
        caller = socket.create_connection((host, port), seconds)
    except (socket.gaierror, UnicodeError) as error:
        return Knock(Reach.NO_NAME, f"no address is known for {host!r}: {_said(error)}")
    except ConnectionRefusedError:
        return Knock(Reach.REFUSED, "connection refused: nobody listens on that port")
    except TimeoutError:
        return Knock(Reach.SILENT, f"no connection within {seconds:g} s, and no refusal either")
    except OSError as error:
        return Knock(Reach.NO_WAY, f"no connection: {_said(error)}")
    with caller:
        greeting = _hear(caller, seconds)
    if not greeting:
        return Knock(Reach.MUTE, f"it takes connections, and says nothing within {seconds:g} s")
    if len(greeting) < GREETING_BYTES or (greeting[0], greeting[9]) != (0xFF, 0x7F):
        return Knock(Reach.STRANGER, "what listens there is not the control socket of a sidecar")
    mechanism = greeting[_MECHANISM].rstrip(b"\0")
    if mechanism == b"CURVE":
        return Knock(Reach.LOCKED, "it listens, and wants keys")
    if mechanism == b"NULL":
        return Knock(Reach.OPEN, "it listens, and uses no keys")
    return Knock(Reach.STRANGER, "what listens there speaks ZMTP, and is no sidecar's")


def _hear(caller: socket.socket, seconds: float) -> bytes:
    """The first bytes that the other side says to the beginning of a greeting. To one that says
    nothing in half of the time two ends of lines are sent: an HTTP server waits for them."""
    heard = b""
    end = time.monotonic() + seconds
    try:
        caller.sendall(_BEGINNING)
        caller.settimeout(seconds / 2)
        try:
            heard = caller.recv(GREETING_BYTES)
        except TimeoutError:
            caller.sendall(b"\r\n\r\n")
        while len(heard) < GREETING_BYTES and heard[:1] in (b"", _BEGINNING[:1]):
            caller.settimeout(max(0.001, end - time.monotonic()))
            more = caller.recv(GREETING_BYTES)
            if not more:
                break
            heard += more
    except OSError:  # it hung up, or says no more
        pass
    return heard


def _said(error: OSError | UnicodeError) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)
