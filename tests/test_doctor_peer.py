"""`kvagent doctor --peer`: who is there, what keeps us from asking, and whose keys are where."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import shutil
import socket
import threading
import time
from contextlib import closing
from pathlib import Path
from unittest.mock import Mock

import pytest
import zmq

from kvagent.config import split_address
from kvagent.doctor import peer as peer_module
from kvagent.doctor.facts import Finding, Severity
from kvagent.doctor.keys import check_keys, look_at_keys, read_ring
from kvagent.doctor.knock import Reach, knock
from kvagent.doctor.peer import PeerRead, examine
from kvagent.doctor.reads import check_peer
from kvagent.doctor.who import ask
from kvagent.errors import PeerGoneError
from kvagent.fabric.place import read_place
from kvagent.wire.keys import make_keys
from kvagent.wire.messages import PROTOCOL
from kvagent.wire.peer import HEAD
from tests.harness import Engine
from tests.loopback import LONG, Stage
from tests.test_agent_loopback import stage as stage


def test_a_sidecar_says_who_it_is(stage: Stage) -> None:
    leader, follower = stage.sidecars(2)
    ports = [sidecar.agent.rank.port for sidecar in (leader, follower)]
    empty = asyncio.run(ask("127.0.0.1", ports[0], LONG))
    assert (empty.engine_id, empty.shape) == ("", None)
    assert empty.not_ready == "rank 0 has no cache registered yet"
    engine = Engine([leader, follower], "prefill")  # type: ignore[list-item]
    try:
        first, second = (asyncio.run(ask("127.0.0.1", port, LONG)) for port in ports)
        assert (first.engine_id, first.rank, first.not_ready) == ("prefill", 0, "")
        assert first.shape == leader.agent.leader.team.shape()
        assert first.place.uid == os.geteuid()
        assert (second.engine_id, second.rank) == ("prefill", 1)
        assert (second.shape, second.not_ready) == (None, "rank 0 is elsewhere")
    finally:
        engine.close()


def test_nobody_is_there() -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as silent:
        port = silent.getsockname()[1]
        with pytest.raises(PeerGoneError, match="did not answer Who"):
            asyncio.run(ask("127.0.0.1", port, 0.2))
        assert knock("127.0.0.1", port, 0.2).reach is Reach.MUTE
    assert knock("127.0.0.1", port).reach is Reach.REFUSED
    assert knock("no-such-host.invalid", 1).reach is Reach.NO_NAME
    assert knock("x" * 300, 1).reach is Reach.NO_NAME


def test_a_call_that_nobody_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with a firewall that drops, or no route."""
    for error, reach in (
        (TimeoutError(), Reach.SILENT),
        (OSError(errno.EHOSTUNREACH, "No route to host"), Reach.NO_WAY),
    ):
        monkeypatch.setattr(socket, "create_connection", Mock(side_effect=error))
        assert knock("10.0.0.7", 1).reach is reach


def test_what_else_listens() -> None:
    for answer in (b"HTTP/1.1 400 Bad Request\r\n" * 4, b"\xff", b"SSH-2.0-x\r\n"):
        with closing(socket.create_server(("127.0.0.1", 0))) as server:

            def serve(server: socket.socket = server, answer: bytes = answer) -> None:
                caller, _ = server.accept()
                with caller:
                    caller.sendall(answer)

            thread = threading.Thread(target=serve)
            thread.start()
            assert knock(*server.getsockname()).reach is Reach.STRANGER
            thread.join(LONG)


def test_its_http_port_is_a_stranger(stage: Stage) -> None:
    """An HTTP server says nothing before the end of a line."""
    (one,) = stage.sidecars(1, http="127.0.0.1:0")
    http = one.agent._http
    assert http is not None
    host, port = split_address(http.address, "http")
    assert knock(host, port, LONG / 4).reach is Reach.STRANGER


def test_a_stranger_of_the_same_family() -> None:
    """ZMTP with a password is no sidecar."""
    with zmq.Context() as context, context.socket(zmq.ROUTER) as other:
        other.setsockopt(zmq.PLAIN_SERVER, 1)
        port = other.bind_to_random_port("tcp://127.0.0.1")
        assert knock("127.0.0.1", port, LONG).reach is Reach.STRANGER


@pytest.mark.parametrize("first", [b"S", b"\xff"])
def test_who_speaks_slowly_keeps_nobody(first: bytes) -> None:
    """A byte now and then is not a reason to wait for the next; nor is what cannot be a greeting,
    even on a connection that stays open."""
    over = threading.Event()
    with closing(socket.create_server(("127.0.0.1", 0))) as server:

        def serve() -> None:
            caller, _ = server.accept()
            with caller, contextlib.suppress(OSError):
                caller.sendall(first)
                while not over.wait(2.0):
                    if first == b"\xff":
                        caller.sendall(b"\0")

        thread = threading.Thread(target=serve)
        thread.start()
        seconds = 10 * LONG if first == b"S" else 0.5
        began = time.monotonic()
        found = knock(*server.getsockname(), seconds=seconds)
        assert time.monotonic() - began < LONG, "60 bytes would take two minutes"
        over.set()
        thread.join(LONG)
    assert found.reach is Reach.STRANGER


