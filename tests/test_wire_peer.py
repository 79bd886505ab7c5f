"""Calls between sidecars over real ZMQ sockets on loopback, and bytes that are no calls."""

from __future__ import annotations

import asyncio
import os
import socket
import struct
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest
import zmq
from hypothesis import given, settings
from hypothesis import strategies as st

from kvagent.errors import ConfigError, HandshakeError, PeerGoneError, ProtocolError
from kvagent.wire import peer
from kvagent.wire.control import Control
from kvagent.wire.messages import (
    MAX_PEER_BYTES,
    PROTOCOL,
    Drop,
    Ok,
    Peer,
    Refused,
    Renewed,
    peer_codec,
)
from kvagent.wire.peer import HEAD, MAGIC, PeerClient, PeerServer
from kvagent.wire.sockets import MAX_FRAMES, LoopSocket

LONG = 20.0
"""A bound against hangs, never reached."""


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(work, LONG))


@asynccontextmanager
async def sockets() -> AsyncIterator[Control]:
    control = Control()
    try:
        yield control
    finally:
        await control.close()


@asynccontextmanager
async def serving(
    handler: Callable[[Peer], Awaitable[Peer]], host: str = "127.0.0.1"
) -> AsyncIterator[tuple[Control, PeerServer, PeerClient]]:
    async with sockets() as control:
        server = PeerServer(control, handler)
        port = server.bind(host, 0)
        server.start()
        client = PeerClient(control, host, port)
        yield control, server, client
        await client.close()
        await server.close()


async def echo(message: Peer) -> Peer:
    """Answers `Drop` so that the answer shows which call it is for."""
    assert isinstance(message, Drop)
    return Renewed(verdicts=(message.engine_id,))


async def check(client: PeerClient, text: str) -> None:
    assert await client.call(Drop(engine_id=text), LONG) == Renewed(verdicts=(text,))


# ---------------------------------------------------------------- calls


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost"])
def test_calls_are_answered(host: str) -> None:
    async def work() -> None:
        async with serving(echo, host) as (_, server, client):
            await check(client, "one")
            await asyncio.gather(*(check(client, str(i)) for i in range(50)))
            assert server.rejected == 0
            bracketed = f"[{host}]" if ":" in host else host
            assert str(client) == f"{bracketed}:{client.port}"

    run(work())


def test_a_slow_handler_holds_up_nobody() -> None:
    release = asyncio.Event()

    async def handler(message: Peer) -> Peer:
        if message == Drop(engine_id="slow"):
            await release.wait()
        return await echo(message)

    async def work() -> None:
        async with serving(handler) as (_, _, client):
            slow = asyncio.create_task(check(client, "slow"))
            await check(client, "quick")
            assert not slow.done()
            release.set()
            await slow

    run(work())


def test_a_call_that_is_sent_again_is_answered_once() -> None:
    seen = 0
    gate = asyncio.Event()

    async def handler(message: Peer) -> Peer:
        nonlocal seen
        seen += 1
        await gate.wait()
        return await echo(message)

    async def work() -> None:
        async with serving(handler) as (_, _, client):
            call = asyncio.create_task(client.call(Drop(engine_id="x"), LONG, again=0.1))
            await asyncio.sleep(0.5)
            assert seen == 1, "repetitions wait for the same answer"
            gate.set()
            assert await call == Renewed(verdicts=("x",))
            await check(client, "next")
            assert not client._open

    run(work())


def test_a_call_made_before_the_peer_is_there() -> None:
    async def work() -> None:
        async with sockets() as control:
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", 0))
                port = probe.getsockname()[1]
            client = PeerClient(control, "127.0.0.1", port)
            call = asyncio.create_task(check(client, "early"))
            await asyncio.sleep(0.2)
            server = PeerServer(control, echo)
            server.bind("127.0.0.1", port)
            server.start()
            await call
            await client.close()
            await server.close()

    run(work())


