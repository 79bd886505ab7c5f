"""The unix socket: framing, descriptors, and who may listen and connect."""

from __future__ import annotations

import itertools
import os
import socket
import stat
import struct
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvagent.errors import AgentLostError, ConfigError, KVAgentError, ProtocolError
from kvagent.wire import local
from kvagent.wire.messages import (
    MAX_LOCAL_BYTES,
    Ack,
    Cancel,
    Drained,
    DropPeer,
    Fetch,
    Local,
    Offer,
    Waiting,
)

names = st.text(st.characters(exclude_categories=("Cs",)), max_size=20)
blocks = st.lists(st.binary(max_size=16), max_size=3).map(tuple)
messages = st.one_of(
    st.builds(Ack, seq=st.integers(0, 2**63)),
    st.builds(Cancel, request_id=names),
    st.builds(Drained, left=st.lists(names, max_size=3).map(tuple)),
    st.builds(
        Offer,
        request_id=names,
        transfer_id=names,
        token=st.binary(max_size=16),
        blocks=blocks,
        num_tokens=st.integers(0, 2**40 - 1),
    ),
    st.builds(
        Fetch,
        request_id=names,
        engine_id=names,
        host=names,
        port=st.integers(0, 65535),
        epoch=names,
        transfer_id=names,
        token=st.binary(max_size=16),
        num_tokens=st.integers(0, 2**40 - 1),
        remote_blocks=blocks,
        local_blocks=blocks,
        start_token=st.integers(0, 2**40 - 1),
    ),
)


# ---------------------------------------------------------------- framing


def read(data: bytes, cuts: list[int]) -> list[Local]:
    reader = local.FrameReader()
    got: list[Local] = []
    edges = [0, *sorted(cut % (len(data) + 1) for cut in cuts), len(data)]
    for start, end in itertools.pairwise(edges):
        got.extend(reader.feed(data[start:end]))
    return got


@given(st.lists(messages, max_size=6), st.lists(st.integers(0, 10**6), max_size=12))
def test_any_split_gives_the_same_messages(sent: list[Local], cuts: list[int]) -> None:
    data = b"".join(map(local.frame, sent))
    assert read(data, cuts) == sent
    assert read(data, list(range(len(data)))) == sent  # a byte at a time


@given(st.lists(messages, min_size=1, max_size=4), st.integers(1, 10**6))
def test_a_truncated_frame_is_waited_for(sent: list[Local], missing: int) -> None:
    frames = [local.frame(message) for message in sent]
    cut = 1 + missing % len(frames[-1])
    reader = local.FrameReader()
    got = list(reader.feed(b"".join(frames)[:-cut]))
    assert got == sent[:-1]
    assert list(reader.feed(frames[-1][-cut:])) == sent[-1:]


@given(st.lists(messages, max_size=3), st.binary(max_size=64))
def test_garbage_is_a_protocol_error(good: list[Local], payload: bytes) -> None:
    """What came before it is delivered; what it raises is never an error of a library."""
    data = b"".join(map(local.frame, good)) + struct.pack("<I", len(payload)) + payload
    got: list[Local] = []
    reader = local.FrameReader()
    try:
        for message in reader.feed(data):
            got.append(message)  # noqa: PERF402  (those before the error count)
    except ProtocolError:
        assert got == good
    else:  # it happens to be a message
        assert got[: len(good)] == good


@given(messages, st.integers(0, 10**6), st.integers(1, 255))
def test_a_flipped_byte_is_another_message_or_a_protocol_error(
    message: Local, where: int, flip: int
) -> None:
    data = bytearray(local.frame(message))
    data[4 + where % (len(data) - 4)] ^= flip
    try:
        list(local.FrameReader().feed(bytes(data)))
    except ProtocolError:
        pass


@pytest.mark.parametrize("length", [MAX_LOCAL_BYTES + 1, 2**32 - 1])
def test_an_oversized_frame_is_refused_before_it_arrives(length: int) -> None:
    with pytest.raises(ProtocolError, match="cap"):
        list(local.FrameReader().feed(struct.pack("<I", length)))


def test_too_large_a_message_is_refused_at_the_sender() -> None:
    with pytest.raises(ProtocolError, match="cap"):
        local.frame(Waiting(reason="x" * (MAX_LOCAL_BYTES + 1)))


@pytest.mark.parametrize("message", [Cancel(request_id="\ud800"), Ack(seq=2**64)])
def test_what_cannot_be_encoded_is_one_of_our_errors(message: Local) -> None:
    with pytest.raises(ProtocolError, match="cannot be sent"):
        local.frame(message)


