"""Peers that are refused again and again: what is said of them, and when nobody listens."""

from __future__ import annotations

import logging

import pytest

from kvagent.wire.peer import HEAD, MAGIC, PeerServer
from kvagent.wire.refusals import MAX_NAMES, Complaints, Patience
from tests.test_wire_peer import echo, run, sockets


def test_one_line_of_each_peer_in_a_while() -> None:
    complaints = Complaints(period=60.0, most=20)
    said = [complaints.worth_a_line("a", now / 10) for now in range(1000)]
    assert said[0] == 0
    assert said[600] == 599, "the next line says how many were left out"
    assert [each for each in said if each is not None] == [0, 599]
    assert complaints.worth_a_line("b", 61.0) == 0, "another peer has its own"


def test_many_peers_share_a_limit() -> None:
    """One who comes by a new name each time."""
    complaints = Complaints(period=60.0, most=20)
    said = [complaints.worth_a_line(str(peer), 1.0) for peer in range(10 * MAX_NAMES)]
    assert said.count(0) == 20
    assert len(complaints._lines) == MAX_NAMES
    assert complaints.worth_a_line("later", 62.0) == 0


def test_patience_is_lost_and_comes_back() -> None:
    patience = Patience(rate=20.0, burst=100.0)
    refused = 0
    for now in range(100_000):  # ten seconds of one refusal after the other
        if not patience.lost(b"x", now / 10_000):
            patience.refused(b"x", now / 10_000)
            refused += 1
    assert 290 <= refused <= 310
    assert not patience.lost(b"y", 10.0), "others have theirs"
    while not patience.lost(b"x", 10.0):
        patience.refused(b"x", 10.0)
    assert not patience.lost(b"x", 10.1)


def test_a_peer_that_is_refused_now_and_then_is_always_heard() -> None:
    patience = Patience(rate=20.0, burst=100.0)
    for now in range(10_000):
        assert not patience.lost(b"x", now / 19.0)
        patience.refused(b"x", now / 19.0)


def test_names_that_are_made_up_take_no_room() -> None:
    patience = Patience()
    for name in range(10 * MAX_NAMES):
        patience.refused(str(name).encode(), 1.0)
    assert len(patience._spent) == MAX_NAMES


def test_a_server_says_little(caplog: pytest.LogCaptureFixture) -> None:
    async def work() -> None:
        async with sockets() as control:
            server = PeerServer(control, echo)
            with caplog.at_level(logging.INFO, "kvagent.peer"):
                for number in range(1000):
                    server._refuse(b"%d" % (number % 3), "10.0.0.9", "not a kvagent message")
            assert len(caplog.records) == 1
            assert "10.0.0.9" in caplog.text
            await server.close()

    run(work())


def test_versions_that_differ_are_answered_a_few_times() -> None:
    """The answer that costs nothing to ask for counts as a refusal too."""

    async def work() -> None:
        async with sockets() as control:
            server = PeerServer(control, echo)
            for call in range(200):
                server._accept(b"peer", [HEAD.pack(MAGIC, 99, call), b""])
            assert server._patience.lost(b"peer", 0.0)
            await server.close()

    run(work())