@pytest.mark.parametrize("listening", [True, False])
def test_a_peer_that_never_answers(listening: bool) -> None:
    async def never(_: Peer) -> Peer:
        await asyncio.sleep(LONG)
        raise AssertionError

    async def work() -> None:
        async with serving(never) as (control, _, client):
            silent = client if listening else PeerClient(control, "127.0.0.1", 1)
            began = asyncio.get_running_loop().time()
            with pytest.raises(PeerGoneError, match=r"did not answer Ok within 0\.3 s"):
                await silent.call(Ok(), 0.3, again=0.1)
            assert asyncio.get_running_loop().time() - began < 3
            assert not silent._open
            await silent.close()

    run(work())


def test_a_handler_that_raises_is_a_refusal() -> None:
    async def handler(message: Peer) -> Peer:
        if message == Drop(engine_id="bad"):
            raise RuntimeError("secret")
        return await echo(message)

    async def work() -> None:
        async with serving(handler) as (_, _, client):
            with pytest.raises(HandshakeError, match="internal error") as caught:
                await client.call(Drop(engine_id="bad"), LONG)
            assert "secret" not in str(caught.value)
            await check(client, "good")

    run(work())


@pytest.mark.parametrize("port", [1, 0])
def test_closing_fails_open_and_later_calls(port: int) -> None:
    """Connected (0) or not (1)."""

    async def never(_: Peer) -> Peer:
        await asyncio.sleep(LONG)
        raise AssertionError

    async def work() -> None:
        async with serving(never) as (control, _, connected):
            client = PeerClient(control, "127.0.0.1", port) if port else connected
            calls = [asyncio.create_task(client.call(Ok(), LONG)) for _ in range(3)]
            await asyncio.sleep(0.2)
            await client.close()
            for outcome in await asyncio.gather(*calls, return_exceptions=True):
                assert isinstance(outcome, PeerGoneError)
                assert "was closed" in str(outcome)
            with pytest.raises(PeerGoneError, match="was closed"):
                await client.call(Ok(), LONG)

    run(work())


def test_a_cancelled_call_leaves_nothing() -> None:
    async def work() -> None:
        async with serving(echo) as (control, _, client):
            away = PeerClient(control, "127.0.0.1", 1)
            call = asyncio.create_task(away.call(Ok(), LONG))
            await asyncio.sleep(0.1)
            call.cancel()
            assert isinstance(
                (await asyncio.gather(call, return_exceptions=True))[0], asyncio.CancelledError
            )
            assert not away._open
            await away.close()
            await check(client, "good")

    run(work())


@pytest.mark.parametrize("host", ["bad host!", "a\0b", "\ud800"])
def test_not_an_address(host: str) -> None:
    async def work() -> None:
        async with sockets() as control:
            with pytest.raises(HandshakeError, match="is not an address"):
                PeerClient(control, host, 7100)

    run(work())


def test_a_port_that_is_taken() -> None:
    async def work() -> None:
        async with serving(echo) as (control, _, client):
            second = PeerServer(control, echo)
            with pytest.raises(ConfigError, match=rf"{client.port}.*--bind"):
                second.bind("127.0.0.1", client.port)
            await second.close()
            await check(client, "still there")

    run(work())


# ---------------------------------------------------------------- versions


def test_a_newer_caller_is_told_both_versions() -> None:
    async def work() -> None:
        async with serving(echo) as (control, server, client):
            raw = control.socket(zmq.DEALER)
            raw.connect(f"tcp://127.0.0.1:{client.port}")
            # Whatever its message is, it is not decoded.
            await raw.deliver([HEAD.pack(MAGIC, PROTOCOL + 6, 77), b"\xff garbage"])
            head, body = await raw.receive()
            assert HEAD.unpack(head) == (MAGIC, PROTOCOL, 77)
            answer = peer_codec.decode(body)
            assert isinstance(answer, Refused)
            assert f"{PROTOCOL + 6} here meets {PROTOCOL}" in answer.message
            raw.close(linger=0)
            await check(client, "good")
            assert server.rejected == 0

    run(work())


def test_another_version_at_the_peer_names_both() -> None:
    async def work() -> None:
        async with sockets() as control:
            router = control.socket(zmq.ROUTER)
            port = router.bind_to_random_port("tcp://127.0.0.1")
            client = PeerClient(control, "127.0.0.1", port)
            call = asyncio.create_task(client.call(Ok(), LONG))
            identity, head, _ = await router.receive()
            _, _, number = HEAD.unpack(head)
            newer = HEAD.pack(MAGIC, PROTOCOL + 6, number)
            await router.deliver([identity, newer, b"\xff garbage"])
            with pytest.raises(HandshakeError, match=f"protocol {PROTOCOL + 6} at .* {PROTOCOL}"):
                await call
            await client.close()
            router.close(linger=0)

    run(work())


