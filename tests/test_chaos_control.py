"""`Control.send` over real sockets: what the plan says goes wrong does, and nothing else."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest
import zmq

from kvagent.core.chaos import ChaosConfig, Fault, FaultAt
from kvagent.errors import ConfigError
from kvagent.wire.control import Control
from kvagent.wire.messages import Ok, Peer, Release
from kvagent.wire.sockets import LoopSocket

LONG = 20.0
"""Seconds; a bound against hangs."""
NEVER = 60.0
RELEASE = Release(transfer_id="t", token=b"")


def at(*faults: tuple[int, str], **more: Any) -> ChaosConfig:
    entries = tuple(FaultAt(message=number, fault=Fault(fault)) for number, fault in faults)
    return ChaosConfig(at=entries, **more)


class Pair:
    """A DEALER that goes through `control`, and the ROUTER that it is connected to."""

    def __init__(self, control: Control) -> None:
        self.control = control
        self.router = control.socket(zmq.ROUTER)
        self.port = self.router.bind_to_random_port("tcp://127.0.0.1")
        self.dealer = self.connected()

    def connected(self) -> LoopSocket:
        dealer = self.control.socket(zmq.DEALER)
        dealer.connect(f"tcp://127.0.0.1:{self.port}")
        return dealer

    async def send(self, text: bytes, message: Peer = RELEASE) -> None:
        await self.control.send(self.dealer, [b"head", text], message)

    async def arrived(self, count: int) -> list[bytes]:
        return [await self.next() for _ in range(count)]

    async def next(self) -> bytes:
        frames = await asyncio.wait_for(self.router.receive(), LONG)
        return frames[-1]


@asynccontextmanager
async def pair(chaos: ChaosConfig | None = None) -> AsyncIterator[Pair]:
    control = Control(chaos)
    made = Pair(control)
    try:
        yield made
    finally:
        await asyncio.wait_for(control.close(), LONG)


def run(work: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        await asyncio.wait_for(work(), LONG)

    asyncio.run(bounded())


async def all_arrive(chaos: ChaosConfig | None, sent: Sequence[bytes]) -> list[bytes]:
    """What arrives of `sent`, in order; a last message that nothing happens to ends it."""
    async with pair(chaos) as made:
        for text in sent:
            await made.send(text)
        await made.dealer.deliver([b"head", b"end"])
        found: list[bytes] = []
        while (text := await made.next()) != b"end":
            found.append(text)
        return found


@pytest.mark.parametrize(
    ("chaos", "expected"),
    [
        (None, [b"1", b"2", b"3", b"4"]),
        (at(), [b"1", b"2", b"3", b"4"]),
        (at((2, "drop")), [b"1", b"3", b"4"]),
        (at((2, "duplicate")), [b"1", b"2", b"2", b"3", b"4"]),
        (at((1, "drop"), (4, "duplicate")), [b"2", b"3", b"4", b"4"]),
        (ChaosConfig(drop=1.0), []),
        (ChaosConfig(duplicate=1.0), [b"1", b"1", b"2", b"2", b"3", b"3", b"4", b"4"]),
    ],
)
def test_lost_and_repeated(chaos: ChaosConfig | None, expected: list[bytes]) -> None:
    async def work() -> None:
        assert await all_arrive(chaos, [b"1", b"2", b"3", b"4"]) == expected

    run(work)


def test_a_reordered_one_comes_after_the_next() -> None:
    async def work() -> None:
        async with pair(at((1, "reorder"), delay_seconds=NEVER)) as made:
            await made.send(b"1")
            await made.send(b"2")
            assert await made.arrived(2) == [b"2", b"1"]
            await made.send(b"3")
            assert await made.arrived(1) == [b"3"]
            assert not made.control._held

    run(work)


def test_a_reordered_one_waits_until_something_is_sent() -> None:
    """One that is dropped, delayed or reordered too has not passed it."""
    chaos = at((1, "reorder"), (2, "drop"), (3, "reorder"), delay_seconds=NEVER)

    async def work() -> None:
        async with pair(chaos) as made:
            for text in (b"1", b"2", b"3", b"4"):
                await made.send(text)
            assert await made.arrived(3) == [b"4", b"1", b"3"]

    run(work)


def test_a_reordered_one_that_nothing_follows_is_sent_in_the_end() -> None:
    async def work() -> None:
        async with pair(at((1, "reorder"), delay_seconds=0.05)) as made:
            await made.send(b"1")
            assert await made.arrived(1) == [b"1"]
            assert not made.control._held  # nothing is kept of it

    run(work)


def test_a_delayed_one_is_overtaken() -> None:
    async def work() -> None:
        async with pair(at((1, "delay"), delay_seconds=0.2)) as made:
            await made.send(b"1")
            await made.send(b"2")
            assert await made.arrived(2) == [b"2", b"1"]

    run(work)


def test_each_peer_of_a_router_has_an_order_of_its_own() -> None:
    """An answer is reordered with the next one to the same peer, not with anybody's."""

    async def work() -> None:
        async with pair(at((1, "reorder"), delay_seconds=NEVER)) as made:
            dealers = [made.dealer, made.connected()]
            names = []
            for dealer in dealers:
                await dealer.deliver([b"head", b"hello"])
                names.append((await made.router.receive())[0])
            for name, text in ((names[0], b"1"), (names[1], b"other"), (names[0], b"2")):
                await made.control.send(made.router, [name, b"head", text], Ok())
            assert (await dealers[1].receive())[-1] == b"other"
            found = [(await dealers[0].receive())[-1] for _ in range(2)]
            assert found == [b"2", b"1"]

    run(work)


