"""Whole sidecars over the loopback fabric: good transfers, and every way for one to fail.

The tables and the fabric have tests of their own; here is what happens between them.
"""

from __future__ import annotations

import copy
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from kvagent import EngineClient, ModelInfo, WorkerClient, WorkerInfo
from kvagent.agent import peers as peers_module
from kvagent.agent import rank as rank_module
from kvagent.errors import AgentError, DrainingError
from kvagent.wire.messages import Claim, Complete, Hello, Meet, Renew
from tests.harness import NHD, Engine, random_fill
from tests.loopback import LONG, LoopbackSidecar, Stage

REMOTE, LOCAL = [7, 8, 9], [1, 2, 3]
TOKENS = 12
QUIET = 0.2
"""Seconds in which something must not happen."""


@pytest.fixture
def stage() -> Iterator[Stage]:
    made = Stage()
    yield made
    made.close()


@pytest.fixture
def engines(stage: Stage) -> Iterator[Callable[..., Engine]]:
    """Makes an engine of `tp` ranks; keyword arguments are the sidecars' settings."""
    made: list[Engine] = []

    def make(engine_id: str, tp: int = 1, of: dict[str, Any] | None = None, **kw: Any) -> Engine:
        sidecars = stage.sidecars(tp, **kw)
        made.append(Engine(sidecars, engine_id, fill=random_fill(len(made)), **(of or {})))  # type: ignore[arg-type]
        made[-1].sidecars = sidecars  # type: ignore[attr-defined]
        return made[-1]

    yield make
    for engine in made:
        engine.close()


def sidecar(engine: Engine, rank: int = 0) -> LoopbackSidecar:
    return engine.sidecars[rank]  # type: ignore[attr-defined, no-any-return]


def offer(producer: Engine, name: str) -> dict[str, Any]:
    return producer.client.offer(name, REMOTE, TOKENS)


def same(producer: Engine, consumer: Engine, start: int = 0, local: list[int] = LOCAL) -> bool:
    return all(
        producer.tokens(layer, REMOTE, head)[:, start:TOKENS].equal(
            consumer.tokens(layer, local, head)[:, start:TOKENS]
        )
        for layer in producer.caches[0]
        for head in range(producer.heads)
    )


def good(producer: Engine, consumer: Engine, name: str, start: int = 0) -> None:
    for cache in producer.caches:
        for tensor in cache.values():
            tensor += 1.0  # every transfer has other bytes
    ticket = offer(producer, name)
    consumer.client.fetch(name, ticket, LOCAL, start)
    assert consumer.received(name, LONG) is None
    assert same(producer, consumer, start)
    producer.sent(name, LONG)


def failed(consumer: Engine, name: str, ticket: dict[str, Any], local: list[int] = LOCAL) -> str:
    """The cause of the failure; the blocks must be among the invalid ones."""
    consumer.client.fetch(name, ticket, local)
    return end(consumer, name, local)


def end(consumer: Engine, name: str, local: list[int] = LOCAL) -> str:
    out = consumer.until(lambda o: name in (o.finished_recving or ()), LONG)
    assert set(local) <= out.invalid_block_ids
    assert out.kv_connector_stats is None or name not in out.kv_connector_stats["fetches"]
    return out.failed_recving[name]


