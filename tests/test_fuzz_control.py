"""Wrong frames on the control socket of real sidecars, and what works afterwards."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from typing import Any, TypeVar

import pytest
import zmq

from kvagent.wire.messages import (
    PROTOCOL,
    Hello,
    Peer,
    Presence,
    Welcome,
    Who,
    peer_codec,
)
from kvagent.wire.peer import HEAD, MAGIC
from tests.fuzz import LONG, Fuzz, Health, peer_messages
from tests.harness import Engine, Sidecar, check, random_fill, start

pytest.importorskip("nixl")

T = TypeVar("T", bound=Peer)

BATCH = 80
"""Frames of one connection: so few that it is still listened to."""


class Caller:
    """One connection to a sidecar's control socket, without any of the client's care."""

    def __init__(self, endpoint: str) -> None:
        self._socket = zmq.Context.instance().socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.SNDTIMEO, int(LONG * 1000))
        self._socket.connect(f"tcp://{endpoint}")

    def send(self, *frames: bytes) -> None:
        self._socket.send_multipart(frames)

    def ask(self, question: Peer, kind: type[T]) -> T:
        """Passes over the answers to what was sent before. Asks until it is answered."""
        call = time.monotonic_ns()
        end = time.monotonic() + LONG
        while time.monotonic() < end:
            self.send(HEAD.pack(MAGIC, PROTOCOL, call), peer_codec.encode(question))
            while self._socket.poll(1000):
                frames = self._socket.recv_multipart()
                for head, body in zip(frames[::2], frames[1::2], strict=True):
                    if HEAD.unpack(head)[2] == call:
                        answer = peer_codec.decode(body)
                        assert isinstance(answer, kind), answer
                        return answer
        raise AssertionError(f"no answer to {question}")

    def close(self) -> None:
        self._socket.close()

    def __enter__(self) -> Caller:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()


class Frames:
    """What a stranger sends: mostly a good head, and a message that is wrong in some way."""

    def __init__(self, seed: int, examples: list[bytes]) -> None:
        self._fuzz = Fuzz(seed, examples)
        self._random = self._fuzz.random

    def next(self) -> list[bytes]:
        frames = [self._head(), self._fuzz.message()]
        if self._random.random() < 0.05:
            return self._random.choice(
                [
                    [],
                    frames[:1],
                    frames[1:],
                    frames[::-1],
                    [*frames, b""],
                    [b"", *frames],
                    frames * 50,
                ]
            ) or [b""]
        return frames

    def _head(self) -> bytes:
        call = self._random.choice((0, 1, self._random.getrandbits(64)))
        head = HEAD.pack(MAGIC, PROTOCOL, call)
        if self._random.random() < 0.95:
            return head
        return self._random.choice(
            [
                HEAD.pack(b"KVB", PROTOCOL, call),
                HEAD.pack(MAGIC, self._random.randrange(256), call),
                head[: self._random.randrange(len(head))],
                head + b"x",
                self._random.randbytes(len(head)),
            ]
        )


@pytest.fixture(scope="module")
def sidecars(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Sidecar]]:
    folder = tmp_path_factory.mktemp("fuzz")
    made = start(folder, ["prefill-0", "prefill-1", "decode-0", "decode-1"])
    yield made
    for sidecar in made:
        sidecar.close()


def examples(engine: Engine) -> list[bytes]:
    ticket = engine.client.offer("fuzzed", [0, 1], 8)
    with Caller(engine.workers[0].endpoint) as caller:
        presence = caller.ask(Who(), Presence)
        assert presence.shape is not None
        hello = Hello(sender="fuzz", engine_id=engine.engine_id, shape=presence.shape)
        return peer_messages(hello, caller.ask(hello, Welcome), ticket)


def throw(engine: Engine, frames: Frames, count: int) -> None:
    """In batches, to the leader and to its follower; each batch is seen to have been looked at."""
    for number in range(count // BATCH):
        worker = engine.workers[number % 10 == 9]  # more for the leader
        with Caller(worker.endpoint) as caller:
            for _ in range(BATCH):
                caller.send(*frames.next())
            caller.ask(Who(), Presence)


def works(producer: Engine, consumer: Engine, name: str, tokens: int) -> None:
    """A transfer, once the ranks work together: some frames were believed to be a leader's, and
    what they asked a follower to read ends only with its handshake."""
    end = time.monotonic() + LONG
    for attempt in itertools.count():
        try:
            check(producer, consumer, f"{name} {attempt}", 0, tokens)
            return
        except AssertionError:
            reasons = consumer.seen[-1].failed_recving.values()
            if time.monotonic() > end or not any("not_ready" in reason for reason in reasons):
                print(reasons)
                raise
            time.sleep(0.1)


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    "count",
    [10_000, pytest.param(100_000, marks=[pytest.mark.slow, pytest.mark.timeout(3000)])],
)
def test_frames_that_are_wrong(sidecars: list[Sidecar], count: int) -> None:
    with (
        Engine(sidecars[:2], "prefill", fill=random_fill(1)) as producer,
        Engine(sidecars[2:3], "decode") as consumer,
    ):
        check(producer, consumer, "before", 0, 37)
        frames = Frames(7, examples(producer))
        throw(producer, frames, max(2000, count // 10))  # tables and allocators fill up once
        healths = [Health(sidecar) for sidecar in sidecars[:2]]
        throw(producer, frames, count)
        for health in healths:
            health.check()
        works(producer, consumer, "the session that there was", 37)
        works(consumer, producer, "a new one, the other way", 20)
        with Engine(sidecars[3:], "newcomer") as newcomer:
            works(producer, newcomer, "a new handshake", 37)


@pytest.mark.timeout(300)
def test_a_peer_that_does_not_stop(sidecars: list[Sidecar]) -> None:
    """It is refused again and again on one connection: soon it is not listened to, its messages
    cost next to nothing, and others are served."""
    with (
        Engine(sidecars[:2], "prefill", fill=random_fill(1)) as producer,
        Engine(sidecars[2:3], "decode") as consumer,
    ):
        check(producer, consumer, "before", 0, 37)
        frames = Frames(11, examples(producer))
        health = Health(sidecars[0])
        with Caller(producer.workers[0].endpoint) as flood:
            for number in range(20_000):
                flood.send(*frames.next())
                if number % 5000 == 0:
                    check(producer, consumer, f"meanwhile {number}", 0, 37)
            health.check(log=64 << 10)
            # Its patience comes back, and then a good question is answered.
            flood.ask(Who(), Presence)
        works(producer, consumer, "after", 37)
