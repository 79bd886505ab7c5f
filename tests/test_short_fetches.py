"""What the producer's leader hears of a fetch: of a short one only its end, with others' ends in
the same message; one that lasts is claimed and renewed."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import pytest

from kvagent.agent import deals as deals_module
from kvagent.agent.deals import Deals
from kvagent.agent.peers import Session
from kvagent.core.lease import Verdict as LeaseVerdict
from kvagent.errors import PeerGoneError
from kvagent.wire.messages import (
    Claim,
    Complete,
    Completed,
    Completion,
    Hello,
    Ok,
    Peer,
    Release,
    Renew,
)
from tests.harness import Engine
from tests.loopback import LONG
from tests.test_agent_loopback import (
    LOCAL,
    at_rest,
    changed,
    end,
    failed,
    good,
    offer,
    quiet,
    same,
    sidecar,
    wait_for,
)
from tests.test_agent_loopback import engines as engines
from tests.test_agent_loopback import stage as stage

Engines = Callable[..., Engine]
PLACES = {f"r{i}": [3 * i + 1, 3 * i + 2, 3 * i + 3] for i in range(6)}


def kinds(heard: list[Peer]) -> list[type]:
    return [type(message) for message in heard]


def claimed(producer: Engine) -> int:
    counts: dict[str, int] = sidecar(producer).agent.leader.leases.counts()
    return counts["claimed"]


@contextmanager
def offer_on_its_way(producer: Engine, name: str) -> Iterator[tuple[dict[str, Any], Any]]:
    """The ticket, and a function that lets the offer arrive."""
    kept: list[Any] = []
    send = producer.client._send
    producer.client._send = kept.append  # type: ignore[method-assign, assignment]
    ticket = offer(producer, name)
    producer.client._send = send  # type: ignore[method-assign]
    yield ticket, lambda: send(kept.pop())
    assert not kept, "it never arrived"


def ends_of(consumer: Engine, names: set[str]) -> dict[str, str]:
    """How these fetches ended, "" for good ones."""
    ends: dict[str, str] = {}
    while ends.keys() != names:
        out = consumer.until(lambda o: bool(o.finished_recving), LONG)
        for name in out.finished_recving or ():
            assert name not in ends
            ends[name] = out.failed_recving.get(name, "")
            if ends[name]:
                assert set(PLACES[name]) <= out.invalid_block_ids
    return ends


# ---------------------------------------------------------------- one


@pytest.mark.parametrize(("producer_tp", "consumer_tp"), [(1, 1), (2, 1), (1, 2)])
def test_a_short_fetch_says_only_that_it_is_over(
    engines: Engines, producer_tp: int, consumer_tp: int
) -> None:
    producer, consumer = engines("prefill", producer_tp), engines("decode", consumer_tp)
    good(producer, consumer, "first")
    with sidecar(producer).hearing() as heard:
        good(producer, consumer, "short")
    about = [kind for kind in kinds(heard) if kind in (Hello, Claim, Renew, Complete, Release)]
    assert about == [Complete]
    (complete,) = (message for message in heard if isinstance(message, Complete))
    assert complete.engine_id == "decode"
    assert len(complete.leases) == 1
    assert sidecar(producer).agent.leader.leases.ended == {"completed": 2}
    at_rest(producer, consumer)


def test_the_first_one_is_not_claimed_either(engines: Engines) -> None:
    producer, consumer = engines("prefill"), engines("decode", 2)
    with sidecar(producer).hearing() as heard:
        good(producer, consumer, "first")
    assert Claim not in kinds(heard)
    assert kinds(heard).count(Complete) == 1


def test_one_that_lasts_is_claimed_and_renewed(engines: Engines) -> None:
    producer, consumer = engines("prefill", lease_seconds=1), engines("decode", 2)
    good(producer, consumer, "first")
    with sidecar(producer).hearing() as heard:
        sidecar(producer).hang()
        began = time.monotonic()
        consumer.client.fetch("r", offer(producer, "r"), LOCAL)
        wait_for(lambda: claimed(producer), "not claimed")
        assert time.monotonic() - began >= 0.1, "a tenth of its lease"
        quiet(producer, 2.5)
        assert claimed(producer) == 1
        sidecar(producer).resume()
        assert consumer.received("r", LONG) is None
    assert same(producer, consumer)
    found = kinds(heard)
    assert (found[0], found[-1]) == (Claim, Complete)
    assert found.count(Claim) == found.count(Complete) == 1
    assert found.count(Renew) >= 3
    assert set(found) == {Claim, Renew, Complete}
    claim, complete = heard[0], heard[-1]
    assert isinstance(claim, Claim)
    assert isinstance(complete, Complete)
    assert claim.reading
    assert complete.leases[0].fetch_id == claim.fetch_id
    producer.sent("r", LONG)
    at_rest(producer, consumer)


def test_with_a_long_lease_it_is_claimed_after_a_second(engines: Engines) -> None:
    producer, consumer = engines("prefill", lease_seconds=600), engines("decode")
    good(producer, consumer, "first")
    sidecar(producer).hang()
    began = time.monotonic()
    consumer.client.fetch("r", offer(producer, "r"), LOCAL)
    wait_for(lambda: claimed(producer), "not claimed")
    assert time.monotonic() - began >= 1.0
    sidecar(producer).resume()
    assert consumer.received("r", LONG) is None


def test_a_claim_that_is_refused_ends_a_read(engines: Engines) -> None:
    """Another has it: this one need not read on."""
    producer = engines("prefill", lease_seconds=2)
    first, second = engines("decode-0"), engines("decode-1")
    for consumer in (first, second):
        good(producer, consumer, f"first of {consumer.engine_id}")
    ticket = offer(producer, "r")
    sidecar(producer).hang()
    first.client.fetch("r", ticket, LOCAL)
    wait_for(lambda: claimed(producer), "not claimed")
    with sidecar(producer).hearing() as heard:
        second.client.fetch("r", ticket, LOCAL)
        fetches = sidecar(second).agent.leader.fetches
        wait_for(lambda: fetches.counts()["draining"], "it reads on")
        assert Claim in kinds(heard)
        quiet(second)
        sidecar(producer).resume()
        assert end(second, "r").startswith("used:")
        assert first.received("r", LONG) is None
    assert Release not in kinds(heard), "the lease is the other's"
    producer.sent("r", LONG)
    at_rest(producer, first, second)


@pytest.mark.parametrize("claimed_first", [False, True], ids=["short", "lasting"])
def test_a_lease_that_runs_out_before_it_was_claimed(engines: Engines, claimed_first: bool) -> None:
    """Or before a claim of it arrives. The blocks are used again meanwhile."""
    producer, consumer = engines("prefill", lease_seconds=1), engines("decode", 2)
    good(producer, consumer, "first")
    with sidecar(producer).holding(Claim if claimed_first else Complete) as reached:
        if claimed_first:
            sidecar(producer).hang()
        consumer.client.fetch("r", offer(producer, "r"), LOCAL)
        assert reached()
        producer.sent("r", LONG)
        for tensor in producer.caches[0].values():
            tensor.fill_(-1.0)
        sidecar(producer).resume()
        quiet(consumer)
    assert end(consumer, "r").startswith("expired:")
    at_rest(producer, consumer)


def test_a_deferred_ticket_is_claimed_before_it_is_read(engines: Engines) -> None:
    producer, consumer = engines("prefill"), engines("decode", 2)
    good(producer, consumer, "first")
    client = producer.client
    client._ready = msgspec.structs.replace(client._require_ready(), deferred=True)
    reads = sidecar(producer).fabric.reads
    with offer_on_its_way(producer, "r") as (ticket, arrives), sidecar(producer).hearing() as heard:
        assert ticket["kvagent"]["deferred"]
        consumer.client.fetch("r", ticket, LOCAL)
        leases = sidecar(producer).agent.leader.leases
        wait_for(lambda: leases.counts()["parked"] == 1, "the claim is parked")
        quiet(consumer)
        assert sidecar(producer).fabric.reads == reads
        arrives()
        assert consumer.received("r", LONG) is None
        assert kinds(heard) == [Claim, Complete]
    assert same(producer, consumer)
    at_rest(producer, consumer)


def test_a_deferred_ticket_that_looks_like_another(engines: Engines) -> None:
    """It is read at once, and that must not be called good."""
    producer, consumer = engines("prefill"), engines("decode")
    client = producer.client
    client._ready = msgspec.structs.replace(client._require_ready(), deferred=True)
    ticket = offer(producer, "r")
    with sidecar(producer).hearing() as heard:
        bad = changed(ticket, deferred=False)
        assert failed(consumer, "r", bad).startswith("mismatch:")
        assert kinds(heard)[-2:] == [Complete, Claim]
    consumer.client.fetch("again", ticket, LOCAL)
    assert consumer.received("again", LONG) is None
    assert same(producer, consumer)


# ---------------------------------------------------------------- before its offer


def test_a_complete_that_overtakes_its_offer_ends_good(engines: Engines) -> None:
    producer, consumer = engines("prefill"), engines("decode", 2)
    good(producer, consumer, "first")
    with offer_on_its_way(producer, "r") as (ticket, arrives), sidecar(producer).hearing() as heard:
        consumer.client.fetch("r", ticket, LOCAL)
        leases = sidecar(producer).agent.leader.leases
        wait_for(lambda: leases.counts()["parked"] == 1, "the claim is parked")
        assert kinds(heard) == [Complete, Claim]
        counts = sidecar(consumer).agent.leader.fetches.counts()
        assert counts["validating"] == 1
        quiet(consumer)
        arrives()
        assert consumer.received("r", LONG) is None
        assert kinds(heard) == [Complete, Claim, Complete]
    assert same(producer, consumer)
    producer.sent("r", LONG)
    at_rest(producer, consumer)


def test_an_offer_that_never_comes(engines: Engines) -> None:
    producer, consumer = engines("prefill"), engines("decode")
    sidecar(producer).agent.leader.leases.park_seconds = 0.2
    good(producer, consumer, "first")
    with sidecar(producer).hearing() as heard:
        bad = changed(offer(producer, "r"), transfer_id="1" * 32)
        assert failed(consumer, "r", bad).startswith("unknown: the producer does not know")
        assert kinds(heard) == [Complete, Claim]
    producer.client.cancel("r")
    producer.sent("r", LONG)
    at_rest(producer, consumer)


@pytest.mark.parametrize("how", ["cancel", "deadline"])
def test_who_waits_for_an_offer_may_give_up(engines: Engines, how: str) -> None:
    """And the producer is told: its blocks come free as soon as they are offered."""
    producer, consumer = engines("prefill"), engines("decode", 2)
    good(producer, consumer, "first")
    if how == "deadline":
        sidecar(consumer).give_up_after(0.5)
    leases = sidecar(producer).agent.leader.leases
    leases.park_seconds = LONG
    with offer_on_its_way(producer, "r") as (ticket, arrives):
        consumer.client.fetch("r", ticket, LOCAL)
        wait_for(lambda: leases.counts()["parked"] == 1, "the claim is parked")
        if how == "cancel":
            consumer.client.cancel("r")
        cause = end(consumer, "r")
        assert cause.startswith({"cancel": "cancelled:", "deadline": "timed_out:"}[how])
        wait_for(lambda: leases.counts()["parked"] == 0, "still parked")
        arrives()
        producer.sent("r", LONG)
    assert leases.ended["released"] == 1
    sidecar(consumer).give_up_after(LONG)
    good(producer, consumer, "next")
    at_rest(producer, consumer)


# ---------------------------------------------------------------- several in one message


def all_end_at_once(producer: Engine, consumer: Engine, tickets: dict[str, dict[str, Any]]) -> None:
    """Reads of all of them are in flight, and land together."""
    fabric = sidecar(producer).fabric
    fabric.hang()
    goal = fabric.reads + len(tickets)
    for name, ticket in tickets.items():
        consumer.client.fetch(name, ticket, PLACES[name])
    wait_for(lambda: fabric.reads == goal, "not reading")
    fetches = sidecar(consumer).agent.leader.fetches
    assert not any(fetch.claimed for fetch in fetches), "that took too long"
    sidecar(producer).resume()


def test_what_ends_together_is_asked_for_in_one_message(engines: Engines) -> None:
    producer, consumer = engines("prefill"), engines("decode")
    sidecar(producer).agent.leader.leases.park_seconds = 0.2
    good(producer, consumer, "first")
    tickets = {name: offer(producer, name) for name in PLACES}
    tickets["r1"] = changed(tickets["r1"], remote_block_ids=[9, 8, 7])
    tickets["r2"] = changed(tickets["r2"], token="0" * 32)
    tickets["r3"] = changed(tickets["r3"], transfer_id="3" * 32)
    used = tickets["r4"]
    consumer.client.fetch("r4 is used", used, LOCAL)
    assert consumer.received("r4 is used", LONG) is None
    with sidecar(producer).hearing() as heard:
        all_end_at_once(producer, consumer, tickets)
        ends = ends_of(consumer, set(PLACES))
    completes = [message for message in heard if isinstance(message, Complete)]
    (complete,) = completes
    assert len(complete.leases) == len(PLACES)
    assert kinds(heard).count(Claim) == 1, "of the one that is not known"
    causes = {name: cause.split(":")[0] for name, cause in ends.items()}
    assert causes == {
        "r0": "",
        "r1": "mismatch",
        "r2": "forbidden",
        "r3": "unknown",
        "r4": "used",
        "r5": "",
    }
    assert all(same(producer, consumer, local=PLACES[name]) for name in ("r0", "r5"))
    for name in ("r1", "r2", "r3"):
        producer.client.cancel(name)
    for name in PLACES:
        producer.sent(name, LONG)
    at_rest(producer, consumer)


def test_one_of_a_message_is_cancelled_meanwhile(engines: Engines) -> None:
    producer, consumer = engines("prefill"), engines("decode")
    good(producer, consumer, "first")
    tickets = {name: offer(producer, name) for name in ("r0", "r1", "r2")}
    with sidecar(producer).holding(Complete) as reached:
        all_end_at_once(producer, consumer, tickets)
        assert reached()
        consumer.client.cancel("r1")
        assert end(consumer, "r1", PLACES["r1"]).startswith("cancelled:")
    assert ends_of(consumer, {"r0", "r2"}) == {"r0": "", "r2": ""}
    for name in tickets:
        producer.sent(name, LONG)
    quiet(consumer)
    good(producer, consumer, "next")
    at_rest(producer, consumer)


def test_an_answer_that_never_comes_fails_all_that_asked(engines: Engines) -> None:
    producer, consumer = engines("prefill"), engines("decode", call_timeout=0.5)
    good(producer, consumer, "first")
    tickets = {name: offer(producer, name) for name in ("r0", "r1", "r2")}
    with sidecar(producer).holding(Complete):
        all_end_at_once(producer, consumer, tickets)
        ends = ends_of(consumer, set(tickets))
    assert {cause.split(":")[0] for cause in ends.values()} == {"peer_gone"}
    for name in tickets:
        producer.sent(name, LONG)
    good(producer, consumer, "next")
    at_rest(producer, consumer)


@pytest.mark.parametrize(
    "answer", [Ok(), Completed(epoch="e", verdicts=()), Completed(epoch="e", verdicts=("held",))]
)
def test_an_answer_that_does_not_fit_is_no_yes(
    engines: Engines, answer: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    producer, consumer = engines("prefill"), engines("decode")
    good(producer, consumer, "first")
    monkeypatch.setattr(sidecar(producer).agent.leader.lender, "complete", lambda message: answer)
    tickets = {name: offer(producer, name) for name in ("r0", "r1")}
    all_end_at_once(producer, consumer, tickets)
    ends = ends_of(consumer, set(tickets))
    assert {cause.split(":")[0] for cause in ends.values()} == {"protocol"}


def test_a_producer_that_restarted_says_nothing_of_these_bytes(
    engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    producer, consumer = engines("prefill"), engines("decode")
    good(producer, consumer, "first")

    def complete(message: Complete) -> Completed:
        return Completed(epoch="another.1", verdicts=("held",) * len(message.leases))

    monkeypatch.setattr(sidecar(producer).agent.leader.lender, "complete", complete)
    tickets = {name: offer(producer, name) for name in ("r0", "r1")}
    all_end_at_once(producer, consumer, tickets)
    ends = ends_of(consumer, set(tickets))
    assert {cause.split(":")[0] for cause in ends.values()} == {"peer_restarted"}


# ---------------------------------------------------------------- the messages, by themselves


TURN = 0.01
"""Seconds, in which a turn of an idle event loop is surely over."""


class Client:
    """Answers as it is told to, after a moment."""

    def __init__(self, answer: Callable[[Complete], Peer]) -> None:
        self.asked: list[Complete] = []
        self._answer = answer

    def ask(self, message: Complete, timeout: float) -> asyncio.Future[Peer]:
        self.asked.append(message)
        future: asyncio.Future[Peer] = asyncio.get_running_loop().create_future()

        def reply() -> None:
            if future.done():
                return
            try:
                future.set_result(self._answer(message))
            except PeerGoneError as error:
                future.set_exception(error)

        asyncio.get_running_loop().call_later(4 * TURN, reply)
        return future


class Stub:
    """What `Deals` knows of a `Session`."""

    engine_id = "prefill"

    def __init__(self, answer: Callable[[Complete], Peer]) -> None:
        self.client = Client(answer)


def completion(number: int) -> Completion:
    return Completion(f"t{number}", bytes(16), f"f{number}", bytes(32))


def asks(
    sessions: list[Stub],
    turns: list[list[tuple[int, int]]],
    *,
    cancel: bool = False,
    crowded: bool = False,
) -> dict[tuple[int, int], list[str]]:
    """Each turn asks for some (session, number)s; returns what each was told."""
    told: dict[tuple[int, int], list[str]] = {}

    async def work() -> None:
        deals = Deals(None, None, LONG)  # type: ignore[arg-type]
        for turn in turns:
            for which, number in turn:
                session: Session = sessions[which]  # type: ignore[assignment]
                done = told.setdefault((which, number), []).append
                each = completion(number)
                deals.complete(session, "decode", each, "e", done, crowded=crowded)
            await asyncio.sleep(TURN)
        if cancel:
            deals.close()
        await asyncio.sleep(8 * TURN)

    asyncio.run(work())
    return told


def held(message: Complete) -> Peer:
    return Completed(epoch="e", verdicts=(LeaseVerdict.HELD.value,) * len(message.leases))


def test_one_message_for_each_turn_and_peer() -> None:
    sessions = [Stub(held), Stub(held)]
    told = asks(sessions, [[(0, 1), (1, 2), (0, 3)], [(0, 4)]])
    assert told == {key: [""] for key in [(0, 1), (1, 2), (0, 3), (0, 4)]}
    first, second = ([m.leases for m in session.client.asked] for session in sessions)
    assert first == [(completion(1), completion(3)), (completion(4),)]
    assert second == [(completion(2),)]
    assert {m.engine_id for session in sessions for m in session.client.asked} == {"decode"}


def test_a_crowd_waits_for_company(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deals_module, "COMPANY_SECONDS", 4 * TURN)
    session = Stub(held)
    told = asks([session], [[(0, 1)], [(0, 2)], [(0, 3)]], crowded=True)
    assert told == {(0, number): [""] for number in (1, 2, 3)}
    assert [len(message.leases) for message in session.client.asked] == [3]


def test_a_message_has_room_for_so_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deals_module, "MAX_COMPLETIONS", 4)

    def every_other(message: Complete) -> Peer:
        verdicts = ("held" if int(each.fetch_id[1:]) % 2 else "used" for each in message.leases)
        return Completed(epoch="e", verdicts=tuple(verdicts))

    session = Stub(every_other)
    told = asks([session], [[(0, number) for number in range(10)]])
    assert [len(message.leases) for message in session.client.asked] == [4, 4, 2]
    for (_, number), causes in told.items():
        (cause,) = causes
        assert cause.split(":")[0] == ("" if number % 2 else "used")


def test_nobody_answers() -> None:
    def gone(message: Complete) -> Peer:
        raise PeerGoneError("it is gone")

    told = asks([Stub(gone)], [[(0, 1), (0, 2)]])
    assert [cause.split(":")[0] for (cause,) in told.values()] == ["peer_gone", "peer_gone"]


def test_nothing_is_told_after_the_end() -> None:
    told = asks([Stub(held)], [[(0, 1)]], cancel=True)
    assert told == {(0, 1): []}


def test_what_goes_wrong_with_one_is_not_the_others(caplog: pytest.LogCaptureFixture) -> None:
    told: list[str] = []

    def fails(cause: str) -> None:
        raise RuntimeError("that one")

    async def work() -> None:
        deals = Deals(None, None, LONG)  # type: ignore[arg-type]
        session: Session = Stub(held)  # type: ignore[assignment]
        for each, done in ((completion(1), fails), (completion(2), told.append)):
            deals.complete(session, "decode", each, "e", done, crowded=False)
        await asyncio.sleep(8 * TURN)

    asyncio.run(work())
    assert told == [""]
    assert "that one" in caplog.text


@pytest.mark.parametrize("verdict", [v for v in LeaseVerdict if v.name not in ("HELD", "COMING")])
def test_every_other_verdict_is_a_cause(verdict: LeaseVerdict) -> None:
    def answer(message: Complete) -> Peer:
        return Completed(epoch="e", verdicts=(verdict.value,))

    told = asks([Stub(answer)], [[(0, 1)]])
    assert [cause.split(":")[0] for (cause,) in told.values()] == [verdict.value]