def quiet(engine: Engine, seconds: float = QUIET) -> None:
    """Nothing is reported for a while."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        assert engine.client.step().is_empty()
        time.sleep(0.01)


def wait_for(true: Callable[[], object], what: str) -> None:
    until = time.monotonic() + LONG
    while not true():
        assert time.monotonic() < until, what
        time.sleep(0.005)


def hung(
    producer: Engine,
    consumer: Engine,
    name: str,
    ranks: list[int] | None = None,
    local: list[int] = LOCAL,
) -> None:
    """Starts a fetch whose reads from some of the producer's ranks (all) are in flight, and stay
    so; those from other ranks are done."""
    ranks = list(range(len(producer.caches))) if ranks is None else ranks
    for rank in ranks:
        sidecar(producer, rank).hang()
    fabrics = [one.fabric for one in producer.sidecars]  # type: ignore[attr-defined]
    goal = sum(fabric.reads for fabric in fabrics) + max(len(fabrics), len(consumer.caches))
    consumer.client.fetch(name, offer(producer, name), local)
    wait_for(lambda: sum(fabric.reads for fabric in fabrics) == goal, "not reading")
    wait_for(lambda: sidecar(producer).agent.leader.leases.counts()["claimed"], "not claimed")


@contextmanager
def reaching(producer: Engine, at: type) -> Iterator[Callable[[], bool]]:
    """As `LoopbackSidecar.holding`. A fetch that is to be claimed has to last: its reads stay in
    flight until the claim is there."""
    with sidecar(producer).holding(at) as reached:
        if at is Claim:
            sidecar(producer).hang()

        def reads_last_until_it_is() -> bool:
            there = bool(reached())
            sidecar(producer).resume()
            return there

        yield reads_last_until_it_is


def at_rest(*engines: Engine) -> None:
    """Nothing is held, read, waited for or kept on either side."""

    def busy() -> list[str]:
        found = []
        for engine in engines:
            leader = sidecar(engine).agent.leader
            counts = leader.leases.counts()
            found += [f"{k}={v}" for k, v in counts.items() if v and k != "tombstones"]
            found += [f"fetch {k}={v}" for k, v in leader.fetches.counts().items() if v]
            found += [] if not len(leader.outbox) else ["outbox"]
            found += [f"running {r}" for r in leader.borrower._running.values()]
            found += [f"tasks {t}" for t in leader.borrower._tasks]
            found += [f"parked {p}" for p in leader.lender._parked]
            found += [
                f"ledger {k}={v}" for k, v in leader.ledger.counts().items() if v and k != "free"
            ]
            found += ["aggregator"] if leader.borrower._aggregator.num_counting else []  # type: ignore[union-attr]
            for one in engine.sidecars:  # type: ignore[attr-defined]
                found += ["reading"] if one.agent.rank.reading() else []
                found += [f"call {t}" for t in one.agent.peers._tasks]
                found += ["user" for s in one.agent.rank.peers.sessions() if s.users]
        return found

    stage = sidecar(engines[0]).stage
    until = time.monotonic() + LONG
    while problems := stage.call(busy):
        for engine in engines:
            engine.seen.append(engine.client.step())
        assert time.monotonic() < until, problems
        time.sleep(0.02)


Engines = Callable[..., Engine]


# ---------------------------------------------------------------- good


@pytest.mark.parametrize(("producer_tp", "consumer_tp"), [(1, 1), (2, 1), (1, 2), (2, 2), (4, 2)])
def test_good(engines: Engines, producer_tp: int, consumer_tp: int) -> None:
    producer, consumer = engines("prefill", producer_tp), engines("decode", consumer_tp)
    good(producer, consumer, "whole")
    good(producer, consumer, "partial", start=5)
    good(consumer, producer, "back")
    stats = consumer.seen[0].kv_connector_stats["fetches"]["whole"]
    assert stats["bytes"] == TOKENS * 4 * 8 * 4 * 2 * 2  # heads, head_size, float32, kv, layers
    at_rest(producer, consumer)


def test_many_at_once(engines: Engines) -> None:
    of = {"num_blocks": 128}
    producer, consumer = engines("prefill", 2), engines("decode", 2, of={**of, "axes": NHD})
    places = {f"r{i}": [3 * i + 1, 3 * i, 3 * i + 2] for i in range(30)}
    for name, blocks in places.items():
        consumer.client.fetch(name, offer(producer, name), blocks)
    ends: set[str] = set()
    while len(ends) < len(places):
        out = consumer.until(lambda o: bool(o.finished_recving), LONG)
        assert not out.failed_recving
        assert not ends & (out.finished_recving or set())
        ends |= out.finished_recving or set()
    assert all(same(producer, consumer, local=blocks) for blocks in places.values())
    at_rest(producer, consumer)


def test_more_than_can_be_read_at_once_take_turns(
    engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that wait can be cancelled, keep their leases, and hold up no other peer's."""
    monkeypatch.setattr(peers_module, "READS_AT_ONCE", 2)
    of = {"num_blocks": 128}
    producer, other = engines("prefill", lease_seconds=1), engines("other")
    consumer = engines("decode", 2, of={**of, "axes": NHD})
    places = {f"r{i}": [3 * i + 10, 3 * i + 11, 3 * i + 12] for i in range(6)}
    good(producer, consumer, "first")
    sidecar(producer).hang()
    for name, blocks in places.items():
        consumer.client.fetch(name, offer(producer, name), blocks)
    wait_for(lambda: len(sidecar(consumer).fabric._active) == 2, "two are read")
    good(other, consumer, "others")
    consumer.client.cancel("r4")
    assert end(consumer, "r4", places.pop("r4")).startswith("cancelled:")
    time.sleep(1.5)  # a lease and a half: they are renewed
    sidecar(producer).resume()
    order: list[str] = []
    while len(order) < len(places):
        out = consumer.until(lambda o: bool(o.finished_recving), LONG)
        assert not out.failed_recving
        order += sorted(out.finished_recving or ())
    assert sorted(order) == sorted(places)
    assert all(same(producer, consumer, local=blocks) for blocks in places.values())
    at_rest(producer, other, consumer)


def test_many_in_turn_leave_nothing(engines: Engines) -> None:
    producer, consumer = engines("prefill"), engines("decode", 2)
    for i in range(300):
        name = f"r{i}"
        consumer.client.fetch(name, offer(producer, name), LOCAL)
        assert consumer.received(name, LONG) is None
        producer.sent(name, LONG)
        producer.seen.clear()
        consumer.seen.clear()
    at_rest(producer, consumer)
    ranks = [one.agent.rank for one in consumer.sidecars]  # type: ignore[attr-defined]
    for rank in ranks:
        assert len(rank._parts) == 300
        sidecar(consumer).stage.call(lambda rank=rank: rank.sweep(time.monotonic() + 61))  # type: ignore[misc]
        assert not rank._parts
        assert rank.peers.handshakes == 1
        assert len(rank.fabric._handles) == 2
        assert not rank.fabric._active
    leases = sidecar(producer).agent.leader.leases
    assert leases.counts()["tombstones"] == 300
    leases.sweep(time.monotonic() + 3600)
    assert leases.counts()["tombstones"] == 0
    assert not leases._by_request
    assert not producer.client._offered
    assert not consumer.client._fetching


