"""Sidecars without processes: agents on one event loop in a thread, over the loopback fabric.

`LoopbackSidecar` stands in for `tests.harness.Sidecar`, so that the same `Engine` runs on it. Its
insides can be looked at and made to fail; what touches them goes through `Stage.call`.
"""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import msgspec

from kvagent.agent.agent import Agent
from kvagent.config import load
from kvagent.cuda.calls import CudaCalls
from kvagent.fabric.loopback import LoopbackFabric, LoopbackNetwork
from kvagent.wire.messages import Peer

T = TypeVar("T")

LONG = 20.0
"""Seconds; a bound against hangs."""


async def answered(answer: Peer | Coroutine[Any, Any, Peer]) -> Peer:
    """What a sidecar's handler answers, which it may do at once."""
    return await answer if asyncio.iscoroutine(answer) else answer


class LoopbackSidecar:
    """One agent; every look at `socket` opens a new connection to it. With `cuda`, a stand-in, the
    connections are as those of another process."""

    def __init__(self, stage: Stage, cuda: CudaCalls | None = None, **settings: Any) -> None:
        self.stage = stage
        self.cuda = cuda
        self.agent = stage.call(
            lambda: Agent(
                load(None, settings),
                lambda name, _: LoopbackFabric(stage.network, name, vram=cuda is not None),
                cuda,
            )
        )
        stage.run(self.agent.start())
        self._closed = False

    @property
    def socket(self) -> socket.socket:
        ours, theirs = socket.socketpair()
        self.stage.call(lambda: self.agent.local.adopt(theirs, in_process=not self.cuda))
        return ours

    @property
    def fabric(self) -> LoopbackFabric:
        fabric = self.agent.rank.fabric
        assert isinstance(fabric, LoopbackFabric)
        return fabric

    def hang(self) -> None:
        """Reads from its memory stay in flight."""
        self.stage.call(self.fabric.hang)

    def resume(self) -> None:
        self.stage.call(self.fabric.resume)

    def give_up_after(self, seconds: float) -> None:
        """The time for a fetch, from here on. For short ones: a first fetch meets the peer and
        opens the staging buffer, which has taken half a second on a busy machine."""
        borrower = self.agent.leader.borrower
        borrower.config = msgspec.structs.replace(borrower.config, fetch_timeout=seconds)

    @contextmanager
    def holding(self, kind: type) -> Any:
        """Messages of one kind wait at this sidecar's door. Gives a function that waits until one
        is there; at the end all are let in."""
        loop_event = self.stage.call(asyncio.Event)
        arrived = threading.Event()
        handler = self.agent.peers._handler

        async def held(message: Peer) -> Peer:
            arrived.set()
            await loop_event.wait()
            return await answered(handler(message))

        def gate(message: Peer) -> Peer | Coroutine[Any, Any, Peer]:
            return held(message) if isinstance(message, kind) else handler(message)

        self.agent.peers._handler = gate
        try:
            yield lambda: arrived.wait(LONG)
        finally:
            self.agent.peers._handler = handler
            self.stage.call(loop_event.set)

    @contextmanager
    def hearing(self) -> Iterator[list[Peer]]:
        """Gives the messages of other sidecars that come meanwhile; each is answered at once."""
        heard: list[Peer] = []
        handler = self.agent.peers._handler

        def listen(message: Peer) -> Peer | Coroutine[Any, Any, Peer]:
            heard.append(message)
            return handler(message)

        self.agent.peers._handler = listen
        try:
            yield heard
        finally:
            self.agent.peers._handler = handler

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self.stage.run(self.agent.stop())


class Stage:
    """The loop, the network, and every sidecar on them."""

    def __init__(self) -> None:
        self.network = LoopbackNetwork()
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self._thread.start()
        self._sidecars: list[LoopbackSidecar] = []

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(LONG)

    def call(self, function: Callable[[], T]) -> T:
        async def work() -> T:
            return function()

        return self.run(work())

    def sidecars(self, count: int, **settings: Any) -> list[LoopbackSidecar]:
        made = [LoopbackSidecar(self, **settings) for _ in range(count)]
        self._sidecars += made
        return made

    def close(self) -> None:
        for sidecar in self._sidecars:
            sidecar.close()
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(LONG)
        self.loop.close()