# ---------------------------------------------------------------- bytes that are no calls


HEADER = HEAD.pack(MAGIC, PROTOCOL, 1)
GOOD = peer_codec.encode(Ok())
GARBAGE: dict[str, list[bytes]] = {
    "no message": [HEADER],
    "empty": [b""],
    "three frames": [HEADER, GOOD, b""],
    "many frames": [b"x"] * 500,
    "short head": [HEADER[:-1], GOOD],
    "long head": [HEADER + b"x", GOOD],
    "bad magic": [HEAD.pack(b"KVB", PROTOCOL, 1), GOOD],
    "bad msgpack": [HEADER, b"\xc1"],
    "truncated": [HEADER, GOOD[:-1]],
    "trailing": [HEADER, GOOD + b"\x00"],
    "empty message": [HEADER, b""],
    "no map": [HEADER, b"\x93\x01\x02\x03"],
    "unknown tag": [HEADER, b"\x81\xa4type\xa4exec"],
    "local tag": [HEADER, b"\x81\xa4type\xa6attach"],
    "no tag": [HEADER, b"\x80"],
    "wrong type": [HEADER, b"\x82\xa4type\xa5renew\xa6leases\x05"],
    "unknown field": [HEADER, b"\x82\xa4type\xa2ok\xa1x\x05"],
    "bad utf-8": [HEADER, b"\x82\xa4type\xa4drop\xa9engine_id\xa2\xff\xff"],
    "promises 4 G items": [HEADER, b"\x82\xa4type\xa5renew\xa6leases\xdd\xff\xff\xff\xff"],
    "deep": [HEADER, b"\x81\xa4type" + b"\x91" * 100_000],
    "deep in a field": [HEADER, b"\x82\xa4type\xa2ok\xa1x" + b"\x91" * 100_000 + b"\x00"],
}


@pytest.mark.parametrize("name", GARBAGE)
def test_garbage_does_not_stop_the_server(name: str) -> None:
    async def work() -> None:
        async with serving(echo) as (control, server, client):
            await check(client, "before")
            raw = control.socket(zmq.DEALER)
            raw.connect(f"tcp://127.0.0.1:{client.port}")
            await raw.deliver(GARBAGE[name])
            while server.rejected == 0:  # noqa: ASYNC110
                await asyncio.sleep(0.005)
            await check(client, "after")
            raw.close(linger=0)

    run(work())


@given(st.lists(st.binary(max_size=64), min_size=1, max_size=4))
def test_any_frames_are_a_protocol_error_or_a_call(frames: list[bytes]) -> None:
    """The part of the server that looks at bytes, without sockets."""

    async def work() -> None:
        async with sockets() as control:
            server = PeerServer(control, echo)
            for given_frames in (frames, [HEADER, *frames], [HEADER, GOOD, HEADER, *frames]):
                try:
                    server._accept(b"id", given_frames)
                except ProtocolError:
                    pass
            await server.close()

    run(work())


def test_calls_of_one_moment_share_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[int] = []
    deliver_now = LoopSocket.deliver_now

    def counted(self: LoopSocket, frames: Sequence[bytes]) -> bool:
        sent.append(len(frames))
        return deliver_now(self, frames)

    monkeypatch.setattr(LoopSocket, "deliver_now", counted)

    async def work() -> None:
        async with serving(echo) as (_, _, client):
            await check(client, "first")  # connected
            sent.clear()
            await asyncio.gather(*(check(client, f"number {n}") for n in range(200)))
            assert max(sent) <= MAX_FRAMES + 1
            assert len(sent) < 100  # of 200 questions and 200 answers

    run(work())


@settings(max_examples=30)
@given(st.integers(0, len(GOOD) - 1), st.binary(max_size=8))
def test_damaged_messages_decode_or_are_protocol_errors(where: int, noise: bytes) -> None:
    try:
        peer_codec.decode(GOOD[:where] + noise + GOOD[where + 1 :])
    except ProtocolError:
        pass


