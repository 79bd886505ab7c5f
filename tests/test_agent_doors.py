"""What comes in at a sidecar's sockets and should not: none of it disturbs who belongs there."""

from __future__ import annotations

import asyncio
import os
import random
import socket
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvagent import EngineClient, FullAttentionSpec, ModelInfo, WorkerClient, WorkerInfo
from kvagent.agent import local_server
from kvagent.agent.local_server import Connection
from kvagent.client.channel import Channel
from kvagent.errors import AgentError, AgentLostError, GeometryError, KVAgentError, ProtocolError
from kvagent.wire import local
from kvagent.wire.control import Control
from kvagent.wire.messages import (
    AbortPart,
    Ack,
    Attach,
    Cancel,
    Claim,
    Complete,
    Completed,
    Completion,
    Drop,
    Failed,
    Hello,
    JoinAccepted,
    LeaseRef,
    Local,
    Meet,
    Offer,
    Ok,
    Part,
    PartDone,
    Peer,
    Refused,
    Register,
    Release,
    Renew,
    Resume,
    SharedRange,
    Verdict,
    Waiting,
    Welcomed,
)
from kvagent.wire.peer import PeerClient
from tests.harness import Engine, random_fill
from tests.loopback import LONG, LoopbackSidecar, Stage

INFO = WorkerInfo(engine_id="engine", model=ModelInfo(name="test", num_layers=2))
SPEC = FullAttentionSpec(
    block_size=4,
    num_kv_heads=4,
    head_size=8,
    dtype="float32",
    axes=("kv", "block", "head", "token", "channel"),
)


@pytest.fixture
def stage() -> Iterator[Stage]:
    made = Stage()
    yield made
    made.close()


@pytest.fixture
def door(stage: Stage, tmp_path: Path) -> LoopbackSidecar:
    """A sidecar with a real unix socket, and nobody attached."""
    return stage.sidecars(1, socket=str(tmp_path / "s.sock"))[0]


def path(door: LoopbackSidecar) -> str:
    return door.agent.config.socket


def works(door: LoopbackSidecar) -> None:
    """A whole engine comes up."""
    with Engine([door], "engine") as engine:  # type: ignore[list-item]
        engine.client.offer("r", [1], 4)
        engine.client.cancel("r")
        engine.sent("r", LONG)


def rest(sock: socket.socket) -> list[Local]:
    """All that comes until the other end closes."""
    reader, got = local.FrameReader(), []
    sock.settimeout(LONG)
    while data := sock.recv(65536):
        got.extend(reader.feed(data))
    return got


# ---------------------------------------------------------------- the unix socket


@pytest.mark.parametrize(
    "data",
    [
        struct.pack("<I", 2**32 - 1),
        struct.pack("<I", 4) + b"\xc1\xc1\xc1\xc1",
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        struct.pack("<I", 0),
        local.frame(Attach()) + struct.pack("<I", 3) + b"abc",
    ],
    ids=["oversized", "garbage", "http", "empty", "after attach"],
)
def test_bad_bytes_end_their_connection_only(door: LoopbackSidecar, data: bytes) -> None:
    with Engine([door], "engine") as engine:  # type: ignore[list-item]
        with local.connect(path(door), LONG) as sock:
            sock.sendall(data)
            answers = rest(sock)
        assert isinstance(answers[-1], Failed)
        engine.client.offer("r", [1], 4)
        engine.client.cancel("r")
        engine.sent("r", LONG)


@pytest.mark.parametrize(
    "message",
    [
        Offer(request_id="r", transfer_id="t", token=b"", blocks=(), num_tokens=1),
        Cancel(request_id="r"),
        Ack(seq=2**40),
        JoinAccepted(endpoint="x", version="y"),
    ],
    ids=lambda message: type(message).__name__,
)
def test_messages_of_nobody(door: LoopbackSidecar, message: Local) -> None:
    channel = Channel(path(door), LONG)
    with channel, pytest.raises(ProtocolError, match="before Attach"):
        channel.call(message)
    works(door)


def test_a_stranger_is_refused(door: LoopbackSidecar, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "peer_uid", lambda _: os.geteuid() + 1)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with local.connect(path(door), LONG) as sock:
        (answer,) = rest(sock)
    assert isinstance(answer, Failed)
    assert "is not ours" in answer.message
    monkeypatch.undo()
    works(door)