def test_no_news(engines: Engines) -> None:
    """A step without news sends nothing and takes next to no time."""
    client = engines("idle").client
    sent: list[object] = []
    client._send = sent.append
    began = time.perf_counter()
    for _ in range(1000):
        assert client.step().is_empty()
    assert time.perf_counter() - began < 1
    assert not sent


# ---------------------------------------------------------------- tickets that are no good


def test_used_twice(engines: Engines) -> None:
    producer, consumer = engines("prefill", 2), engines("decode")
    ticket = offer(producer, "first")
    consumer.client.fetch("first", ticket, LOCAL)
    assert consumer.received("first") is None
    assert failed(consumer, "second", ticket).startswith("used:")
    at_rest(producer, consumer)


def test_used_by_two_at_once(engines: Engines) -> None:
    producer = engines("prefill")
    consumers = [engines("decode-0"), engines("decode-1")]
    ticket = offer(producer, "r")
    for consumer in consumers:
        consumer.client.fetch("r", ticket, LOCAL)
    ends = [consumer.received("r", LONG) for consumer in consumers]
    assert sorted((cause or "good").split(":")[0] for cause in ends) == ["good", "used"]
    at_rest(producer, *consumers)


def changed(ticket: dict[str, Any], **changes: Any) -> dict[str, Any]:
    other = copy.deepcopy(ticket)
    for name, value in changes.items():
        (other["kvagent"] if name in other["kvagent"] else other)[name] = value
    return other


@pytest.mark.parametrize(
    ("changes", "cause"),
    [
        ({"transfer_id": "0" * 32}, "unknown:"),
        ({"token": "0" * 32}, "forbidden:"),
        ({"remote_block_ids": [7, 8, 10]}, "mismatch:"),
        ({"remote_block_ids": [8, 7, 9]}, "mismatch:"),
        ({"remote_block_ids": [[7, 8, 9], [10]]}, "mismatch:"),
        ({"remote_block_ids": [[7, 8], [9]]}, "block_range:"),
        ({"remote_engine_id": "somebody"}, "handshake: wrong_engine"),
        ({"epoch": "past.1"}, "peer_restarted:"),
    ],
)
def test_tampered(engines: Engines, changes: dict[str, Any], cause: str) -> None:
    producer, consumer = engines("prefill", 2), engines("decode")
    sidecar(producer).agent.leader.leases.park_seconds = 0.2
    ticket = offer(producer, "r")
    assert failed(consumer, "r", changed(ticket, **changes)).startswith(cause)
    good(producer, consumer, "next")


def test_block_ids_out_of_range(engines: Engines) -> None:
    """Checked before anything is read: what is there stays."""
    producer, consumer = engines("prefill", 2), engines("decode", 2)
    before = copy.deepcopy(consumer.caches)
    assert failed(consumer, "l", offer(producer, "l"), [1, 2, 32]).startswith("block_range:")
    assert failed(consumer, "s", offer(producer, "s"), [1, 2]).startswith("block_range:")
    ticket = producer.client.offer("r", [7, 8, 10**6], TOKENS)
    assert failed(consumer, "r", ticket).startswith("block_range:")
    ticket = producer.client.offer("t", REMOTE, TOKENS + 1)
    assert failed(consumer, "t", ticket, [1, 2, 3, 4]).startswith("block_range:")
    for caches, old in zip(consumer.caches, before, strict=True):
        assert all(caches[layer].equal(old[layer]) for layer in caches)
    for name in "lsrt":
        producer.sent(name)  # at once: the ticket is given up
    at_rest(producer, consumer)


def test_dialling_oneself(engines: Engines) -> None:
    producer, consumer = engines("prefill"), engines("decode")
    host, port = consumer.workers[0].endpoint.split(":")
    ticket = changed(offer(producer, "r"), remote_host=host, remote_port=int(port))
    cause = failed(consumer, "r", ticket)
    assert "you dialled yourself at" in cause
    assert consumer.workers[0].endpoint in cause
    ticket = consumer.client.offer("own", [4, 5, 6], TOKENS)
    assert "give each engine an id of its own" in failed(consumer, "own", ticket)


@pytest.mark.parametrize("host", ["no such host", "no-such-host.invalid", "127.0.0.1"])
def test_nobody_there(engines: Engines, host: str) -> None:
    producer, consumer = engines("prefill"), engines("decode", handshake_timeout=0.5)
    ticket = changed(offer(producer, "r"), remote_host=host, remote_port=1)
    cause = failed(consumer, "r", ticket)
    assert cause.split(":")[0] in ("peer_gone", "handshake")
    if cause.startswith("peer_gone:"):
        assert cause.endswith(f"connecting to engine prefill at {host}:1, which never answered")
    consumer.client.release(changed(ticket, remote_host=host))
    good(producer, consumer, "next")