def test_a_huge_message_ends_only_its_own_connection() -> None:
    async def work() -> None:
        async with serving(echo) as (control, server, client):
            await check(client, "before")
            raw = control.socket(zmq.DEALER)
            raw.connect(f"tcp://127.0.0.1:{client.port}")
            await raw.deliver([HEADER, bytes(MAX_PEER_BYTES + 1)])
            await check(client, "after")
            raw.close(linger=0)
            assert server.rejected == 0  # it never arrived as a message

    run(work())


def test_too_large_a_message_is_refused_at_the_sender() -> None:
    async def work() -> None:
        async with serving(echo) as (_, _, client):
            with pytest.raises(ProtocolError, match="cap"):
                await client.call(Drop(engine_id="x" * MAX_PEER_BYTES), LONG)
            await check(client, "after")

    run(work())


def test_bytes_that_are_not_even_zmq() -> None:
    async def work() -> None:
        async with serving(echo) as (_, _, client):
            for data in (b"GET / HTTP/1.1\r\n\r\n", os.urandom(4096), b"", b"\xff" * 10, b"\x00"):
                with socket.create_connection(("127.0.0.1", client.port), LONG) as raw:
                    raw.sendall(data)
                    raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            await check(client, "after")

    run(work())


def test_too_many_calls_are_dropped_and_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer, "MAX_TASKS", 2)
    release = asyncio.Event()

    async def handler(message: Peer) -> Peer:
        await release.wait()
        return await echo(message)

    async def one(client: PeerClient, text: str) -> None:
        answer = await client.call(Drop(engine_id=text), LONG, again=0.1)
        assert answer == Renewed(verdicts=(text,))

    async def work() -> None:
        async with serving(handler) as (_, server, client):
            calls = [asyncio.create_task(one(client, str(i))) for i in range(5)]
            while server.rejected == 0:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            assert len(server._tasks) == 2
            release.set()
            await asyncio.gather(*calls)

    run(work())


@pytest.mark.parametrize(
    "frames",
    [
        [b"x"],
        [HEAD.pack(b"KVB", PROTOCOL, 1), GOOD],
        [HEADER, b"\xc1"],
        [HEAD.pack(MAGIC, PROTOCOL, 999), GOOD],
        [HEADER, GOOD, GOOD],
    ],
)
def test_garbage_as_an_answer_is_dropped(frames: list[bytes]) -> None:
    async def work() -> None:
        async with sockets() as control:
            router = control.socket(zmq.ROUTER)
            port = router.bind_to_random_port("tcp://127.0.0.1")
            client = PeerClient(control, "127.0.0.1", port)
            call = asyncio.create_task(client.call(Drop(engine_id="x"), LONG))
            identity, head, _ = await router.receive()
            await router.deliver([identity, *frames])
            await router.deliver([identity, head, GOOD])
            await router.deliver([identity, head, GOOD])  # a second answer
            assert await call == Ok()
            await client.close()
            router.close(linger=0)

    run(work())


def test_a_peer_that_fills_the_window_and_goes() -> None:
    """What it left behind is read after its connection broke; that has aborted the process."""
    code = """
import asyncio, os, subprocess, sys
from kvagent.wire.control import Control
from kvagent.wire.messages import Ok
from kvagent.wire.peer import PeerServer, PeerClient
from kvagent.wire.messages import Drop

async def handler(message):
    return Ok()

async def main():
    control = Control()
    server = PeerServer(control, handler)
    port = server.bind("127.0.0.1", 0)
    flood = (
        "import os, time, zmq; s = zmq.Context().socket(zmq.DEALER);"
        f"s.connect('tcp://127.0.0.1:{port}');"
        "[s.send(b'x' * 2000) for _ in range(400)]; time.sleep(0.5); os._exit(0)"
    )
    subprocess.run([sys.executable, "-c", flood], check=True)
    await asyncio.sleep(4)  # for the libzmq thread; nobody reads meanwhile
    server.start()
    client = PeerClient(control, "127.0.0.1", port)
    assert await client.call(Drop(engine_id="x"), 10) == Ok()
    await client.close()
    await server.close()
    await control.close()

asyncio.run(main())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