# ---------------------------------------------------------------- descriptors


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield ours, theirs


def test_descriptors_travel(pair: tuple[socket.socket, socket.socket], tmp_path: Path) -> None:
    ours, theirs = pair
    files = [os.open(tmp_path / str(i), os.O_RDWR | os.O_CREAT) for i in range(3)]
    message = DropPeer(engine_id="x")
    local.send_with_fds(ours, local.frame(message), files)
    data, fds = local.receive(theirs)
    try:
        assert list(local.FrameReader().feed(data)) == [message]
        assert [os.fstat(fd).st_ino for fd in fds] == [os.fstat(fd).st_ino for fd in files]
        assert not set(fds) & set(files)
        assert not any(os.get_inheritable(fd) for fd in fds)
    finally:
        for fd in (*files, *fds):
            os.close(fd)


def test_no_descriptors_and_the_end_of_the_stream(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    ours, theirs = pair
    local.send_with_fds(ours, local.frame(Ack(seq=1)), [])
    data, fds = local.receive(theirs)
    assert list(local.FrameReader().feed(data)) == [Ack(seq=1)]
    assert fds == []
    ours.close()
    assert local.receive(theirs) == (b"", [])


def test_too_many_descriptors_are_refused_and_closed(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    ours, theirs = pair
    before = len(os.listdir("/proc/self/fd"))
    many = [os.dup(0) for _ in range(local.MAX_FDS + 4)]
    local.send_with_fds(ours, local.frame(Ack(seq=1)), many)
    for fd in many:
        os.close(fd)
    with pytest.raises(ProtocolError, match="descriptors"):
        local.receive(theirs)
    assert len(os.listdir("/proc/self/fd")) == before


# ---------------------------------------------------------------- listening and connecting


def test_mode_and_peer_uid(tmp_path: Path) -> None:
    path = str(tmp_path / "s.sock")
    old = os.umask(0)  # the mode must not depend on it
    try:
        listener = local.listen(path)
        assert os.umask(0) == 0
    finally:
        os.umask(old)
    with listener:
        found = os.stat(path)
        assert stat.S_ISSOCK(found.st_mode)
        assert stat.S_IMODE(found.st_mode) == 0o600
        with local.connect(path, 5.0):
            connection, _ = listener.accept()
            with connection:
                assert local.peer_uid(connection) == os.getuid()


def test_allowed_uids(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert local.allowed(1000)
    assert local.allowed(0)
    assert not local.allowed(1001)
    assert not local.allowed(65534)


def test_a_stale_socket_is_taken_over(tmp_path: Path) -> None:
    path = str(tmp_path / "s.sock")
    local.listen(path).close()  # as a killed sidecar leaves it
    assert os.path.exists(path)
    with local.listen(path), local.connect(path, 5.0):
        pass


def test_a_live_socket_is_refused(tmp_path: Path) -> None:
    path = str(tmp_path / "s.sock")
    with local.listen(path):
        with pytest.raises(ConfigError, match="another sidecar already listens"):
            local.listen(path)
        local.connect(path, 5.0).close()  # and it goes on


@pytest.mark.parametrize("kind", ["file", "folder", "link"])
def test_what_is_no_socket_is_left_alone(tmp_path: Path, kind: str) -> None:
    path, file = tmp_path / "s.sock", tmp_path / "precious"
    file.write_text("precious")
    if kind == "file":
        path.write_text("precious")
    elif kind == "folder":
        path.mkdir()
    else:
        path.symlink_to(file)
    with pytest.raises(ConfigError, match="not a socket"):
        local.listen(str(path))
    assert path.exists()
    assert file.read_text() == "precious"
    assert kind != "file" or path.read_text() == "precious"


@pytest.mark.parametrize("path", ["no/such/folder/s.sock", "x" * 200, "/proc/s.sock"])
def test_a_path_that_cannot_be_bound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"cannot listen on .*--socket"):
        local.listen(path)


@pytest.mark.parametrize("path", ["missing.sock", "x" * 200])
def test_nobody_listens(tmp_path: Path, path: str) -> None:
    with pytest.raises(AgentLostError, match="start one with: kvagent serve --socket"):
        local.connect(str(tmp_path / path), 0.1)
    assert issubclass(AgentLostError, KVAgentError)


def test_a_sidecar_that_is_starting_is_waited_for(tmp_path: Path) -> None:
    path = str(tmp_path / "s.sock")
    listener = threading.Timer(0.2, lambda: made.append(local.listen(path)))
    made: list[socket.socket] = []
    listener.start()
    local.connect(path, 20.0).close()
    listener.join()
    made[0].close()
