"""/healthz, /readyz, /status: what they say in every state of a sidecar."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from contextlib import ExitStack, suppress
from typing import Any

import httpx
import pytest

from kvagent.agent import http as http_module
from kvagent.config import split_address
from kvagent.visible.health import FORGET_SECONDS, IN_A_ROW, MAX_PEERS, PeerHealth
from kvagent.visible.history import STEP_SECONDS, STEPS, Throughput
from tests.harness import Engine
from tests.loopback import LONG, LoopbackSidecar, Stage
from tests.test_agent_loopback import LOCAL, failed, good, hung, offer, sidecar, wait_for
from tests.test_agent_loopback import engines as engines
from tests.test_agent_loopback import stage as stage

Engines = Callable[..., Engine]
HTTP = "127.0.0.1:0"


def get(one: LoopbackSidecar, path: str) -> httpx.Response:
    http = one.agent._http
    assert http is not None
    return httpx.get(f"http://{http.address}{path}", trust_env=False, timeout=LONG)


def ready(one: LoopbackSidecar) -> str:
    """What keeps it from being ready; "" when nothing does."""
    answer = get(one, "/readyz")
    text = answer.text.strip()
    assert answer.status_code == (200 if text == "ok" else 503)
    return "" if text == "ok" else text


def status(engine: Engine, rank: int = 0) -> dict[str, Any]:
    found: dict[str, Any] = get(sidecar(engine, rank), "/status").json()
    return found


def test_ready(stage: Stage, engines: Engines) -> None:
    (alone,) = stage.sidecars(1, http=HTTP)
    assert get(alone, "/healthz").text == "ok\n"
    assert ready(alone) == "no engine has registered a cache"
    engine = engines("decode", 2, http=HTTP)
    one = sidecar(engine)
    assert ready(one) == ""
    wait_for(lambda: not ready(sidecar(engine, 1)), "the follower is ready")
    engine.client.quiesce(LONG)
    assert ready(one).startswith("quiesced")
    engine.client.resume()
    wait_for(lambda: not ready(one), "ready again")
    sidecar(engine, 1).close()
    wait_for(lambda: "ranks [1] have been silent" in ready(one), "it is noticed")
    assert [each["state"] for each in status(engine)["ranks"]] == ["here", "silent"]
    engine.client.drain(0.1)
    assert ready(one) == "draining"
    assert get(one, "/healthz").status_code == 200


def test_not_ready_when_every_peer_fails(engines: Engines) -> None:
    consumer = engines("decode", http=HTTP, handshake_timeout=0.3)
    tickets = []
    for name in ("prefill-a", "prefill-b"):
        producer = engines(name)
        good(producer, consumer, f"good from {name}")
        tickets.append([offer(producer, f"{name} {i}") for i in range(IN_A_ROW + 1)])
        sidecar(producer).fabric.die()
    one = sidecar(consumer)
    for number, ticket in enumerate(tickets[0][:IN_A_ROW]):
        assert failed(consumer, f"a{number}", ticket).split(":")[0] in ("peer_gone", "handshake")
    assert status(consumer)["failing_peers"].keys() == {"prefill-a"}
    assert ready(one) == "", "the other peer is good"
    for number, ticket in enumerate(tickets[1][:IN_A_ROW]):
        failed(consumer, f"b{number}", ticket)
    assert "fetches from every peer failed: prefill-a (" in ready(one)
    producer = engines("prefill-c")
    good(producer, consumer, "from c")
    assert ready(one) == ""


def test_not_ready_when_the_only_peer_hangs(engines: Engines) -> None:
    """Its reads time out one after the other."""
    producer = engines("prefill")
    consumer = engines("decode", http=HTTP, fence_seconds=0.2)
    good(producer, consumer, "good")
    sidecar(consumer).give_up_after(0.3)
    sidecar(producer).hang()
    for number in range(IN_A_ROW):
        request = f"r{number}"
        assert failed(consumer, request, offer(producer, request)).startswith("timed_out:")
    assert "fetches from every peer failed: prefill (timed_out)" in ready(sidecar(consumer))
    sidecar(producer).resume()
    sidecar(consumer).give_up_after(LONG)
    good(producer, consumer, "again")
    assert ready(sidecar(consumer)) == ""


class TestPeerHealth:
    def ends(self, health: PeerHealth, peer: str, *causes: str, now: float = 0.0) -> None:
        for cause in causes:
            health.ended(now, peer, cause)

    def test_recovers_by_itself(self) -> None:
        health = PeerHealth()
        self.ends(health, "a", *["peer_gone"] * IN_A_ROW)
        assert health.why_all_fail(FORGET_SECONDS - 1, []).endswith("a (peer_gone)")
        assert health.why_all_fail(FORGET_SECONDS, []) == ""
        self.ends(health, "a", "transport", now=FORGET_SECONDS)
        assert health.why_all_fail(FORGET_SECONDS, []), "the next fetch was the test"
        self.ends(health, "a", "ok", now=FORGET_SECONDS)
        assert health.why_all_fail(FORGET_SECONDS, []) == ""

    def test_what_speaks_of_the_way_and_what_does_not(self) -> None:
        health = PeerHealth()
        self.ends(health, "a", "transport", "handshake")
        assert not health.failing(0)
        self.ends(health, "a", "expired", "cancelled", "peer_gone")
        assert health.failing(0) == {"a": "peer_gone"}
        self.ends(health, "b", "expired")
        assert not health.why_all_fail(0, []), "b has answered"
        assert not PeerHealth().why_all_fail(0, ["c"])

    def test_a_connected_peer_that_does_not_fail(self) -> None:
        health = PeerHealth()
        self.ends(health, "a", *["transport"] * IN_A_ROW)
        assert health.why_all_fail(0, ["a"])
        assert not health.why_all_fail(0, ["a", "b"])

    def test_is_bounded(self) -> None:
        health = PeerHealth()
        for number in range(MAX_PEERS * 2):
            self.ends(health, f"{number}", *["transport"] * IN_A_ROW)
        assert len(health.failing(0)) == MAX_PEERS
        assert health.why_all_fail(0, []).endswith(f"and {MAX_PEERS - 3} more")


def test_throughput() -> None:
    history = Throughput(now=100.0)
    history.sample(101, read=10, lent=0, good=1, failed=0)
    history.sample(104, read=30, lent=1, good=1, failed=1)
    history.sample(100 + STEP_SECONDS, read=35, lent=1, good=2, failed=1)
    shown = history.show(100 + 2.5 * STEP_SECONDS)
    assert shown["read_bytes"] == [30, 5, 0]
    assert shown["leases_completed"] == [1, 0, 0]
    assert shown["fetches_good"] == [1, 1, 0]
    assert shown["fetches_failed"] == [1, 0, 0]
    assert shown["last_step_seconds"] == 2.5
    history.sample(1e7, read=36, lent=1, good=2, failed=1)
    assert history.show(1e7)["read_bytes"] == [1]
    history.sample(1e7 + 2 * STEPS * STEP_SECONDS - 1, read=36, lent=1, good=2, failed=1)
    assert len(history.show(1e7 + STEPS * STEP_SECONDS)["read_bytes"]) <= STEPS  # type: ignore[arg-type]


def test_status(engines: Engines) -> None:
    of = {"num_blocks": 64}
    producer = engines("prefill", http=HTTP, of=of)
    consumer = engines("decode", 2, http=HTTP, of=of)
    good(producer, consumer, "first")
    ticket = offer(producer, "lost")
    producer.client.cancel("lost")
    failed(consumer, "lost", ticket)
    hung(producer, consumer, "r")
    shown = status(consumer)
    assert (shown["role"], shown["rank"], shown["world_size"]) == ("leader", 0, 2)
    (transfer,) = shown["transfers"]
    assert (transfer["request_id"], transfer["peer"]) == ("r", "prefill")
    assert transfer["state"] == "reading"
    assert transfer["bytes"] == 0 < transfer["wanted_bytes"] == shown["in_flight_bytes"]
    (failure,) = shown["failures"]
    assert (failure["request_id"], failure["cause"]) == ("lost", "cancelled")
    assert shown["throughput"]["read_bytes"]
    (follower,) = status(consumer, 1)["transfers"]
    assert (follower["request_id"], follower["peer"]) == ("", "prefill")
    (lent,) = status(producer)["lent"]
    assert (lent["request_id"], lent["state"], lent["consumer"]) == ("r", "claimed", "decode")
    sidecar(producer).resume()
    assert consumer.received("r", LONG) is None
    wait_for(lambda: not status(consumer)["transfers"], "the transfer leaves the list")
    assert status(consumer)["in_flight_bytes"] == 0


def test_status_says_no_secret(engines: Engines) -> None:
    producer, consumer = engines("prefill", http=HTTP), engines("decode", http=HTTP)
    sidecar(producer).hang()
    ticket = offer(producer, "r")
    consumer.client.fetch("r", ticket, LOCAL)
    wait_for(lambda: status(consumer)["parts_reading"], "reading")
    agent = sidecar(consumer).agent
    (running,) = sidecar(consumer).stage.call(agent.leader.borrower._running.values)
    secrets = (ticket["kvagent"]["token"], running.part_id, running.record.fetch_id)
    for engine in (producer, consumer):
        for path in ("/status", "/metrics", "/"):
            text = get(sidecar(engine), path).text
            assert not [secret for secret in secrets if secret in text]
    sidecar(producer).resume()
    assert consumer.received("r", LONG) is None


def test_cards_can_be_left_out(engines: Engines) -> None:
    one = sidecar(engines("decode", http=HTTP))
    assert get(one, "/status").json()["cards"]
    assert "cards" not in get(one, "/status?cards=0").json()


class TestConnectionsThatAreNotUsed:
    REQUEST = b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n"

    def dial(self, one: LoopbackSidecar) -> socket.socket:
        http = one.agent._http
        assert http is not None
        return socket.create_connection(split_address(http.address, "http"), LONG)

    def answered(self, one: LoopbackSidecar) -> socket.socket:
        """A connection that was answered; where the machine stood still, a later one."""
        while True:
            caller, heard = self.dial(one), b""
            with suppress(OSError):
                caller.sendall(self.REQUEST)
                while more := caller.recv(4096):
                    heard += more
                    if heard.endswith(b"ok\n"):
                        return caller
            caller.close()

    def ended(self, caller: socket.socket) -> bool:
        try:
            return caller.recv(1) == b""
        except ConnectionResetError:
            return True

    @pytest.mark.parametrize("start", [b"", REQUEST[:-2], b"GET"])
    def test_unfinished_requests(
        self, stage: Stage, monkeypatch: pytest.MonkeyPatch, start: bytes
    ) -> None:
        monkeypatch.setattr(http_module, "ANSWER_SECONDS", 0.3)
        (one,) = stage.sidecars(1, http=HTTP)
        with self.dial(one) as first, self.answered(one) as later:
            first.sendall(start)
            with suppress(OSError):  # it may have ended by now
                later.sendall(start)
            assert self.ended(first)
            assert self.ended(later)
        monkeypatch.undo()
        assert get(one, "/healthz").text == "ok\n"

    def test_an_answer_that_nobody_reads(
        self, stage: Stage, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(http_module, "ANSWER_SECONDS", 0.3)
        monkeypatch.setattr(http_module, "page", lambda: "x" * (64 << 20))
        (one,) = stage.sidecars(1, http=HTTP)
        with self.dial(one) as caller:
            caller.sendall(b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
            http = one.agent._http
            assert http is not None
            connections = http._server.server_state.connections
            wait_for(lambda: connections, "it is connected")
            wait_for(lambda: not connections, "it is closed")

    def test_too_many(self, stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(http_module, "MAX_CONNECTIONS", 3)
        (one,) = stage.sidecars(1, http=HTTP)
        with ExitStack() as stack:
            callers = [stack.enter_context(self.dial(one)) for _ in range(3)]
            more = stack.enter_context(self.dial(one))
            assert self.ended(more)
            callers[0].sendall(self.REQUEST)
            assert callers[0].recv(4096).startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize("path", ["/", "/status"])
def test_headers(engines: Engines, path: str) -> None:
    headers = get(sidecar(engines("decode", http=HTTP)), path).headers
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["cache-control"] == "no-store"
    if path == "/":
        assert "default-src 'none'" in headers["content-security-policy"]
        assert "unsafe" not in headers["content-security-policy"]


def test_status_is_plain_json(engines: Engines) -> None:
    text = get(sidecar(engines("decode", http=HTTP)), "/status").text
    assert json.loads(text, parse_constant=lambda name: pytest.fail(name))