def test_fingerprints_that_differ(engines: Engines) -> None:
    producer = engines("prefill", of={"model": ModelInfo(name="m", revision="old", num_layers=2)})
    consumer = engines("decode", of={"model": ModelInfo(name="m", revision="new", num_layers=2)})
    cause = failed(consumer, "r", offer(producer, "r"))
    assert cause.startswith("handshake: mismatch:")
    assert "revision: old there, new here" in cause
    other = engines("other", of={"head_size": 16, "model": ModelInfo(name="x", num_layers=2)})
    cause = failed(other, "r", offer(producer, "s"))
    assert "name: m there, x here" in cause
    assert "head_size: 8 there, 16 here" in cause


# ---------------------------------------------------------------- cancel, release, drop


def test_release(engines: Engines) -> None:
    producer, consumer = engines("prefill", 2), engines("decode")
    ticket = offer(producer, "r")
    consumer.client.release(ticket)
    producer.sent("r", LONG)
    consumer.client.release(ticket)  # again is no harm
    assert failed(consumer, "r", ticket).startswith("released:")
    at_rest(producer, consumer)


def test_cancel_of_the_unknown(engines: Engines) -> None:
    producer, consumer = engines("prefill"), engines("decode")
    for engine in (producer, consumer):
        engine.client.cancel("nobody")
    good(producer, consumer, "r")
    for engine in (producer, consumer):
        engine.client.cancel("r")
        quiet(engine)


STAGES = [Hello, Meet, Claim, Complete]


@pytest.mark.parametrize("at", STAGES, ids=lambda kind: kind.__name__)
def test_consumer_cancels(engines: Engines, at: type) -> None:
    producer, consumer = engines("prefill"), engines("decode", 2)
    with reaching(producer, at) as reached:
        consumer.client.fetch("r", offer(producer, "r"), LOCAL)
        assert reached()
        consumer.client.cancel("r")
        assert end(consumer, "r").startswith("cancelled: by the engine")
        producer.sent("r", LONG)  # it is told at once, not by the lease
    quiet(consumer)
    good(producer, consumer, "next")
    at_rest(producer, consumer)


@pytest.mark.parametrize("at", STAGES, ids=lambda kind: kind.__name__)
def test_producer_cancels(engines: Engines, at: type) -> None:
    producer, consumer = engines("prefill"), engines("decode", 2)
    with reaching(producer, at) as reached:
        consumer.client.fetch("r", offer(producer, "r"), LOCAL)
        assert reached()
        producer.client.cancel("r")
        producer.sent("r", LONG)
    assert end(consumer, "r").startswith("cancelled: the producer")
    quiet(consumer)
    good(producer, consumer, "next")
    at_rest(producer, consumer)


@pytest.mark.parametrize("side", ["producer", "consumer"])
def test_cancel_while_reading_waits_for_what_is_in_flight(engines: Engines, side: str) -> None:
    producer, consumer = engines("prefill", lease_seconds=1), engines("decode", 2)
    good(producer, consumer, "first")
    hung(producer, consumer, "r")
    {"producer": producer, "consumer": consumer}[side].client.cancel("r")
    producer.sent("r", LONG)
    # The producer's engine may go on; our blocks may still be written to.
    fetches = sidecar(consumer).agent.leader.fetches
    wait_for(lambda: fetches.counts()["draining"], "the next renewal tells a producer's cancel")
    quiet(consumer, 0.4)
    assert sidecar(consumer).agent.leader.ledger.counts()["quarantined"] == len(LOCAL)
    sidecar(producer).resume()
    assert end(consumer, "r").startswith("cancelled:")
    quiet(consumer)
    good(producer, consumer, "next")
    at_rest(producer, consumer)


@pytest.mark.parametrize("at", STAGES, ids=lambda kind: kind.__name__)
def test_drop_peer(engines: Engines, at: type) -> None:
    producer, other, consumer = engines("prefill"), engines("other"), engines("decode", 2)
    with reaching(producer, at) as reached:
        consumer.client.fetch("r", offer(producer, "r"), LOCAL)
        assert reached()
        consumer.client.drop_peer("prefill")
        consumer.client.drop_peer("nobody")
        assert end(consumer, "r") == "peer_dropped: engine prefill is gone"
        good(other, consumer, "others")
    good(producer, consumer, "next")  # it was not gone after all
    at_rest(producer, other, consumer)


def test_one_silent_peer_holds_up_nobody(engines: Engines) -> None:
    producer, other = engines("prefill"), engines("other")
    consumer = engines("decode", handshake_timeout=1.0)
    with sidecar(producer).holding(Hello) as reached:
        for i in range(3):
            blocks = [10 + 3 * i, 11 + 3 * i, 12 + 3 * i]
            consumer.client.fetch(f"r{i}", offer(producer, f"r{i}"), blocks)
        assert reached()
        good(other, consumer, "others")
        assert sidecar(consumer).agent.rank.peers.handshakes == 2  # one for each peer
        causes: dict[str, str] = {}
        while len(causes) < 3:
            causes |= consumer.until(lambda o: bool(o.failed_recving), LONG).failed_recving
    assert set(causes) == {"r0", "r1", "r2"}
    assert all(cause.startswith("peer_gone:") for cause in causes.values())
    good(producer, consumer, "next")