def look_at_peer(stage: Stage, mine: str, theirs: str) -> tuple[PeerRead, Finding]:
    """What `doctor --peer` finds at a sidecar without an engine; each side's folder of keys."""
    (sidecar,) = stage.sidecars(1, **({"keys": theirs} if theirs else {}))
    peer = asyncio.run(examine("127.0.0.1", sidecar.agent.rank.port, mine))
    ring = read_ring(mine) if mine else None
    place = read_place()
    (finding,) = check_peer("x:1", peer, {}, place, ring=ring, this_host_only=True)
    return peer, finding


def test_keys_that_do_not_fit(
    stage: Stage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peer_module, "CALL_SECONDS", 1.5)
    here, there = str(tmp_path / "here"), str(tmp_path / "there")
    make_keys(here, "here")
    _, public = make_keys(there, "there")
    ours, ring = read_ring(here).own, read_ring(there).own
    peer, finding = look_at_peer(stage, "", there)
    assert (peer.knock.reach, peer.error) == (Reach.LOCKED, "")  # type: ignore[union-attr]
    peer, finding = look_at_peer(stage, here, "")
    assert (peer.knock.reach, peer.error) == (Reach.OPEN, "")  # type: ignore[union-attr]
    peer, finding = look_at_peer(stage, here, there)
    assert "it had none of the allowed keys" in finding.found
    assert f"own key {ours}, allowed: {ours}" in finding.found
    shutil.copy(public, Path(here, "allowed"))
    peer, finding = look_at_peer(stage, here, there)
    assert f"it refused the key of this sidecar ({ours})" in finding.found
    assert ring in finding.found
    assert f"copy {here}/allowed/*-{ours}.key" in finding.todo
    shutil.copy(Path(here, "allowed", f"here-{ours}.key"), Path(there, "allowed"))
    peer, finding = look_at_peer(stage, here, there)
    assert peer.presence is not None
    assert finding.severity is Severity.WARNING  # there is no engine
    assert "start its engine" in finding.todo


def test_another_version() -> None:
    with zmq.Context() as context, context.socket(zmq.ROUTER) as other:
        other.setsockopt(zmq.LINGER, 0)
        port = other.bind_to_random_port("tcp://127.0.0.1")

        def answer() -> None:
            who, head, body = other.recv_multipart()
            magic, _, call = HEAD.unpack(head)
            other.send_multipart([who, HEAD.pack(magic, PROTOCOL + 1, call), body])

        thread = threading.Thread(target=answer)
        thread.start()
        peer = asyncio.run(examine("127.0.0.1", port, ""))
        thread.join(LONG)
    assert peer.refused
    (finding,) = check_peer("x:1", peer, {}, read_place(), ring=None, this_host_only=True)
    assert f"peer protocol {PROTOCOL + 1} at 127.0.0.1:{port} meets {PROTOCOL}" in finding.found
    assert finding.todo == "run the same kvagent on both sides"


# ---------------------------------------------------------------- keys


def keys(folder: Path) -> list[Finding]:
    return [*check_keys(read_ring(str(folder)), look_at_keys(folder), os.geteuid())]


def test_keys(tmp_path: Path) -> None:
    folder = tmp_path / "keys"
    (missing,) = keys(folder)
    assert missing.severity is Severity.ERROR
    secret, public = make_keys(str(folder), "here")
    own = read_ring(str(folder)).own
    (good,) = keys(folder)
    assert (good.severity, good.found) == (
        Severity.OK,
        f"own key {own}, allowed: {own}; closed to others",
    )
    _, other = make_keys(str(tmp_path / "other"), "other")
    other.rename(folder / "allowed" / "other.key")
    elsewhere = public.rename(tmp_path / "moved.key")
    (alone,) = keys(folder)
    assert alone.severity is Severity.INFO
    assert "not among the allowed" in alone.found
    (folder / "allowed" / "other.key").unlink()
    (empty,) = keys(folder)
    assert empty.severity is Severity.WARNING
    assert "allowed: none: nobody can connect" in empty.found
    assert f"{folder}/allowed" in empty.todo
    public.touch()
    (broken,) = keys(folder)
    assert broken.severity is Severity.ERROR
    assert "is not a key" in broken.found
    elsewhere.rename(public)
    secret.chmod(0o640)
    (leaked,) = keys(folder)
    assert (leaked.severity, leaked.todo) == (Severity.ERROR, f"chmod 600 {secret}")
    secret.chmod(0o600)
    public.chmod(0o666)
    (loose,) = keys(folder)
    assert "can be changed by others (mode 666)" in loose.found
