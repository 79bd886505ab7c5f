"""The sidecar's own doors: ports free or taken, by whom, and the advertised address.

A sidecar may be running on them already: then it is the one that is dialled.
"""

from __future__ import annotations

import asyncio
import errno
import os
import socket
from collections.abc import Iterator, Sequence
from contextlib import closing

import msgspec

from kvagent.config import Config, join_address
from kvagent.doctor.facts import Finding, Severity
from kvagent.doctor.who import ask
from kvagent.errors import KVAgentError

__all__ = ["Door", "check_doors", "look_at_doors"]

DIAL_SECONDS = 3.0
IN_USE = os.strerror(errno.EADDRINUSE)


class Door(msgspec.Struct, frozen=True, kw_only=True):
    """`setting` is `bind` or `http`. `taken`: why it could not be bound; `sidecar`: who answers
    there instead. `dialled`: the advertised address, with `dial_error` when that does not lead
    back here."""

    setting: str
    address: str
    any_port: bool = False
    taken: str = ""
    sidecar: str = ""
    dialled: str = ""
    dial_error: str = ""


async def look_at_doors(config: Config) -> list[Door]:
    """Binds each port for a moment."""
    doors = [await _control_door(config)]
    http = config.http_address()
    if http is not None:
        taken, listener = _listen(*http)
        if listener is not None:
            listener.close()
        doors.append(
            Door(setting="http", address=join_address(*http), any_port=not http[1], taken=taken)
        )
    return doors


async def _control_door(config: Config) -> Door:
    host, port = config.bind_address()
    taken, listener = _listen(host, port)
    door = Door(setting="bind", address=join_address(host, port), any_port=not port, taken=taken)
    if listener is not None:
        with closing(listener):
            dialled = (config.advertised_host(), listener.getsockname()[1])
            error = await asyncio.to_thread(_dial_back, listener, *dialled)
        return msgspec.structs.replace(door, dialled=join_address(*dialled), dial_error=error)
    if taken != IN_USE:
        return door
    local = "127.0.0.1" if host in ("*", "0.0.0.0") else "::1" if host == "::" else host
    try:
        here = await ask(local, port, DIAL_SECONDS, config.keys)
    except KVAgentError:
        return door
    error = ""
    try:
        there = await ask(config.advertised_host(), port, DIAL_SECONDS, config.keys)
        if there != here:
            error = "another sidecar answers"
    except KVAgentError as failure:
        error = str(failure)
    return msgspec.structs.replace(
        door,
        sidecar=f"kvagent {here.version}, engine {here.engine_id or 'none yet'!r}",
        dialled=join_address(config.advertised_host(), port),
        dial_error=error,
    )


def _listen(host: str, port: int) -> tuple[str, socket.socket | None]:
    """A socket that listens there as ZMQ's would, or why there is none."""
    try:
        found = socket.getaddrinfo("" if host == "*" else host, port, type=socket.SOCK_STREAM)
        family, kind, protocol, _, address = found[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        return error.strerror or str(error), None
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
        listener.listen()
    except OSError as error:
        listener.close()
        return error.strerror or str(error), None
    return "", listener


def _dial_back(listener: socket.socket, host: str, port: int) -> str:
    """Why connecting to HOST:PORT does not end at `listener`; empty: it does."""
    word = os.urandom(16)
    listener.settimeout(DIAL_SECONDS)
    try:
        with socket.create_connection((host, port), DIAL_SECONDS) as caller:
            caller.sendall(word)
            accepted, _ = listener.accept()
            with accepted:
                accepted.settimeout(DIAL_SECONDS)
                heard = accepted.recv(len(word), socket.MSG_WAITALL)
    except TimeoutError:
        return "no connection came back here"
    except OSError as error:
        return error.strerror or str(error)
    return "" if heard == word else "something else answers there"


def check_doors(doors: Sequence[Door], *, this_host_only: bool) -> Iterator[Finding]:
    for door in doors:
        what = f"{door.setting} {door.address}"
        if door.sidecar:
            yield Finding("ports", Severity.INFO, f"{what} is taken by {door.sidecar}")
        elif door.taken:
            yield Finding("ports", Severity.ERROR, f"{what}: {door.taken}", _unbound(door))
        elif door.any_port and not this_host_only:
            yield Finding(
                "ports",
                Severity.INFO,
                f"{what}: another free port at every start",
                "give it a number if there is a firewall between the hosts",
            )
        else:
            yield Finding("ports", Severity.OK, f"{what} is free")
        if door.dial_error:
            yield Finding(
                "advertise",
                Severity.ERROR,
                f"{door.dialled} does not lead back here: {door.dial_error}",
                "advertise an address of this host that peers can reach; look at DNS, NAT and "
                "firewalls",
            )
        elif door.dialled:
            yield Finding("advertise", Severity.OK, f"{door.dialled} leads back here")


def _unbound(door: Door) -> str:
    if door.taken == IN_USE:
        return f"free it (ss -ltnp shows who has it), or give another one with --{door.setting}"
    return f"give an address of this host with --{door.setting}"