# ---------------------------------------------------------------- leases


def test_nobody_comes(engines: Engines) -> None:
    producer, consumer = engines("prefill", lease_seconds=1), engines("decode")
    ticket = offer(producer, "r")
    producer.sent("r", LONG)
    assert failed(consumer, "r", ticket).startswith("expired:")


def test_renewals_keep_the_producers_time(engines: Engines) -> None:
    """The lease is the producer's to define; the consumer's own setting is for its own offers."""
    producer, consumer = engines("prefill", lease_seconds=1.0), engines("decode")
    good(producer, consumer, "first")
    hung(producer, consumer, "r")
    time.sleep(2.5)
    sidecar(producer).resume()
    assert consumer.received("r", LONG) is None


def test_a_slow_read_is_renewed(engines: Engines) -> None:
    """Several leases long, and good: the sidecars' clocks renew, whatever the engines do."""
    producer = engines("prefill", lease_seconds=1)
    consumer = engines("decode", 2, lease_seconds=1)
    sidecar(producer).hang()
    ticket = offer(producer, "r")
    consumer.client.fetch("r", ticket, LOCAL)
    quiet(producer, 2.5)
    sidecar(producer).resume()
    assert consumer.received("r", LONG) is None
    assert same(producer, consumer)
    producer.sent("r", LONG)
    at_rest(producer, consumer)