def test_too_many_connections(door: LoopbackSidecar, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_server, "MAX_CONNECTIONS", 3)
    clients = [WorkerClient(path(door)) for _ in range(4)]
    with pytest.raises(AgentError, match="too many connections"):
        clients[3].join(INFO)
    for client in clients:
        client.close()
    works(door)


def test_descriptors_that_nobody_takes(door: LoopbackSidecar) -> None:
    with local.connect(path(door), LONG) as sock:
        try:
            for _ in range(20):
                local.send_with_fds(sock, local.frame(Cancel(request_id="x")), [0] * 10)
        except OSError:  # it has closed the connection already
            pass
        sock.settimeout(LONG)
        try:
            while sock.recv(65536):
                pass
        except ConnectionResetError:
            pass
    works(door)


@pytest.mark.parametrize(
    ("ranges", "fds", "error"),
    [
        ((SharedRange(nbytes=4096),), 0, ProtocolError),  # announced, not sent
        ((SharedRange(nbytes=1 << 40),), 1, KVAgentError),  # larger than the file
        ((SharedRange(nbytes=4096, offset=1 << 62),), 1, KVAgentError),
        ((SharedRange(nbytes=4096, address=4096),), 0, GeometryError),  # not in this process
        ((), 0, KVAgentError),
    ],
    ids=["no descriptor", "too large", "offset", "address", "nothing"],
)
def test_memory_that_is_not_there(
    door: LoopbackSidecar, tmp_path: Path, ranges: Any, fds: int, error: type[Exception]
) -> None:
    file = os.open(tmp_path / "memory", os.O_RDWR | os.O_CREAT)
    os.ftruncate(file, 4096)
    worker = WorkerClient(path(door))
    try:
        worker.join(INFO)
        register = Register(specs={"l": SPEC}, num_blocks=1, ranges=ranges, views={})
        with pytest.raises(error):
            worker._channel.call(register, [file] * fds, timeout=LONG)
        caches = worker.allocate_kv_caches({"l": SPEC}, num_blocks=2)  # the next try is good
        assert caches["l"].shape == (2, 2, 4, 4, 8)
    finally:
        os.close(file)
        worker.close()


def test_calls_in_the_wrong_order(door: LoopbackSidecar) -> None:
    worker = WorkerClient(path(door))
    with pytest.raises(AgentError, match=r"join\(\) first"):
        worker.allocate_kv_caches({"l": SPEC}, num_blocks=1)
    with pytest.raises(AgentError, match="join"):
        _ = worker.endpoint
    with pytest.raises(AgentError, match=r"WorkerInfo\.leader is missing"):
        worker.join(
            WorkerInfo(engine_id="e", tp_rank=1, tp_size=2, model=ModelInfo(name="m", num_layers=1))
        )
    worker.join(INFO)
    worker.allocate_kv_caches({"l": SPEC}, num_blocks=1)
    with pytest.raises(AgentError, match="registered already"):
        worker.allocate_kv_caches({"l": SPEC}, num_blocks=1)
    worker.close()
    works(door)


def test_not_ready_says_what_is_missing(door: LoopbackSidecar) -> None:
    client = EngineClient(path(door))
    with pytest.raises(AgentError, match="not ready yet"):
        client.offer("r", [1], 4)
    with pytest.raises(AgentError, match="rank 0 has no cache registered yet"):
        client.wait_ready(0.1)
    client.close()
    worker = WorkerClient(path(door))
    worker.join(WorkerInfo(engine_id="e", tp_size=3, model=ModelInfo(name="m", num_layers=1)))
    worker.allocate_kv_caches({"l": SPEC}, num_blocks=1)
    client = EngineClient(path(door))
    with pytest.raises(AgentError, match=r"waiting for ranks \[1, 2\] of 3"):
        client.wait_ready(0.1)
    client.close()
    worker.close()


