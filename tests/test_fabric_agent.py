"""What a fence rests on: that a NIXL agent can be destroyed, whatever happened to it before."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvagent.core.regions import MemoryRange
from kvagent.errors import FabricError, PeerGoneError
from kvagent.fabric import worker as worker_module
from kvagent.fabric.agent import NixlAgent
from kvagent.fabric.segments import LARGE
from tests.test_fabric_nixl import Peer, Reader, everything, run
from tests.test_fabric_nixl import victim as victim

pytest.importorskip("nixl")

ROOT = Path(__file__).parent.parent
KILLS = 10
KILLED_AND_DESTROYED = f"""
import asyncio, itertools, random
import numpy as np
from kvagent.errors import PeerGoneError
from kvagent.fabric.hands import Source
from tests.test_fabric_nixl import BLOCKS, Peer, Reader, everything, select

ends = []
copy = Source.copy

def counted(source, *given):
    ends.append(copy(source, *given))
    return ends[-1]

Source.copy = counted

async def read_on(reader, prepared):
    for number in itertools.count():
        order = np.random.default_rng(number).permutation(BLOCKS)
        await reader.read(prepared, select(np.arange(BLOCKS), order))

async def main():
    async with Reader(piece_bytes=2 << 20, inflight_bytes=8 << 20) as reader:
        for number in range({KILLS}):
            victim = Peer()
            try:
                remote, prepared = await reader.prepare(victim)
                await reader.read(prepared, everything())
                readings = [asyncio.create_task(read_on(reader, prepared)) for _ in range(3)]
                await asyncio.sleep(random.random() * 0.02)
                victim.process.kill()
                errors = await asyncio.gather(*readings, return_exceptions=True)
                assert all(isinstance(error, PeerGoneError) for error in errors), errors
                if number % 2:
                    await reader.fabric.disconnect(remote)
                await reader.fabric.fence()
                reader.memory[:] = 0xFF
                await asyncio.sleep(0.02)
                assert (reader.memory == 0xFF).all(), "written after the end"
            finally:
                victim.kill()

asyncio.run(main())
assert ends.count(True) > {KILLS}, "the helper did nothing"
"""


@pytest.mark.timeout(300)
def test_destroyed_after_its_peers_were_killed_in_the_middle() -> None:
    """In a process of its own, since what goes wrong there is an abort inside UCX."""
    done = subprocess.run(
        [sys.executable, "-c", KILLED_AND_DESTROYED],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-2000:]


@pytest.fixture
def agents(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether NIXL's agent was gone, for each one that was destroyed."""
    found: list[bool] = []
    destroy = NixlAgent.destroy

    def watched(agent: NixlAgent) -> None:
        try:
            destroy(agent)
        except RuntimeError:
            found.append(False)
            raise
        found.append(True)

    monkeypatch.setattr(worker_module.NixlAgent, "destroy", watched)
    return found


def test_who_keeps_an_error_does_not_keep_the_agent(victim: Peer, agents: list[bool]) -> None:
    """Else a fence would destroy nothing, and what is in flight would go on writing."""

    async def body() -> None:
        async with Reader() as reader:
            _, prepared = await reader.prepare(victim)
            reading = asyncio.create_task(read_until_it_fails(reader, prepared))
            await asyncio.sleep(0.02)
            victim.process.kill()
            kept = await reading
            await reader.fabric.fence()
            assert agents == [True]
            assert isinstance(kept, PeerGoneError)

    run(body)


async def read_until_it_fails(reader: Reader, prepared: Any) -> FabricError:
    while True:
        try:
            await reader.read(prepared, everything())
        except FabricError as error:
            return error


def test_a_log_record_does_not_keep_the_agent(caplog: pytest.LogCaptureFixture) -> None:
    agent = NixlAgent("reader/0/fetch", serving=False, segments=LARGE)
    agent.deregister(MemoryRange(0x1000, 4096))  # which was never registered
    assert "deregisterMem" in caplog.text
    agent.destroy()


def test_an_agent_that_is_held_is_not_called_destroyed() -> None:
    agent = NixlAgent("reader/0/fetch", serving=False, segments=LARGE)
    holder = agent._agent.getXferStatus
    with pytest.raises(RuntimeError, match="reader/0/fetch is held by"):
        agent.destroy()
    assert holder is not None
