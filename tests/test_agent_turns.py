"""Small things that many fetches at once rest on: turns, reads that are waited for, and messages
that are done with at once."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Coroutine
from typing import Any

import pytest

from kvagent.agent.borrower import Ids
from kvagent.agent.local_server import Connection
from kvagent.agent.peers import Turns
from kvagent.agent.rank import PartRun
from kvagent.core.stats import ReadStats
from kvagent.errors import AgentError
from kvagent.fabric.base import CancelFlag, ReadCancelled, ReadFuture
from kvagent.wire import local
from kvagent.wire.messages import Attach, Drain, Failed, Local, Resume

LONG = 30.0


def test_ids_are_not_those_of_another_sidecar() -> None:
    """Also not after a fork, which copies what modules have."""
    one, two = Ids(), Ids()
    found = [ids.new() for ids in (one, two) for _ in range(100)]
    assert len(set(found)) == 200


def test_turns_come_in_order_and_none_is_lost() -> None:
    async def work() -> None:
        turns = Turns(1)
        assert turns.take_now()
        first, second, third = turns.queue(), turns.queue(), turns.queue()
        assert not turns.take_now()
        first.cancel()
        turns.give_back()
        assert second.done()  # who gave up is passed over
        assert not third.done()
        turns.give_back()
        assert third.done()
        turns.give_back()
        assert turns.take_now()
        assert not turns.take_now()

    asyncio.run(work())


def test_a_part_that_is_stopped_does_not_wait() -> None:
    async def work() -> None:
        run = PartRun("leader", CancelFlag(), None)
        future = asyncio.get_running_loop().create_future()
        waiting = asyncio.create_task(run.until(future))
        await asyncio.sleep(0)
        run.stop("cancelled: by the engine")
        with pytest.raises(ReadCancelled, match="by the engine"):
            await waiting
        with pytest.raises(ReadCancelled, match="by the engine"):  # nor does it begin to
            await run.until(asyncio.get_running_loop().create_future())

    asyncio.run(work())


@pytest.mark.parametrize("outcome", [ReadStats(nbytes=7), ReadCancelled("cancelled")])
def test_a_cancelled_task_waits_for_its_read(outcome: ReadStats | ReadCancelled) -> None:
    async def work() -> None:
        flag = CancelFlag()
        read = ReadFuture(flag, asyncio.get_running_loop())

        async def awaits() -> None:
            await read

        task = asyncio.create_task(awaits())
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.sleep(0.01)
        assert flag.cancelled
        assert not task.done()
        assert not read.done()
        if isinstance(outcome, ReadStats):
            read.set_result(outcome)
        else:
            read.set_exception(outcome)
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(work())


def test_messages_keep_their_order_behind_one_that_takes_its_time() -> None:
    heard: list[str] = []

    async def work() -> None:
        go_on, ended = asyncio.Event(), asyncio.Event()

        async def slowly(message: Local) -> None:
            await go_on.wait()
            heard.append(type(message).__name__)

        def handler(_: Connection, message: Local) -> Coroutine[Any, Any, None] | None:
            if isinstance(message, Drain):
                return slowly(message)
            heard.append(type(message).__name__)
            return None

        async def closed(_: Connection) -> None:
            heard.append("closed")
            ended.set()

        engine, here = socket.socketpair()
        connection = Connection(here, handler, closed)
        messages = (Attach(), Drain(timeout=1.0), Resume(), Drain(timeout=2.0), Attach())
        engine.sendall(b"".join(local.frame(message) for message in messages))
        engine.close()  # what was said before is heard all the same
        await asyncio.sleep(0.05)
        assert heard == ["Attach"]
        go_on.set()
        await asyncio.wait_for(ended.wait(), LONG)
        await connection.close()

    asyncio.run(work())
    assert heard == ["Attach", "Drain", "Resume", "Drain", "Attach", "closed"]


@pytest.mark.parametrize("slow", [False, True])
def test_one_bad_message_does_not_hold_up_the_next(slow: bool) -> None:
    heard: list[str] = []

    async def fails() -> None:
        await asyncio.sleep(0)
        raise AgentError("no")

    def handler(_: Connection, message: Local) -> Coroutine[Any, Any, None] | None:
        heard.append(type(message).__name__)
        if isinstance(message, Attach):
            if slow:
                return fails()
            raise AgentError("no")
        return None

    async def closed(_: Connection) -> None:
        return

    async def work() -> list[Local]:
        engine, here = socket.socketpair()
        connection = Connection(here, handler, closed)
        engine.sendall(local.frame(Attach()) + local.frame(Resume()))
        while len(heard) < 2:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        answers = local.FrameReader().feed(engine.recv(4096))
        engine.close()
        await connection.close()
        return list(answers)

    assert asyncio.run(work()) == [Failed(code="AgentError", message="no")]
    assert heard == ["Attach", "Resume"]