def test_a_lost_sidecar_fails_everything(door: LoopbackSidecar) -> None:
    engine = Engine([door], "engine")  # type: ignore[list-item]
    ticket = engine.client.offer("r", [1], 4)
    ticket["remote_port"] = 1
    ticket["remote_engine_id"] = "other"
    engine.client.fetch("f", ticket, [2])
    # Killed: the connection ends without a word.
    connection = door.agent._scheduler
    assert connection is not None
    door.stage.call(lambda: connection._end("killed"))
    out = engine.until(lambda o: bool(o.finished_sending), LONG)
    assert out.finished_sending == {"r"}
    assert out.failed_recving == {"f": "agent_lost: the sidecar of this engine is gone"}
    assert engine.client.step().is_empty()
    with pytest.raises(AgentLostError):
        engine.client.offer("s", [1], 4)
    with pytest.raises(AgentLostError):
        engine.client.drain(1)
    engine.close()


def test_a_call_without_an_answer_ends_the_client() -> None:
    """The answer may come later, and must not be taken for another call's."""
    ours, theirs = socket.socketpair()
    with theirs, Channel(ours, 0.1) as channel:
        with pytest.raises(AgentLostError, match="did not answer Attach in time"):
            channel.call(Attach())
        theirs.sendall(local.frame(JoinAccepted(endpoint="late", version="")))
        with pytest.raises(AgentLostError, match="open a new client"):
            channel.call(Attach())


# ---------------------------------------------------------------- the peer socket


class Stranger:
    """Speaks the peer protocol to a sidecar, and belongs to no engine."""

    def __init__(self, stage: Stage, endpoint: str) -> None:
        self.stage = stage
        host, port = endpoint.split(":")
        self._control = stage.call(Control)
        self._client = stage.call(lambda: PeerClient(self._control, host, int(port)))

    def ask(self, message: Peer, timeout: float = LONG) -> Peer | str:
        """The answer, or the text of the refusal."""

        async def work() -> Peer | str:
            try:
                return await self._client.call(message, timeout)
            except KVAgentError as error:
                return str(error)

        return self.stage.run(work())

    def close(self) -> None:
        self.stage.run(self._client.close())
        self.stage.run(self._control.close())


@pytest.fixture
def pair(stage: Stage) -> Iterator[tuple[Engine, Engine, Stranger]]:
    producer = Engine(stage.sidecars(1), "prefill", fill=random_fill(1))  # type: ignore[arg-type]
    consumer = Engine(stage.sidecars(2), "decode")  # type: ignore[arg-type]
    stranger = Stranger(stage, consumer.workers[0].endpoint)
    yield producer, consumer, stranger
    stranger.close()
    producer.close()
    consumer.close()


def still_good(producer: Engine, consumer: Engine) -> None:
    ticket = producer.client.offer("good", [1, 2], 8)
    consumer.client.fetch("good", ticket, [3, 4])
    assert consumer.received("good", LONG) is None
    producer.sent("good", LONG)


def part(fetch_id: str) -> Part:
    return Part(
        leader="leader",
        part_id=fetch_id,
        engine_id="prefill",
        host="127.0.0.1",
        port=1,
        epoch="x",
        num_tokens=4,
        remote_blocks=(b"\0\0\0\0",),
        local_blocks=(b"\0\0\0\0",),
        start_token=0,
    )


def test_what_a_stranger_may_not_ask(pair: tuple[Engine, Engine, Stranger], stage: Stage) -> None:
    producer, consumer, stranger = pair
    leader = consumer.workers[0].endpoint
    shape = stage.call(lambda: consumer_shape(stage))
    done = PartDone(engine_id="decode", tp_rank=1, pp_rank=0, part_id="f")
    refused: list[tuple[Peer, str]] = [
        (Ok(), "is no question"),
        (Welcomed(leader="x"), "is no question"),
        (Verdict(verdict="held", epoch="", lease_seconds=1), "is no question"),
        (Refused(code="x", message="y"), "is no question"),
        (part("f"), "follows nobody"),
        (PartDone(engine_id="other", tp_rank=1, pp_rank=0, part_id="f"), "no follower here"),
        (PartDone(engine_id="decode", tp_rank=0, pp_rank=0, part_id="f"), "no follower here"),
        (PartDone(engine_id="decode", tp_rank=-1, pp_rank=0, part_id="f"), "no follower here"),
        (PartDone(engine_id="decode", tp_rank=9, pp_rank=9, part_id="f"), "no follower here"),
        (Hello(sender="x", engine_id="other", shape=shape), "'decode' is here, not 'other'"),
        (Meet(engine_id="other", shape=shape, incarnation="x"), "is here, not other"),
        (Meet(engine_id="decode", shape=shape, incarnation="x"), "new incarnation"),
    ]
    for message, text in refused:
        answer = stranger.ask(message)
        assert isinstance(answer, str), message
        assert text in answer
        assert leader in answer
    for message in (done, AbortPart(part_id="f"), AbortPart(part_id="g", fence=True)):
        assert not isinstance(stranger.ask(message), str)
    assert "follows nobody" in str(stranger.ask(Drop(engine_id="nobody")))
    still_good(producer, consumer)