def test_only_the_kinds_that_are_named() -> None:
    async def work() -> None:
        async with pair(ChaosConfig(drop=1.0, kinds=("release",))) as made:
            await made.send(b"1")
            await made.send(b"2", Ok())
            assert await made.arrived(1) == [b"2"]
            assert made.control.chaos is not None
            assert made.control.chaos.messages == 1

    run(work)


@pytest.mark.parametrize("fault", ["delay", "reorder"])
def test_closing_with_late_messages(fault: str) -> None:
    """At once, and nothing is left behind."""

    async def work() -> None:
        before = asyncio.all_tasks()
        async with pair(ChaosConfig(delay_seconds=NEVER, **{fault: 1.0})) as made:
            for number in range(100):
                await made.send(str(number).encode())
            assert len(made.control._late) == 100
        assert not made.control._late
        assert asyncio.all_tasks() <= before

    run(work)


@pytest.mark.parametrize("fault", ["delay", "reorder"])
def test_a_socket_that_is_closed_before_its_late_messages_are_sent(fault: str) -> None:
    async def work() -> None:
        async with pair(ChaosConfig(delay_seconds=0.05, **{fault: 1.0})) as made:
            await made.send(b"1")
            made.dealer.close()
            late = list(made.control._late)
            await asyncio.gather(*late)
            assert not made.control._late
            assert not made.control._held

    run(work)


def test_a_late_message_to_nobody_is_given_up() -> None:
    """As in `PeerClient`, nothing queues up for a peer that is not there."""

    async def work() -> None:
        async with pair(at((1, "delay"), delay_seconds=0.05)) as made:
            lonely = made.control.socket(zmq.DEALER)
            lonely.setsockopt(zmq.IMMEDIATE, 1)
            lonely.connect("tcp://127.0.0.1:1")
            await made.control.send(lonely, [b"head", b"1"], RELEASE)
            (late,) = made.control._late
            await asyncio.wait_for(late, LONG)
            lonely.close()

    run(work)


def test_settings_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"no message 'hallo'.*'hello'"):
        Control(ChaosConfig(drop=0.5, kinds=("hallo",)))
