"""Judges measured reads: between two processes here, and from a running engine."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib.metadata import version

from kvagent.doctor.facts import Finding, Severity
from kvagent.doctor.host import SHARE_PID
from kvagent.doctor.keys import Ring
from kvagent.doctor.peer import PeerRead, RankRead
from kvagent.doctor.reach import why_closed
from kvagent.doctor.reading import Reading
from kvagent.doctor.selfread import SelfRead
from kvagent.fabric.place import Place

__all__ = ["check_peer", "check_places", "check_self_read"]

VERSION = version("kvagent")
SLOW = 8
"""A read that takes so many times as long as a copy did not go from memory to memory."""
NOT_SHARED = "cma and cuda_ipc are near to a plain copy: see the checks transports and isolation"


def check_self_read(read: SelfRead, transport: str) -> Iterator[Finding]:
    """`transport` as UCX named it, or empty."""
    check = f"read {read.kind}"
    if read.absent:
        yield Finding(check, Severity.INFO, f"not measured: {read.absent}")
    elif read.error or read.reading is None:
        yield Finding(
            check, Severity.ERROR, read.error, "see the checks ucx, transports and isolation"
        )
    else:
        reading = read.reading
        copy = reading.nbytes / read.copy_seconds / 1e9
        found = f"{_words(reading, transport)}; a plain copy: {copy:.1f} GB/s"
        if read.kind != "ordinary":
            found = f"{found}; {read.pages}"
        slow = transport.startswith("tcp") or reading.seconds > SLOW * read.copy_seconds
        yield Finding(
            check, Severity.WARNING if slow else Severity.OK, found, NOT_SHARED if slow else ""
        )


def check_peer(
    address: str,
    peer: PeerRead,
    transports: Mapping[str, str],
    here: Place,
    *,
    ring: Ring | None,
    this_host_only: bool,
) -> Iterator[Finding]:
    """`transports` as UCX named them, by fabric. `ring`: our keys, if we have any.
    `this_host_only`: our own sidecar binds to loopback."""
    check = f"peer {address}"
    presence = peer.presence
    if presence is None:
        yield Finding(check, Severity.ERROR, *why_closed(peer, ring))
        return
    same_host = bool(here.same_host(presence.place))
    engine = f"engine {presence.engine_id!r}" if presence.engine_id else "no engine yet"
    other = "" if presence.version == VERSION else f" ({VERSION} here)"
    host = "this host" if same_host else "another host"
    found = f"kvagent {presence.version}{other}, {engine}, {host}"
    if presence.shape is None:
        yield Finding(
            check,
            Severity.WARNING,
            f"{found}; nothing to read: {presence.not_ready}",
            "give the address of rank 0's sidecar" if presence.rank else "start its engine",
        )
        return
    if peer.error:
        yield Finding(
            check,
            Severity.ERROR,
            f"{found}; {peer.error}",
            "run the same kvagent on both sides; the peer's log may say more",
        )
        return
    yield Finding(check, Severity.OK, f"{found}; the handshake works; ranks: {len(peer.ranks)}")
    if this_host_only and not same_host:
        yield Finding(
            check,
            Severity.WARNING,
            "the sidecar with these settings listens on loopback alone, and so does its UCX: it "
            "cannot read from another host",
            "bind to an address of the network, with --bind",
        )
    if same_host:
        yield from check_places(check, here, presence.place)
    for rank in peer.ranks:
        yield _rank(check, rank, transports.get(rank.fabric, ""), same_host)


def _rank(check: str, rank: RankRead, transport: str, same_host: bool) -> Finding:
    where = f"rank ({rank.rank}) at {rank.address}"
    if rank.reading is None:
        return Finding(
            check,
            Severity.ERROR,
            f"{where}: {rank.error}",
            "can its advertised address be dialled from here, and do UCX's ports pass "
            "(UCX_TCP_PORT_RANGE)?",
        )
    memory = "" if rank.kind == "dram" else ", GPU memory"
    by_tcp = same_host and transport.startswith("tcp")
    return Finding(
        check,
        Severity.WARNING if by_tcp else Severity.OK,
        f"{where}{memory}: canary good, {_words(rank.reading, transport)}",
        f"it is on this host, and read over TCP. {NOT_SHARED}" if by_tcp else "",
    )


def check_places(check: str, here: Place, there: Place) -> Iterator[Finding]:
    """Why reads between two processes of one host will fail, or take TCP."""
    same_user = here.user_namespace == there.user_namespace
    if here.uid != there.uid or not same_user:
        namespaces = "" if same_user else ", in other user namespaces"
        yield Finding(
            check,
            Severity.WARNING,
            f"uid {there.uid} there and {here.uid} here{namespaces}: UCX takes cma, and reads fail",
            "run both sidecars under one uid, or set UCX_TLS=tcp for both",
        )
    if here.pid_namespace != there.pid_namespace:
        yield Finding(
            check,
            Severity.WARNING,
            "another PID namespace than here: UCX takes TCP without a word",
            f"let the containers share it: {SHARE_PID}",
        )


def _words(reading: Reading, transport: str) -> str:
    by = f" by {transport}" if transport else ""
    size = f"{reading.nbytes >> 20} MiB" if reading.nbytes >> 20 else f"{reading.nbytes} bytes"
    return f"{size} at {reading.rate}{by}, first bytes after {reading.connect_seconds * 1e3:.0f} ms"