def consumer_shape(stage: Stage) -> Any:
    identity = stage._sidecars[-1].agent.rank.identity
    assert identity is not None
    return identity.shape


def test_guesses_about_leases(pair: tuple[Engine, Engine, Stranger], stage: Stage) -> None:
    """Without the token nobody can end or take a lease; unknown ones cost nothing."""
    producer, consumer, _ = pair
    stranger = Stranger(stage, producer.workers[0].endpoint)
    try:
        ticket = producer.client.offer("good", [1, 2], 8)
        known = ticket["kvagent"]["transfer_id"]
        guess = random.Random(0).randbytes(16)
        for message, verdict in [
            (
                Claim(
                    transfer_id=known, token=guess, fetch_id="f", engine_id="stranger", digest=b""
                ),
                "forbidden",
            ),
            (Release(transfer_id=known, token=guess), "forbidden"),
            (Release(transfer_id="x", token=guess), "unknown"),
            (
                Claim(transfer_id=known, token=b"", fetch_id="f", engine_id="stranger", digest=b""),
                "forbidden",
            ),
        ]:
            answer = stranger.ask(message)
            assert isinstance(answer, Verdict)
            assert answer.verdict == verdict
        answer = stranger.ask(Renew(leases=(LeaseRef(known, "f"), LeaseRef("x", "f"))))
        assert answer.verdicts == ("used", "unknown")  # type: ignore[union-attr]
        tokens = (guess, b"", guess + guess)
        leases = (
            *(Completion(known, token, "f", bytes(32)) for token in tokens),
            Completion("x", guess, "f", bytes(32)),
        )
        answer = stranger.ask(Complete(engine_id="stranger", leases=leases))
        assert isinstance(answer, Completed)
        assert answer.verdicts == ("forbidden", "forbidden", "forbidden", "unknown")
        assert stage._sidecars[0].agent.leader.leases.counts()["offered"] == 1
        consumer.client.fetch("good", ticket, [3, 4])
        assert consumer.received("good", LONG) is None
    finally:
        stranger.close()


def test_claims_of_what_is_never_offered(
    pair: tuple[Engine, Engine, Stranger], stage: Stage
) -> None:
    producer, consumer, _ = pair
    agent = stage._sidecars[0].agent
    stranger = Stranger(stage, producer.workers[0].endpoint)
    agent.leader.leases.max_parked = 10
    agent.leader.leases.park_seconds = 0.3

    async def flood() -> list[Any]:
        claims = [
            Claim(
                transfer_id=f"t{i}", token=b"", fetch_id=f"f{i}", engine_id="stranger", digest=b""
            )
            for i in range(50)
        ]
        return await asyncio.gather(*(stranger._client.call(c, LONG) for c in claims))

    try:
        answers = stage.run(flood())
        assert {answer.verdict for answer in answers} == {"unknown"}
        assert agent.leader.leases.counts()["parked"] == 0
        assert not agent.leader.lender._parked
    finally:
        stranger.close()
    still_good(producer, consumer)


def test_what_an_engine_said_before_it_went_is_heard() -> None:
    """Also when something was sent to it in between."""
    heard: list[Local] = []

    async def work() -> None:
        ended = asyncio.Event()

        async def handler(connection: Connection, message: Local) -> None:
            heard.append(message)

        async def closed(connection: Connection) -> None:
            ended.set()

        engine, here = socket.socketpair()
        connection = Connection(here, handler, closed)
        engine.sendall(local.frame(Attach()) + local.frame(Resume()))
        engine.close()
        connection.send(Waiting(reason="nobody reads this"))
        connection.send(Waiting(reason="nor this"))
        await asyncio.wait_for(ended.wait(), LONG)
        await connection.close()

    asyncio.run(work())
    assert heard == [Attach(), Resume()]