@pytest.mark.parametrize("how", ["no renewal comes", "renewals are not answered"])
def test_a_lease_that_ran_out_while_reading(
    engines: Engines, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    producer = engines("prefill", lease_seconds=1)
    consumer = engines("decode", 2, lease_seconds=1)
    good(producer, consumer, "first")
    if how == "no renewal comes":
        monkeypatch.setattr(sidecar(consumer).agent.leader.borrower, "_renew_due", lambda now: None)
    with sidecar(producer).holding(Renew):
        sidecar(producer).hang()
        consumer.client.fetch("r", offer(producer, "r"), LOCAL)
        producer.sent("r", LONG)
        for tensor in producer.caches[0].values():
            tensor.fill_(-1.0)  # the blocks are used again
        sidecar(producer).resume()
        assert end(consumer, "r").startswith("expired:")
    at_rest(producer, consumer)


def test_memory_that_changed_while_reading(engines: Engines) -> None:
    """All bytes have come, but the producer's engine started afresh before it said so."""
    producer, consumer = engines("prefill"), engines("decode")
    with sidecar(producer).holding(Complete) as reached:
        consumer.client.fetch("r", offer(producer, "r"), LOCAL)
        assert reached()
        sidecar(producer).stage.call(sidecar(producer).agent.leader.lender.revoke_all)
    assert end(consumer, "r").startswith("revoked:")


def test_a_claim_that_is_given_up_before_its_offer_comes(engines: Engines) -> None:
    """Nothing waits for an answer any more, at the producer either."""
    producer, consumer = engines("prefill"), engines("decode")
    good(producer, consumer, "first")
    ticket = changed(offer(producer, "r"), transfer_id="1" * 32)
    consumer.client.fetch("r", ticket, LOCAL)
    leases = sidecar(producer).agent.leader.leases
    wait_for(lambda: leases.counts()["parked"], "the claim was not parked")
    consumer.client.cancel("r")
    assert end(consumer, "r").startswith("cancelled:")
    producer.client.cancel("r")
    producer.sent("r")
    at_rest(producer, consumer)


# ---------------------------------------------------------------- reads that fail


def test_a_read_that_fails(engines: Engines) -> None:
    producer, consumer = engines("prefill", 2), engines("decode")
    sidecar(producer, 1).fabric.faults.fail = {1}
    cause = failed(consumer, "r", offer(producer, "r"))
    where = f"rank (tp 1, pp 0) of engine prefill at {producer.workers[1].endpoint}"
    assert cause == f"transport: {where}: read 1 was ordered to fail"
    producer.sent("r", LONG)
    good(producer, consumer, "next")
    at_rest(producer, consumer)


def test_a_peer_that_dies(engines: Engines) -> None:
    producer, other, consumer = engines("prefill"), engines("other"), engines("decode", 2)
    good(producer, consumer, "first")
    hung(producer, consumer, "r")
    stage = sidecar(producer).stage
    stage.call(sidecar(producer).fabric.die)
    cause, again = end(consumer, "r"), failed(consumer, "again", offer(producer, "again"))
    for each in (cause, again):  # ranks and addresses, not the fabric's names
        where = f"rank (tp 0, pp 0) of engine prefill at {producer.workers[0].endpoint}"
        assert each.startswith(f"peer_gone: {where} is gone; reading from engine prefill at")
        assert "which answered" in each
        assert "prefill/0.0" not in each
    good(other, consumer, "others")


@pytest.mark.parametrize("slow", [0, 1])
def test_a_failure_waits_for_the_sibling(engines: Engines, slow: int) -> None:
    """One rank fails, the other still reads: reported once both can write no more."""
    producer, consumer = engines("prefill", 2), engines("decode", 2)
    good(producer, consumer, "first")
    sidecar(producer, 1 - slow).fabric.faults.fail = {2}
    hung(producer, consumer, "r")
    sidecar(producer, 1 - slow).resume()
    producer.sent("r", LONG)  # the producer is told at once
    quiet(consumer, 0.4)
    sidecar(producer, slow).resume()
    where = f"rank (tp {1 - slow}, pp 0) of engine prefill at {producer.workers[1 - slow].endpoint}"
    assert end(consumer, "r") == f"transport: {where}: read 2 was ordered to fail"
    quiet(consumer)
    good(producer, consumer, "next")
    at_rest(producer, consumer)


def test_a_hung_read_is_fenced_at_the_deadline(engines: Engines) -> None:
    producer, other = engines("prefill", lease_seconds=2), engines("other")
    consumer = engines("decode", 2, fence_seconds=0.5)
    endpoint = re.escape(producer.workers[0].endpoint)
    good(producer, consumer, "first")
    good(other, consumer, "another")
    sidecar(consumer).give_up_after(1.0)
    began = time.monotonic()
    hung(producer, consumer, "r", local=[10, 11, 12])
    good(other, consumer, "meanwhile")
    cause = end(consumer, "r", [10, 11, 12])
    assert re.fullmatch(
        rf"timed_out: not done after 1 s; reading from engine prefill at {endpoint}, which "
        r"answered [01]\.\d s ago; 0 of \d+ bytes came to rank 0; not done here: rank 0, 1",
        cause,
    ), cause
    assert time.monotonic() - began > 1.0
    for rank in range(2):
        assert sidecar(consumer, rank).agent.rank.fences == 1
    before = copy.deepcopy(consumer.caches)
    sidecar(producer).resume()
    time.sleep(QUIET)
    for caches, old in zip(consumer.caches, before, strict=True):
        assert all(caches[layer].equal(old[layer]) for layer in caches), "written after its end"
    good(other, consumer, "after")
    good(producer, consumer, "next")
    at_rest(producer, other, consumer)


def test_the_deadline_holds_at_every_stage(engines: Engines) -> None:
    producer = engines("prefill", lease_seconds=2)
    consumer = engines("decode", fetch_timeout=1.0, handshake_timeout=30, call_timeout=30)
    for at in (Hello, Meet, Claim, Complete):
        with reaching(producer, at) as reached:
            consumer.client.fetch(at.__name__, offer(producer, at.__name__), LOCAL)
            assert reached()
            assert end(consumer, at.__name__).startswith("timed_out:")
            producer.sent(at.__name__, LONG)
    at_rest(producer, consumer)


def test_a_follower_that_dies(engines: Engines) -> None:
    """Its reads died with it, which only the host can tell: the fetch ends, and not at the end of
    time."""
    producer, consumer = engines("prefill"), engines("decode", 2, call_timeout=0.5)
    good(producer, consumer, "first")
    hung(producer, consumer, "r")
    sidecar(consumer, 1).close()
    quiet(consumer)  # rank 0 still reads
    sidecar(producer).resume()
    assert end(consumer, "r").startswith("rank_")
    producer.sent("r", LONG)


def test_a_follower_that_dies_while_the_peer_is_being_met(engines: Engines) -> None:
    producer, consumer = engines("prefill"), engines("decode", 2, handshake_timeout=60.0)
    team = sidecar(consumer).agent.leader.team
    with sidecar(producer).holding(Hello) as reached:
        consumer.client.fetch("r", offer(producer, "r"), LOCAL)
        assert reached()
        sidecar(consumer, 1).close()
        wait_for(lambda: team.missing() or team.silent_text(time.monotonic()), "not missed")
    assert end(consumer, "r").startswith("not_ready:")
    producer.sent("r", LONG)


def test_a_follower_that_starts_afresh(engines: Engines) -> None:
    producer, consumer = engines("prefill"), engines("decode", 2)
    good(producer, consumer, "first")
    hung(producer, consumer, "r")
    consumer.workers[1].close()
    worker = WorkerClient(sidecar(consumer, 1).socket)
    worker.join(
        WorkerInfo(
            engine_id="decode",
            tp_rank=1,
            tp_size=2,
            leader=consumer.workers[0].endpoint,
            model=ModelInfo(name="test", num_layers=2),
        )
    )
    specs = dict.fromkeys(consumer.caches[1], consumer.spec)
    consumer.workers[1] = worker
    consumer.caches[1] = worker.allocate_kv_caches(specs, num_blocks=32)
    team = sidecar(consumer).agent.leader.team
    wait_for(lambda: sidecar(consumer, 1).agent.follower.joined, "not joined")  # type: ignore[union-attr]
    quiet(consumer)  # rank 0 still reads
    sidecar(producer).resume()
    assert end(consumer, "r").split(":")[0] in ("reset", "rank_lost", "rank_silent")
    assert team.complete
    good(producer, consumer, "next")
    at_rest(producer, consumer)


# ---------------------------------------------------------------- schedulers and restarts


def test_reports_are_delivered_again(engines: Engines) -> None:
    producer, consumer = engines("prefill"), engines("decode")
    consumer.client.fetch("r", offer(producer, "r"), LOCAL)
    outbox = sidecar(consumer).agent.leader.outbox
    wait_for(lambda: len(outbox), "no report")
    consumer.client.close()  # the scheduler dies before it has seen it
    consumer.client = EngineClient(sidecar(consumer).socket)
    consumer.client.wait_ready(LONG)
    assert consumer.received("r", LONG) is None
    wait_for(lambda: not len(outbox), "not acknowledged")
    consumer.client.close()
    consumer.client = EngineClient(sidecar(consumer).socket)
    consumer.client.wait_ready(LONG)
    quiet(consumer)
    good(producer, consumer, "next")


def test_a_new_scheduler_waits_for_its_predecessors_reads(engines: Engines) -> None:
    """It does not know that the blocks are being written into."""
    producer, consumer = engines("prefill"), engines("decode")
    good(producer, consumer, "first")
    hung(producer, consumer, "r")
    consumer.client.close()
    consumer.client = EngineClient(sidecar(consumer).socket)
    with pytest.raises(AgentError, match="the scheduler before"):
        consumer.client.wait_ready(0.5)
    sidecar(producer).resume()
    consumer.client.wait_ready(LONG)
    assert end(consumer, "r").startswith("cancelled: its scheduler is gone")
    good(producer, consumer, "next")
    at_rest(producer, consumer)


def test_a_new_scheduler_ends_its_predecessors_leases(engines: Engines) -> None:
    """It does not know that the blocks are lent, and writes into them: no fetch may be good."""
    producer, consumer = engines("prefill"), engines("decode")
    good(producer, consumer, "first")
    waiting = offer(producer, "waiting")
    hung(producer, consumer, "r")
    producer.client.close()
    producer.client = EngineClient(sidecar(producer).socket)
    producer.client.wait_ready(LONG)
    for cache in producer.caches[0].values():
        cache.fill_(99.0)
    sidecar(producer).resume()
    assert end(consumer, "r").startswith("revoked")
    assert failed(consumer, "waiting", waiting).startswith("revoked")
    good(producer, consumer, "next")
    at_rest(producer, consumer)


def test_only_one_scheduler_and_one_worker(engines: Engines) -> None:
    engine = engines("engine")
    second = EngineClient(sidecar(engine).socket)
    with pytest.raises(AgentError, match="a scheduler is attached already"):
        second.wait_ready(LONG)
    second.close()
    worker = WorkerClient(sidecar(engine).socket)
    with pytest.raises(AgentError, match="a worker is connected already"):
        worker.join(WorkerInfo(engine_id="engine", model=ModelInfo(name="test", num_layers=2)))
    worker.close()
    good(engines("prefill"), engine, "still there")


def again(engine: Engine, **kw: Any) -> Engine:
    """The engine's processes end, and others start on the same sidecars."""
    engine.close()
    fresh = Engine(engine.sidecars, engine.engine_id, fill=random_fill(99), **kw)  # type: ignore[attr-defined]
    fresh.sidecars = engine.sidecars  # type: ignore[attr-defined]
    return fresh


@pytest.mark.parametrize("tp", [1, 2])
def test_the_producer_starts_afresh(engines: Engines, tp: int) -> None:
    producer, consumer = engines("prefill", tp), engines("decode", 2)
    good(producer, consumer, "first")
    old = offer(producer, "old")
    with again(producer) as fresh:
        quiet(fresh)  # nothing of the old engine's concerns it
        assert failed(consumer, "old", old).startswith(("peer_restarted:", "peer_gone:"))
        good(fresh, consumer, "new")
        at_rest(fresh, consumer)


def test_the_producer_starts_afresh_while_it_is_read(engines: Engines) -> None:
    producer, consumer = engines("prefill", 2), engines("decode", 2)
    good(producer, consumer, "first")
    hung(producer, consumer, "r")
    with again(producer) as fresh:
        assert end(consumer, "r").split(":")[0] in ("peer_gone", "revoked", "peer_restarted")
        good(fresh, consumer, "new")
        at_rest(fresh, consumer)


@pytest.mark.parametrize("tp", [1, 2])
def test_the_consumer_starts_afresh_while_it_reads(engines: Engines, tp: int) -> None:
    producer, consumer = engines("prefill"), engines("decode", tp)
    good(producer, consumer, "first")
    hung(producer, consumer, "r")
    consumer.client.offer("o", LOCAL, TOKENS)
    with again(consumer) as fresh:
        producer.sent("r", LONG)
        sidecar(producer).resume()
        quiet(fresh)  # names of requests are only good within one engine's life
        good(producer, fresh, "r")
        at_rest(producer, fresh)


@pytest.mark.parametrize("how", ["stop", "join"])
def test_the_leader_ends_while_only_a_follower_reads(engines: Engines, how: str) -> None:
    producer, consumer = engines("prefill", 2), engines("decode", 2, fence_seconds=0.5)
    good(producer, consumer, "first")
    hung(producer, consumer, "r", [1])
    wait_for(lambda: not sidecar(consumer).agent.rank.reading(), "rank 0 is not done")
    if how == "stop":
        sidecar(consumer).close()
        assert end(consumer, "r").startswith("agent_lost:")
        sidecar(producer, 1).resume()
        return
    with again(consumer) as fresh:  # its second rank's fabric starts afresh as well
        sidecar(producer, 1).resume()
        quiet(fresh)
        good(producer, fresh, "r")
        at_rest(producer, fresh)


# ---------------------------------------------------------------- drain


def test_drain(engines: Engines) -> None:
    producer, consumer = engines("prefill"), engines("decode", 2)
    sidecar(producer).hang()
    ticket, spare = offer(producer, "r"), offer(producer, "spare")
    consumer.client.fetch("r", ticket, LOCAL)
    wait_for(lambda: sidecar(producer).agent.leader.leases.counts()["claimed"], "not claimed")
    sidecar(producer).stage.loop.call_soon_threadsafe(
        sidecar(producer).stage.loop.call_later, 0.3, sidecar(producer).fabric.resume
    )
    assert consumer.client.drain(LONG) == ()
    assert consumer.received("r", LONG) is None  # it was waited for
    with pytest.raises(DrainingError):
        consumer.client.fetch("late", spare, LOCAL)
    with pytest.raises(DrainingError):
        consumer.client.offer("late", LOCAL, TOKENS)
    assert producer.client.drain(0.2) == ("spare",)
    producer.sent("spare")
    at_rest(producer, consumer)


def test_drain_fails_what_takes_too_long(engines: Engines) -> None:
    producer, consumer = engines("prefill"), engines("decode", 2)
    good(producer, consumer, "first")
    hung(producer, consumer, "r")
    assert consumer.client.drain(0.3) == ("r",)
    quiet(consumer)
    sidecar(producer).resume()
    assert end(consumer, "r").startswith("cancelled:")


def test_drain_with_nothing_to_do(engines: Engines) -> None:
    assert engines("engine").client.drain(LONG) == ()


def test_a_handshake_that_is_dropped_fails_who_waits_for_it(engines: Engines) -> None:
    producer, consumer = engines("prefill"), engines("decode")
    with sidecar(producer).holding(Hello) as reached:
        consumer.client.fetch("r", offer(producer, "r"), LOCAL)
        assert reached()
        book = sidecar(consumer).agent.rank.peers
        sidecar(consumer).stage.run(book.drop("prefill"))
        assert end(consumer, "r").startswith("peer_gone: engine prefill was dropped; connecting")
    good(producer, consumer, "next")
    at_rest(producer, consumer)


@pytest.mark.parametrize("at", [Hello, Meet, Claim, Complete], ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("tp", [1, 2])
def test_the_engine_starts_afresh_at_every_stage(engines: Engines, at: type, tp: int) -> None:
    producer, consumer = engines("prefill"), engines("decode", tp, fence_seconds=0.5)
    if at in (Claim, Complete):
        good(producer, consumer, "first")
    with reaching(producer, at) as reached:
        consumer.client.fetch("r", offer(producer, "r"), LOCAL)
        assert reached()
        with again(consumer) as fresh:
            quiet(fresh)
    producer.sent("r", LONG)
    with again(fresh) as once_more:
        good(producer, once_more, "r")
        at_rest(producer, once_more)


def test_an_offer_that_crosses_the_end_of_an_earlier_one(engines: Engines) -> None:
    """The engine makes a second offer of a request before it takes the report of the first."""
    producer, consumer = engines("prefill"), engines("decode")
    ticket = offer(producer, "r")
    consumer.client.fetch("r", ticket, LOCAL)
    assert consumer.received("r", LONG) is None
    wait_for(lambda: len(sidecar(producer).agent.leader.outbox), "the report is on its way")
    wait_for(lambda: producer.client._reports, "it has arrived")
    ticket = offer(producer, "r")
    quiet(producer)
    consumer.client.fetch("again", ticket, LOCAL)
    assert consumer.received("again", LONG) is None
    producer.sent("r", LONG)
    at_rest(producer, consumer)


def test_a_drain_ends_with_its_scheduler(engines: Engines) -> None:
    producer, consumer = engines("prefill"), engines("decode")
    assert consumer.client.drain(LONG) == ()
    with again(consumer) as fresh:
        good(producer, fresh, "r")
        sidecar(fresh).stage.run(sidecar(fresh).agent.drain(0.1))  # as on SIGTERM
        with again(fresh) as last:
            assert failed(last, "late", offer(producer, "late")).startswith("draining:")


def test_too_many_parts_at_once_fail(engines: Engines, monkeypatch: pytest.MonkeyPatch) -> None:
    producer, consumer = engines("prefill"), engines("decode")
    good(producer, consumer, "first")
    monkeypatch.setattr(rank_module, "MAX_RUNNING_PARTS", 0)
    assert failed(consumer, "r", offer(producer, "r")) == "failed: too many parts at once"
    monkeypatch.undo()
    good(producer, consumer, "next")
    at_rest(producer, consumer)
