"""Peers' memory that is open here, shared by the sessions that read from it.

A peer rank is one `RemoteAgent`, however many sessions know it: one that is ending while reads
still use it, its successor, or the same engine under a second address. It is let go with its last
user. One whose connection broke takes no new users; they wait until the old ones have left, and
connect anew.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field

from kvagent.errors import KVAgentError, PeerGoneError
from kvagent.fabric.base import Fabric, PeerMetadata, RemoteAgent

log = logging.getLogger("kvagent.peers")


@dataclass(slots=True)
class _Shared:
    connecting: asyncio.Task[RemoteAgent]
    users: int = 0
    ending: bool = False
    gone: asyncio.Event = field(default_factory=asyncio.Event)


class Remotes:
    def __init__(self, fabric: Callable[[], Fabric]) -> None:
        self._fabric = fabric
        self._shared: dict[str, _Shared] = {}

    async def open(self, meta: PeerMetadata, timeout: float) -> RemoteAgent:
        """Connected and probed. Every one that was returned is to be `let_go` once."""
        try:
            return await asyncio.wait_for(self._open(meta), timeout)
        except asyncio.TimeoutError:
            raise PeerGoneError(
                f"the memory of {meta.agent} could not be read within {timeout:g} s"
            ) from None

    async def _open(self, meta: PeerMetadata) -> RemoteAgent:
        while (shared := self._shared.get(meta.agent)) is not None and shared.ending:
            await shared.gone.wait()
        if shared is None:
            shared = _Shared(asyncio.create_task(self._fabric().connect(meta)))
            self._shared[meta.agent] = shared
        shared.users += 1
        try:
            return await asyncio.shield(shared.connecting)
        except BaseException:
            await self._leave(meta.agent, shared)
            raise

    def broke(self, remote: RemoteAgent) -> None:
        """Its connection is no good any more; the peer itself may be."""
        shared = self._of(remote)
        if shared is not None:
            shared.ending = True

    async def let_go(self, remote: RemoteAgent) -> None:
        shared = self._of(remote)
        if shared is not None:  # a fence forgets them all
            await self._leave(remote.name, shared)

    def forget_all(self) -> None:
        """After a fence: no handle is valid any more."""
        for shared in self._shared.values():
            shared.gone.set()
        self._shared.clear()

    def _of(self, remote: RemoteAgent) -> _Shared | None:
        shared = self._shared.get(remote.name)
        done = shared is not None and shared.connecting.done()
        if shared is None or not done or shared.connecting.cancelled():
            return None
        failed = shared.connecting.exception() is not None
        return None if failed or shared.connecting.result() is not remote else shared

    async def _leave(self, name: str, shared: _Shared) -> None:
        shared.users -= 1
        if shared.users:
            return
        shared.ending = True
        shared.connecting.cancel()
        (remote,) = await asyncio.gather(shared.connecting, return_exceptions=True)
        if isinstance(remote, RemoteAgent):
            try:
                await self._fabric().disconnect(remote)
            except KVAgentError as error:  # the fabric is closed, or a newer one
                log.debug("disconnect: %s", error)
        if self._shared.get(name) is shared:
            del self._shared[name]
        shared.gone.set()
