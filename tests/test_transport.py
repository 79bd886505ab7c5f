"""Which transport carried a peer's bytes: the judgement alone, and over real NIXL."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvagent.fabric.witness import Watched, Witness, tcp_received
from tests.faults import SMALL, engine, offer, watched
from tests.harness import random_fill

BIG = 1 << 20


class Scene:
    """A witness whose TCP counters the test writes; by socket."""

    def __init__(self) -> None:
        self.sockets = {1: 500}
        self.witness = Witness(lambda: dict(self.sockets))

    def meet(self, *, same_host: bool | None = True, gpu: bool = False) -> Watched:
        peer = Watched(same_host=same_host, gpu=gpu)
        self.witness.meet(peer)
        return peer

    def read(self, peer: Watched, through: int | None = None, nbytes: int = BIG) -> None:
        self.witness.begin(id(peer), peer)
        self.arrive(through, nbytes)
        self.witness.end(id(peer), nbytes, 0.5)

    def arrive(self, through: int | None, nbytes: int = BIG) -> None:
        if through is not None:
            self.sockets[through] = self.sockets.get(through, 0) + nbytes + 100


def transport(peer: Watched) -> str | None:
    return peer.carried.transport if peer.carried else None


@pytest.mark.parametrize(
    ("same_host", "gpu", "expected"),
    [
        (True, False, "shared_memory"),
        (True, True, "cuda_ipc"),
        (False, False, "rdma"),
        (False, True, "rdma"),
        (None, False, "unknown"),
    ],
)
def test_no_tcp(same_host: bool | None, gpu: bool, expected: str) -> None:
    scene = Scene()
    peer = scene.meet(same_host=same_host, gpu=gpu)
    scene.read(peer)
    assert transport(peer) == expected
    assert peer.carried is not None
    assert "0 bytes came through TCP" in peer.carried.why
    assert peer.carried.rate == BIG / 0.5


def test_tcp_is_seen_wherever_the_peer_is() -> None:
    for same_host in (True, False, None):
        scene = Scene()
        peer = scene.meet(same_host=same_host)
        scene.read(peer, through=7)
        assert transport(peer) == "tcp"


def test_a_small_read_is_not_the_last_word() -> None:
    scene = Scene()
    peer = scene.meet()
    scene.read(peer, through=7, nbytes=4096)
    assert transport(peer) == "tcp"
    assert peer.carried is not None
    assert not peer.carried.final
    assert peer.carried.rate == 0
    scene.read(peer)
    assert transport(peer) == "shared_memory"
    scene.read(peer, through=7)
    assert transport(peer) == "shared_memory", "decided once"


def test_sockets_that_were_there_before_are_not_the_peers() -> None:
    scene = Scene()
    peer = scene.meet()
    scene.read(peer, through=1)
    assert transport(peer) == "shared_memory"


def test_failed_reads_tell_nothing() -> None:
    scene = Scene()
    peer = scene.meet()
    scene.witness.begin(1, peer)
    scene.witness.end(1, 0, 0.0)
    assert peer.carried is None
    assert not scene.witness._watches
    assert not scene.witness._reading


def test_peers_at_once() -> None:
    """Bytes that are there may be another peer's; bytes that are missing are missing for all."""
    scene = Scene()
    near, far = scene.meet(), scene.meet(same_host=False)
    scene.witness.begin(1, near)
    scene.witness.begin(2, far)
    scene.arrive(8)
    scene.witness.end(1, BIG, 0.5)
    scene.witness.end(2, BIG, 0.5)
    assert transport(near) is None
    assert transport(far) is None
    scene.read(far, through=8)
    assert transport(far) == "tcp"
    # What is known of one says what the other had no part in.
    scene.witness.begin(1, near)
    scene.witness.begin(2, far)
    scene.arrive(8)
    scene.witness.end(1, BIG, 0.5)
    scene.witness.end(2, BIG, 0.5)
    assert transport(near) == "shared_memory"
    scene.witness.forget(far)
    assert not scene.witness._taken


def test_counters_that_cannot_be_read_fail_nothing() -> None:
    def broken() -> dict[int, int]:
        raise OSError("no /proc here")

    witness = Witness(broken)
    peer = Watched()
    witness.meet(peer)
    witness.begin(1, peer)
    witness.end(1, BIG, 0.5)
    assert peer.carried is None


def test_the_kernels_counters() -> None:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as server:
        before = tcp_received()
        with socket.create_connection(server.getsockname()) as ours:
            theirs, _ = server.accept()
            with theirs:
                theirs.sendall(b"x" * 5000)
                assert len(ours.recv(5000, socket.MSG_WAITALL)) == 5000
                after = tcp_received()
    assert sorted(n for s, n in after.items() if s not in before) == [0, 5000]


@pytest.mark.parametrize(
    ("way", "transport", "expected"),
    [
        ("shm", "shared_memory", '["shared_memory", "rdma"]'),
        ("tcp", "tcp", '["shared_memory", "rdma"]'),
    ],
)
def test_over_nixl(tmp_path: Path, way: str, transport: str, expected: str) -> None:
    settings = {"expected_transport": expected}
    with (
        watched(tmp_path, ["prefill", "decode"], way, **settings) as (first, second),  # type: ignore[arg-type]
        engine([first], "prefill", SMALL, random_fill(1)) as producer,
        engine([second], "decode", SMALL) as consumer,
    ):
        consumer.client.fetch("r", offer(producer, "r", range(SMALL)), list(range(SMALL)))
        assert consumer.received("r") is None
        status = second.status()
        text = second.log.read_text()
    (peer,) = status["peers"]
    (rank,) = peer["ranks"]
    assert (peer["engine_id"], peer["transport"]) == ("prefill", transport)
    assert rank["transport"] == transport
    assert rank["bytes_per_second"] > 0
    assert "TCP sockets" in rank["why"]
    assert status["read_bytes_by_transport"] == {transport: status["bytes_read"]}
    warned = "expected_transport is shared_memory or rdma" in text
    assert warned == peer["unexpected"] == (way == "tcp")
    assert status["unexpected_transports"] == int(warned)
