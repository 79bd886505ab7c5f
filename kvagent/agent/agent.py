"""The sidecar: puts rank, leader or follower, sockets and HTTP together, and runs them.

What it is, it learns from the engine's worker that joins: rank 0 makes it the leader, any other
rank a follower. Until then it only listens.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import time
from collections.abc import Awaitable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from typing import Any

import msgspec

from kvagent.agent import http
from kvagent.agent.follower import Follower, orphan_seconds
from kvagent.agent.leader import Leader
from kvagent.agent.local_server import Connection, LocalServer
from kvagent.agent.rank import FabricFactory, OwnedCache, Rank
from kvagent.config import Config, split_address
from kvagent.core.compare import differences
from kvagent.core.layout import MemoryRange, allocate
from kvagent.core.lease import LeaseState
from kvagent.cuda.calls import CudaCalls
from kvagent.cuda.handover import Handover
from kvagent.cuda.memory import CudaMemory
from kvagent.cuda.torch_cuda import TorchCuda
from kvagent.errors import AgentError, GeometryError, ProtocolError
from kvagent.fabric.place import read_place
from kvagent.memory.host import HostMemory, MappedMemory
from kvagent.visible.watch import Watch
from kvagent.wire.control import Control
from kvagent.wire.messages import (
    AbortPart,
    Ack,
    Allocate,
    Allocated,
    Attach,
    Cancel,
    Claim,
    Complete,
    CopyDown,
    Drain,
    Drained,
    Drop,
    DropPeer,
    Fetch,
    GpuMemory,
    Hello,
    Hold,
    Join,
    JoinAccepted,
    JoinLeader,
    Local,
    Meet,
    Offer,
    Ok,
    Part,
    PartDone,
    Peer,
    Presence,
    Quiesce,
    Quiesced,
    Ready,
    Refused,
    Register,
    Registered,
    Release,
    ReleaseTicket,
    Renew,
    Resume,
    SharedRange,
    Waiting,
    Who,
)
from kvagent.wire.peer import PeerServer

log = logging.getLogger("kvagent.agent")

TICK = 0.2
"""Seconds between looks at the clock."""
VERSION = version("kvagent")


class Agent:
    """`await start()`, then `await stop()`; both on the same loop."""

    def __init__(
        self,
        config: Config,
        make_fabric: FabricFactory,
        cuda: CudaCalls | None = None,
        *,
        alone: bool = False,
    ) -> None:
        """`cuda` is the real one unless it is given. `alone`: the process is the agent's own."""
        self.config = config
        self.handover = Handover()
        """To and from the threads of this process that are connected."""
        self.control = Control(config.chaos, config.keys)
        self.watch = Watch()
        self.cuda = cuda or TorchCuda()
        self.rank = Rank(
            config, self.control, make_fabric, self._identity_changed, self.cuda, alone
        )
        self.leader = Leader(config, self.control, self.rank, self.watch)
        self.leader.team.changed = self._team_changed
        self.follower: Follower | None = None
        self.local = LocalServer(self._on_local, self._gone)
        self.peers = PeerServer(self.control, self._on_peer)
        self._taking_over = False
        self._stopping = False
        self._kept = False
        """The worker goes on with the cache that is here, and has not asked for it yet."""
        self._worker: Connection | None = None
        self._scheduler: Connection | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._http: http.Server | None = None

    # ------------------------------------------------------------ life

    async def start(self) -> None:
        """Binds everything before anything is published; errors are raised here."""
        host, port = self.config.bind_address()
        self.rank.host = self.config.advertised_host()
        self.rank.port = self.peers.bind(host, port)
        if self.config.socket:
            self.local.listen(self.config.socket)
        self.control.start()
        self.peers.start()
        if self.config.http:
            self._http = await http.serve(self)
        self._spawn(self._clock())
        log.info(
            "kvagent %s: control %s, socket %s",
            VERSION,
            self.rank.endpoint,
            self.config.socket or "in-process",
        )

    async def stop(self) -> None:
        """Ends what runs, closes every door. Transfers that are open fail; `drain` comes first."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._http is not None:
            await self._http.close()
        if self.follower is not None:
            await self.follower.close()
            self.follower = None
        await self.rank.reset()
        await self.leader.close()
        self.leader.outbox.flush()
        await self.local.close()
        await self.peers.close()
        await self.control.close()

    async def drain(self, timeout: float) -> tuple[str, ...]:
        """Before `stop`: as `EngineClient.drain`, and no scheduler ends it."""
        self._stopping = True
        return await self.leader.drain(timeout)

    def adopt(self, sock: socket.socket) -> None:
        """Serves a thread of this process: `EmbeddedAgent`."""
        self.local.adopt(sock, in_process=True)

    async def _clock(self) -> None:
        while True:
            await asyncio.sleep(TICK)
            try:
                self.leader.tick()
                await self.leader.team.close_gone()
                self.rank.sweep(time.monotonic())
                await self.rank.peers.sweep(time.monotonic())
                self._sample()
            except Exception:
                log.exception("the clock's work failed")

    def _sample(self) -> None:
        ended = self.leader.fetches.ended
        self.watch.sample(
            read=self.rank.counts.landed,
            lent=self.leader.leases.ended[LeaseState.COMPLETED.value],
            good=ended["ok"],
            failed=ended.total() - ended["ok"],
        )

    # ------------------------------------------------------------ identity

    def _identity_changed(self) -> None:
        """The rank has a cache now, or none any more."""
        me = self.rank.identity
        if me is None or me.index == 0:
            self.leader.set_identity(me)
        old, self.follower = self.follower, None
        if old is not None:
            self._spawn(old.close())
        if me is not None and me.index > 0:
            self.follower = Follower(self.rank, me, lambda: self._worker is not None)

    def _team_changed(self) -> None:
        self.leader.know_blocks()
        if self._scheduler is not None:
            self._announce(self._scheduler)

    def _announce(self, scheduler: Connection) -> None:
        team, me = self.leader.team, self.rank.identity
        if me is not None and me.index:
            why = f"this is the sidecar of rank {me.index}: connect to rank 0's"
            scheduler.send(Waiting(reason=why))
            return
        if me is None or not team.complete:
            scheduler.send(Waiting(reason=team.missing()))
            return
        if self._taking_over:
            scheduler.send(Waiting(reason="the fetches of the scheduler before are ending"))
            return
        scheduler.send(
            Ready(
                engine_id=me.info.engine_id,
                host=me.host,
                port=me.port,
                tp_size=me.info.tp_size,
                epoch=team.epoch,
                lease_seconds=self.config.lease_seconds,
                orphan_seconds=(
                    orphan_seconds(self.config.fence_seconds) if me.world_size > 1 else 0.0
                ),
                deferred=me.mirrored,
            )
        )

    # ------------------------------------------------------------ the engine's processes

    async def _gone(self, connection: Connection) -> None:
        """That process is gone. Its cache stays, and peers go on reading.

        One that we end the connection with may be alive, and takes the end of the stream for our
        death: it is closed when nothing can write into its blocks any more.
        """
        if connection is self._worker:
            self._worker = None
            log.info("the engine's worker is gone; its cache stays")
        if connection is self._scheduler:
            self.leader.outbox.detach()
            if connection.ended_by_us:
                self.leader.lender.revoke_all()
                await self.leader.borrower.abandon("the scheduler broke the protocol")
            self._scheduler = None
            self.leader.borrower.holder.release_all()
            self.leader.resume()
            log.info("the scheduler is gone; its leases and fetches run on until another one comes")

    def _on_local(self, connection: Connection, message: Local) -> Coroutine[Any, Any, None] | None:
        match message:
            case Join() | Allocate() | Register():
                return self._on_worker(connection, message)
            case Attach():
                return self._attach(connection)
            case _ if connection is not self._scheduler:  # the rest is a scheduler's
                raise ProtocolError(f"{type(message).__name__} before Attach")
            case Offer():
                self._offer(connection, message)
            case Fetch():
                self.leader.fetch(message)
            case Ack(seq=seq):
                self.leader.outbox.acknowledge(seq)
            case Cancel(request_id=request_id):
                self.leader.cancel(request_id)
            case Hold():
                self.leader.hold(message)
            case ReleaseTicket():
                self.leader.borrower.release(message)
            case Quiesce(timeout=timeout):
                self._spawn(self._quiesce_for(connection, timeout))
            case Resume():
                self.leader.resume()
            case DropPeer(engine_id=engine_id):
                self.leader.lender.drop_consumer(engine_id)
                return self.leader.borrower.drop_peer(engine_id)
            case Drain(timeout=timeout):
                self._spawn(self._drain_for(connection, timeout))
            case _:
                raise ProtocolError(f"{type(message).__name__} is not for a sidecar")
        return None

    def _offer(self, connection: Connection, message: Offer) -> None:
        if message.event and not connection.in_process:
            raise ProtocolError("an event of another process")
        event = self.handover.take(message.event) if message.event else None
        self.leader.offer(message, event)

    async def _attach(self, connection: Connection) -> None:
        await asyncio.sleep(0)  # the one before it may be ending just now
        if self._scheduler is not None:
            raise AgentError("a scheduler is attached already; an engine has one")
        connection.role = "scheduler"
        self._scheduler = connection
        if not self._stopping:
            self.leader.take_work()
        self.leader.outbox.attach(connection.send)
        self._spawn(self._take_over(connection))

    async def _take_over(self, scheduler: Connection) -> None:
        """A new scheduler has never heard of the blocks that its predecessor lent and borrowed,
        and will use them. So the leases end, and it is ready when nothing can write any more."""
        self.leader.lender.revoke_all()
        self._taking_over = True
        try:
            self._announce(scheduler)
            await self.leader.borrower.abandon("its scheduler is gone")
        finally:
            self._taking_over = False
        self._announce(scheduler)

    async def _drain_for(self, connection: Connection, timeout: float) -> None:
        left = await self.leader.drain(timeout)
        self.leader.outbox.flush()
        connection.send(Drained(left=left))

    async def _quiesce_for(self, connection: Connection, timeout: float) -> None:
        left = await self.leader.quiesce(timeout)
        self.leader.outbox.flush()
        connection.send(Quiesced(left=left))

    async def _on_worker(self, connection: Connection, message: Join | Allocate | Register) -> None:
        if isinstance(message, Join):
            if self._worker not in (None, connection):
                raise AgentError("a worker is connected already; each needs a sidecar of its own")
            if message.info.leader is None and (message.info.tp_rank or message.info.pp_rank):
                raise AgentError(
                    "WorkerInfo.leader is missing: every rank but 0 must say where rank 0's "
                    "sidecar is (rank 0's worker.endpoint)"
                )
            if message.info.leader is not None:
                split_address(message.info.leader, "WorkerInfo.leader")
            if message.keep_cache:
                self.rank.rejoin(message.info)
            self._worker = connection
            connection.role = "worker"
            self._kept = message.keep_cache
            if not message.keep_cache:
                await self.rank.join(message.info)
            if self._scheduler is None and not message.keep_cache:
                # The old engine's; it had the same names for its requests.
                self.leader.outbox.clear()
                self.leader.borrower.mute()
            connection.send(JoinAccepted(endpoint=self.rank.endpoint, version=VERSION))
        elif connection is not self._worker:
            raise AgentError("join() comes first")
        elif isinstance(message, Allocate):
            await self._allocate(connection, message)
        else:
            await self._register(connection, message)

    async def _allocate(self, connection: Connection, message: Allocate) -> None:
        info = self.rank.info
        if info is None:
            raise AgentError("join() comes first")
        if self._kept and self.rank.cache is not None:
            self._kept = False
            self._hand_back(connection, self.rank.cache, message)
            return
        nbytes, views = allocate(message.specs, info, message.num_blocks)
        memory = await self._make_memory(message.gpu, nbytes)
        memory_range = MemoryRange(memory.address, memory.nbytes)
        if isinstance(memory, CudaMemory):
            memory_range = MemoryRange(memory.address, nbytes, "vram", memory.gpu.index)
        cache = OwnedCache(memory, views, message.num_blocks)
        try:
            await self.rank.adopt(
                message.specs, views, (memory_range,), message.num_blocks, [memory]
            )
            self.rank.cache = cache
        except BaseException:
            memory.close()
            raise
        self._hand_over(connection, cache)

    async def _make_memory(self, gpu: str, nbytes: int) -> HostMemory | CudaMemory:
        loop = asyncio.get_running_loop()
        if not gpu:
            memory = await loop.run_in_executor(None, HostMemory, nbytes)
            if memory.advice:
                log.warning("%s", memory.advice)
            return memory
        with ThreadPoolExecutor(1, "kvagent-cuda") as thread:  # it gets bound to that GPU
            return await loop.run_in_executor(thread, CudaMemory, self.cuda, gpu, nbytes)

    def _hand_over(self, connection: Connection, cache: OwnedCache) -> None:
        """Tells the worker what it needs in order to map the cache."""
        memory = cache.memory
        answer = Allocated(nbytes=memory.nbytes, views=cache.views, pages=memory.pages)
        if isinstance(memory, HostMemory):
            connection.send(answer, [memory.fd])
            return
        there = GpuMemory(
            gpu=memory.gpu.uuid, handle=memory.shared.handle, offset=memory.shared.offset
        )
        if connection.in_process:
            there = GpuMemory(gpu=memory.gpu.uuid, handed=self.handover.give(memory.tensor))
        connection.send(msgspec.structs.replace(answer, memory=there))

    def _hand_back(self, connection: Connection, cache: OwnedCache, message: Allocate) -> None:
        me = self.rank.require_identity()
        if message.num_blocks != cache.num_blocks:
            raise GeometryError(
                f"the cache that is kept has {cache.num_blocks} blocks, not {message.num_blocks}; "
                "ask for those, or join() afresh"
            )
        if message.specs != me.specs:
            wrong = sorted(
                name
                for name in me.specs.keys() | message.specs.keys()
                if me.specs.get(name) != message.specs.get(name)
            )
            raise GeometryError(
                f"the cache that is kept was allocated with other specs ({', '.join(wrong[:5])}); "
                "ask with those, or join() afresh"
            )
        here = cache.memory.gpu.uuid if isinstance(cache.memory, CudaMemory) else ""
        if message.gpu != here:
            raise GeometryError(
                f"the cache that is kept lies {f'on GPU {here}' if here else 'in host memory'}: "
                "ask for it there, or join() afresh"
            )
        self._hand_over(connection, cache)

    async def _register(self, connection: Connection, message: Register) -> None:
        kept: list[MappedMemory] = []
        ranges: list[MemoryRange] = []
        embedded = all(shared.address for shared in message.ranges)
        if embedded and not connection.in_process:
            raise GeometryError("addresses of another process cannot be registered")
        fds = [] if embedded else connection.take_fds(len(message.ranges))
        try:
            if embedded:
                ranges = [_range_of(shared) for shared in message.ranges]
            for shared in message.ranges if fds else ():
                mapped = MappedMemory(fds.pop(0), shared.nbytes, shared.offset)
                kept.append(mapped)
                ranges.append(MemoryRange(mapped.address, shared.nbytes, "dram", 0))
            await self.rank.adopt(
                message.specs, message.views, tuple(ranges), message.num_blocks, kept
            )
        except BaseException:
            for mapped in kept:
                mapped.close()
            for fd in fds:
                os.close(fd)
            raise
        connection.send(Registered())

    # ------------------------------------------------------------ other sidecars

    def _on_peer(self, message: Peer) -> Peer | Coroutine[Any, Any, Peer]:
        leader, rank = self.leader, self.rank
        match message:
            case Complete():
                return leader.lender.complete(message)
            case Claim():
                return leader.lender.claim(message)
            case Renew():
                return leader.lender.renew(message)
            case Release():
                return leader.lender.released(message)
            case Who():
                return self._presence()
            case Hello():
                return self._hello(message)
            case Meet():
                return rank.meet(message)
            case JoinLeader():
                return leader.team.join(message, time.monotonic())
            case PartDone():
                leader.borrower.part_done(message)
                return Ok()
            case Part() | CopyDown() | Drop() if self.follower is None:
                return Refused(code="not_ready", message="this rank follows nobody")
            case Part():
                assert self.follower is not None
                return self.follower.start_part(message)
            case AbortPart():
                return self._abort_part(message)
            case CopyDown():
                return self._copy_down(message)
            case Drop(engine_id=engine_id):
                return self._drop(engine_id)
            case _:
                return Refused(code="protocol", message=f"{type(message).__name__} is no question")

    async def _abort_part(self, message: AbortPart) -> Peer:
        if message.fence and not self.rank.abort_part(message.part_id).done:
            await self.rank.fence(message.part_id)
        return self.rank.abort_part(message.part_id)

    async def _copy_down(self, message: CopyDown) -> Peer:
        if self.follower is None or not self.follower.follows(message.leader):
            return Refused(code="not_ready", message="this rank follows another leader")
        await self.rank.copy_down(message.blocks, message.num_tokens)
        return Ok()

    async def _drop(self, engine_id: str) -> Peer:
        await self.rank.peers.drop(engine_id)
        return Ok()

    def _presence(self) -> Presence:
        me, team = self.rank.identity, self.leader.team
        info = self.rank.info
        ready = me is not None and me.index == 0 and team.complete
        not_ready = team.missing() if me is None or me.index == 0 else "rank 0 is elsewhere"
        return Presence(
            version=VERSION,
            place=read_place(),
            engine_id=info.engine_id if info else "",
            rank=me.index if me else 0,
            shape=team.shape() if ready else None,
            not_ready="" if ready else not_ready,
        )

    def _hello(self, message: Hello) -> Peer:
        """The first step of the handshake: who we are and whether we fit, before anything else."""
        me, team = self.rank.identity, self.leader.team
        if me is not None and message.sender == me.incarnation:
            return Refused(
                code="self",
                message=f"you dialled yourself at {self.rank.endpoint}; is the advertised "
                "address of the producer wrong?",
            )
        if me is None or me.index != 0 or not team.complete:
            why = team.missing() if me is None or me.index == 0 else "rank 0 is elsewhere"
            return Refused(code="not_ready", message=why)
        if message.engine_id != me.info.engine_id:
            return Refused(
                code="wrong_engine",
                message=f"{me.info.engine_id!r} is here, not {message.engine_id!r}",
            )
        found = tuple(differences(team.shape(), message.shape))
        if found:
            return Refused(code="mismatch", message="model or cache do not fit", differences=found)
        return team.welcome(self.config.lease_seconds)

    def _spawn(self, work: Awaitable[None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _range_of(shared: SharedRange) -> MemoryRange:
    """Memory of this process that a thread of it registers."""
    if shared.device < 0:
        return MemoryRange(shared.address, shared.nbytes)
    return MemoryRange(shared.address, shared.nbytes, "vram", shared.device)
