"""One rank's share of the work: its memory, its fabric, the parts of fetches it reads.

Every sidecar has one. It does not know what a lease is: it reads what it is told to, and reports
when nothing of it can write any more.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeVar

import msgspec

from kvagent.agent.causes import cause_text, of_ranks
from kvagent.agent.copies import copier_for
from kvagent.agent.identity import Identity
from kvagent.agent.peers import PeerBook, Session, Turns
from kvagent.agent.progress import Counts, Progress
from kvagent.agent.staging import Route, Staging
from kvagent.config import Config, join_address
from kvagent.core.compare import differences, engine_shape
from kvagent.core.layout import MemoryRange, TensorView, build_layout
from kvagent.core.mirror import block_spans, selected_spans
from kvagent.core.specs import CacheSpec, WorkerInfo
from kvagent.core.stats import ReadStats
from kvagent.cuda.calls import CudaCalls
from kvagent.cuda.device import Device
from kvagent.cuda.memory import CudaMemory
from kvagent.cuda.mirror import Mirror
from kvagent.cuda.nics import tell_ucx
from kvagent.errors import AgentError, CacheGoneError, FabricError, KVAgentError, PeerGoneError
from kvagent.fabric.base import CancelFlag, Fabric, ReadCancelled, settled
from kvagent.memory.host import HostMemory
from kvagent.wire.codec import unpack_blocks
from kvagent.wire.control import Control
from kvagent.wire.messages import Meet, Met, Part, PartState, Peer, Refused

log = logging.getLogger("kvagent.rank")

T = TypeVar("T")

FabricFactory = Callable[[str, Config], Fabric]
"""Makes a fabric from the prefix of its agents' names, `engine_id/rank`."""

KEEP_PARTS = 60.0
"""Seconds that the result of a part is kept for a leader that asks again."""
MAX_KEPT_PARTS = 65536
MAX_RUNNING_PARTS = 16384


class CacheMemory(Protocol):
    """What a cache lies in and a rank keeps alive."""

    def close(self) -> None: ...


@dataclass(slots=True)
class PartRun:
    """A part that runs or ran here. `task` is None when it was aborted before it came."""

    leader: str
    """Incarnation of the leader that it is read for."""
    cancelled: CancelFlag
    task: asyncio.Task[PartState] | None
    waits_for: asyncio.Future[None] | None = None
    """Before anything is posted; ended when the part is stopped."""
    forget_at: float = float("inf")
    result: PartState | None = None

    def stop(self, why: str) -> None:
        self.cancelled.cancel(why)
        if self.waits_for is not None and not self.waits_for.done():
            self.waits_for.set_exception(ReadCancelled(why))

    async def until(self, future: asyncio.Future[None]) -> None:
        """Waits for a future that is nobody else's. Raises `ReadCancelled` as soon as the part is
        stopped."""
        if self.cancelled.reason is not None:
            raise ReadCancelled(self.cancelled.reason)
        self.waits_for = future
        try:
            await future
        finally:
            self.waits_for = None


@dataclass(frozen=True, slots=True)
class OwnedCache:
    """Cache memory that this sidecar made, and what a worker that comes back is told of it."""

    memory: HostMemory | CudaMemory
    views: dict[str, TensorView]
    num_blocks: int


@dataclass(slots=True)
class Rank:
    config: Config
    control: Control
    make_fabric: FabricFactory
    changed: Callable[[], None]
    """Called when this rank's identity is a new one."""
    cuda: CudaCalls
    alone: bool = False
    """Nobody else in this process uses UCX."""
    host: str = ""
    port: int = 0
    info: WorkerInfo | None = None
    identity: Identity | None = None
    fabric: Fabric | None = None
    staging: Staging | None = None
    device: Device | None = None
    """The GPU that the cache lies on."""
    mirror: Mirror | None = None
    peers: PeerBook = field(init=False)
    memory: Sequence[CacheMemory] = ()
    cache: OwnedCache | None = None
    """None also when the engine owns the memory."""
    bytes_read: int = 0
    counts: Counts = field(default_factory=Counts)
    fences: int = 0
    _fencing: asyncio.Lock = field(default_factory=asyncio.Lock)
    _gate: asyncio.Event = field(default_factory=asyncio.Event)
    """Closed while a fence waits for what is in flight."""
    _parts: OrderedDict[str, PartRun] = field(default_factory=OrderedDict)
    """Those that have ended are in the order of their ends."""
    _reading: int = 0
    """Parts without a result."""

    def __post_init__(self) -> None:
        self._gate.set()
        self.peers = PeerBook(
            self.config,
            self.control,
            self.require_identity,
            self.require_fabric,
            self.require_staging,
        )

    @property
    def endpoint(self) -> str:
        return join_address(self.host, self.port)

    def require_identity(self) -> Identity:
        if self.identity is None:
            raise AgentError("no cache is registered here yet")
        return self.identity

    def require_fabric(self) -> Fabric:
        if self.fabric is None:
            raise AgentError("no cache is registered here yet")
        return self.fabric

    def require_staging(self) -> Staging:
        if self.staging is None:
            raise AgentError("no cache is registered here yet")
        return self.staging

    def require_device(self) -> Device:
        if self.device is None:
            raise AgentError("the cache does not lie on a GPU: there is no event to wait for")
        return self.device

    # ------------------------------------------------------------ the engine's worker

    async def join(self, info: WorkerInfo) -> None:
        """A worker that starts afresh: what the one before it left here goes away."""
        await self.reset()
        self.info = info

    def rejoin(self, info: WorkerInfo) -> None:
        """A worker that goes on with the cache of the one before it. Everything of this
        incarnation stays; only where the leader is may have changed.

        Raises `CacheGoneError` when there is no such cache.
        """
        me = self.identity
        afresh = "open a new WorkerClient and join() afresh"
        if me is None:
            raise CacheGoneError(f"this sidecar keeps no cache; {afresh}")
        if self.cache is None:
            raise CacheGoneError(
                f"the cache was the engine's own memory and went with it; {afresh}"
            )
        if msgspec.structs.replace(info, leader=me.info.leader) != me.info:
            raise CacheGoneError(
                f"the cache here is of {me.info.engine_id!r} tp {me.info.tp_rank}/"
                f"{me.info.tp_size} pp {me.info.pp_rank}/{me.info.pp_size}, model "
                f"{me.info.model.name!r}, and this worker says otherwise; {afresh}"
            )
        if me.index and info.leader != me.info.leader:
            self.info, self.identity = info, replace(me, info=info)
            self.changed()

    async def adopt(
        self,
        specs: dict[str, CacheSpec],
        views: dict[str, TensorView],
        ranges: tuple[MemoryRange, ...],
        num_blocks: int,
        memory: Sequence[CacheMemory],
    ) -> None:
        """Registers the engine's cache and takes on an identity. `memory` is kept alive."""
        if self.info is None:
            raise AgentError("join() comes first: the rank is not known yet")
        if self.identity is not None:
            raise AgentError("a cache is registered already; join() again to start afresh")
        layout = build_layout(specs, self.info, views, ranges, num_blocks)
        shape = engine_shape(self.info.model, specs)
        name = f"{self.info.engine_id}/{self.info.pp_rank}.{self.info.tp_rank}"
        try:
            if layout.kind == "vram":
                await self._open_device(layout.device, ranges)
            bind = None if self.device is None else self.device.bind
            if self.mirror is not None:  # then the fabric has to do with host memory alone
                layout, bind = msgspec.structs.replace(layout, ranges=self.mirror.ranges), None
            fabric = self.make_fabric(name, self.config)
            await fabric.start(bind)
            try:
                await fabric.register(layout.ranges)
            except BaseException:
                await fabric.close()
                raise
        except BaseException:
            await self._close_device()
            raise
        self.fabric, self.memory = fabric, memory
        self.staging = Staging(
            fabric,
            layout,
            self.config.staging_bytes,
            self.config.staging_run_bytes,
            copier_for(layout, self.device),
        )
        self.identity = Identity(
            info=self.info,
            incarnation=uuid.uuid4().hex,
            specs=specs,
            shape=shape,
            layout=layout,
            host=self.host,
            port=self.port,
            mirrored=self.mirror is not None,
        )
        log.info(
            "%s: rank tp %d/%d pp %d/%d, %d layers, %d blocks, %.1f MiB%s",
            self.info.engine_id,
            self.info.tp_rank,
            self.info.tp_size,
            self.info.pp_rank,
            self.info.pp_size,
            len(specs),
            num_blocks,
            sum(r.nbytes for r in ranges) / 2**20,
            self._on_what(),
        )
        try:
            self.changed()
        except BaseException:
            await self.reset()
            raise

    async def _open_device(self, index: int, cache: Sequence[MemoryRange]) -> None:
        device = self.device = Device(self.cuda, index)
        await device.start()
        if self.config.kv_buffer == "host":
            self.mirror = await device.run(lambda: Mirror(device, cache))
        elif why := self.cuda.unshareable():  # the engine's own memory: a sidecar would refuse
            log.warning("other processes of this host cannot read this cache by cuda_ipc: %s", why)
        if self.alone:
            tell_ucx(self.config.nics, device.gpu)

    async def _close_device(self) -> None:
        mirror, self.mirror = self.mirror, None
        if mirror is not None:
            await mirror.close()
        device, self.device = self.device, None
        if device is not None:
            await device.close()

    def _on_what(self) -> str:
        if self.device is None:
            return ""
        mirrored = ", read by way of host memory" if self.mirror else ""
        return f" on GPU {self.device.index} ({self.device.gpu.name}){mirrored}"

    async def copy_down(self, blocks: Sequence[bytes], num_tokens: int) -> None:
        """Returns when peers can read these blocks out of the mirror."""
        if self.mirror is not None:
            layout = self.require_identity().layout
            await self.mirror.down(block_spans(layout, unpack_blocks(tuple(blocks)), num_tokens))

    async def reset(self) -> None:
        """Ends this incarnation: reads stop, peers lose the memory, the memory goes."""
        if self.fabric is None:
            return
        fabric, self.fabric = self.fabric, None
        self.identity = None
        for run in self._parts.values():
            run.stop("reset: the engine started afresh")
        self.changed()
        reading = {run.task for run in self._parts.values() if run.task is not None}
        if reading:
            # What is posted may end by itself: UCX can crash a peer over TCP whose reader goes
            # away in the middle, so that is for those which hang.
            await asyncio.wait(reading, timeout=self.config.fence_seconds)
        await fabric.close()  # ends what is in flight; only copies can still write
        if self.staging is not None:
            staging, self.staging = self.staging, None
            await staging.close()
        await self._close_device()
        await self.peers.close()
        for mapped in self.memory:
            mapped.close()
        self.memory, self.cache = (), None

    # ------------------------------------------------------------ for consumers' ranks

    def meet(self, message: Meet) -> Peer:
        """Hands out the metadata, to who passes the same checks as at the leader's door."""
        me = self.identity
        if me is None or message.engine_id != me.info.engine_id:
            here = me.info.engine_id if me else "no engine"
            return Refused(code="wrong_engine", message=f"{here} is here, not {message.engine_id}")
        if message.incarnation != me.incarnation:
            return Refused(code="restarted", message="this rank is a new incarnation; greet again")
        found = tuple(differences(me.shape, message.shape, common=False))
        if found:
            return Refused(code="mismatch", message="the caches do not fit", differences=found)
        return Met(metadata=self.require_fabric().metadata)

    # ------------------------------------------------------------ parts

    def start_part(
        self,
        part: Part,
        done: Callable[[str, PartState], None],
        expired: Callable[[], str] | None = None,
    ) -> PartState:
        """Starts a part, or says how it stands when it is known. `done` is called at its end.
        `expired`: see `CancelFlag`."""
        run = self._parts.get(part.part_id)
        if run is None:
            if self.reading() >= MAX_RUNNING_PARTS:
                return PartState(done=True, failure="failed: too many parts at once")
            run = PartRun(part.leader, CancelFlag(expired), None)
            address = join_address(part.host, part.port)
            progress = Progress(part.engine_id, address, time.monotonic())
            self.counts.start(part.part_id, progress)
            run.task = asyncio.create_task(self._run(part, run, progress, done))
            self._parts[part.part_id] = run
            self._reading += 1
        return run.result or PartState(done=False)

    def abort_part(self, part_id: str) -> PartState:
        """Posts nothing more of a part; also of one that has yet to come."""
        run = self._parts.get(part_id)
        if run is None:
            run = PartRun("", CancelFlag(), None, forget_at=time.monotonic() + KEEP_PARTS)
            run.result = PartState(done=True, failure="cancelled: before it started")
            self._parts[part_id] = run
        run.stop("cancelled")
        return run.result or PartState(done=False)

    def reading_for(self) -> set[str]:
        """The leaders whose parts are not over."""
        return {run.leader for run in self._parts.values() if run.result is None}

    async def end_parts(self, but_of: str, why: str) -> None:
        """Ends the parts of every leader but one; afterwards none of them can write."""
        old = {
            part_id: run
            for part_id, run in self._parts.items()
            if run.result is None and run.leader != but_of
        }
        for run in old.values():
            run.stop(why)
        tasks = {run.task for run in old.values() if run.task is not None}
        if tasks:
            await asyncio.wait(tasks, timeout=self.config.fence_seconds)
        for part_id in old:
            await self.fence(part_id)

    async def fence(self, part_id: str) -> None:
        """Ends a part whose peer hangs, by a new fetching agent; afterwards it cannot write.

        NIXL can only end all reads of an agent, so new ones wait and the others in flight get
        `fence_seconds` to finish first. Peers that read from us notice nothing.
        """
        async with self._fencing:
            hung = self._parts.get(part_id)
            if self.fabric is None or hung is None or hung.result is not None:
                return
            self._gate.clear()
            try:
                others = {
                    run.task
                    for run in self._parts.values()
                    if run.task is not None and run.result is None and run is not hung
                }
                if others:
                    await asyncio.wait(others, timeout=self.config.fence_seconds)
                log.warning("fence: part %s hangs; a new fetching agent ends it", part_id)
                self.fences += 1
                await self.fabric.fence()
                self.peers.forget_memory()
            finally:
                self._gate.set()
            if hung.task is not None:  # what it read before may be on its way to the cache
                await asyncio.wait({hung.task}, timeout=self.config.fence_seconds)

    def sweep(self, now: float) -> None:
        """Forgets old results. `now` is `time.monotonic()`."""
        excess = len(self._parts) - MAX_KEPT_PARTS
        old: list[str] = []
        for part_id, run in self._parts.items():
            if run.result is None:
                continue
            if now < run.forget_at and len(old) >= excess:
                break  # those after it ended later
            old.append(part_id)
        for part_id in old:
            del self._parts[part_id]

    def reading(self) -> int:
        return self._reading

    async def _run(
        self,
        part: Part,
        run: PartRun,
        progress: Progress,
        done: Callable[[str, PartState], None],
    ) -> PartState:
        try:
            stats = await self._read(part, run, progress)
            state = PartState(done=True, stats=stats)
            self.bytes_read += stats.nbytes
        except asyncio.CancelledError:
            state = PartState(done=True, failure="reset: the sidecar is stopping")
        except KVAgentError as error:
            state = PartState(done=True, failure=cause_text(error))
        except Exception as error:
            log.exception("part %s", part.part_id)
            state = PartState(done=True, failure=f"internal: {error}")
        self.counts.end(part.part_id)
        self._reading -= 1
        run.result = state
        run.forget_at = time.monotonic() + KEEP_PARTS
        self._parts.move_to_end(part.part_id)
        run.task = None  # it holds the message, and the block ids in it
        done(part.part_id, state)
        return state

    async def _read(self, part: Part, run: PartRun, progress: Progress) -> ReadStats:
        if not self._gate.is_set():
            await self._unless_stopped(run, self._gate.wait())
        peer = (part.engine_id, part.host, part.port, part.epoch)
        session = self.peers.met(*peer)
        while session is None or session.closed:  # it may end before we can hold it
            session = await self._unless_stopped(run, self.peers.greet(*peer))
        if session.epoch != part.epoch:
            raise PeerGoneError(f"engine {part.engine_id} started afresh since the ticket")
        session.hold()
        try:
            if not session.turns.take_now():
                await self._wait_for_turn(session.turns, run)
            try:
                return await self._read_from(session, part, run, progress)
            finally:
                session.turns.give_back()
        finally:
            session.let_go()

    async def _wait_for_turn(self, turns: Turns, run: PartRun) -> None:
        turn = turns.queue()
        try:
            await run.until(turn)
        except BaseException:
            given = turn.done() and not turn.cancelled() and turn.exception() is None
            turn.cancel()
            if given:
                turns.give_back()
            raise

    async def _read_from(
        self, session: Session, part: Part, run: PartRun, progress: Progress
    ) -> ReadStats:
        try:
            sources = session.open_sources() or await self._unless_stopped(
                run, self.peers.sources(session)
            )
        except FabricError as error:
            raise of_ranks(error, part.engine_id, session.welcome.ranks) from error
        remote_blocks = unpack_blocks(part.remote_blocks)
        local_blocks = unpack_blocks(part.local_blocks)
        span = (part.start_token, part.num_tokens)
        # Every source is checked before any is read.
        staging, device, mirror = self.require_staging(), self.device, self.mirror
        routes = [
            staging.route(source, source.plan.locate(local_blocks, remote_blocks, *span))
            for source in sources
        ]
        progress.total = sum(route.nbytes for route in routes)
        wait = time.monotonic() - progress.started
        reads = [self._read_source(staging, route, run.cancelled, progress) for route in routes]
        if len(reads) == 1:  # without a task of its own
            results = [await _outcome(reads[0])]
        else:
            results = await asyncio.gather(*reads, return_exceptions=True)
        for route, result in zip(routes, results, strict=True):
            if isinstance(result, PeerGoneError):
                self.peers.remotes.broke(route.source.remote)
                self.peers.forget(session)
            elif isinstance(result, ReadStats):
                carried = self.peers.note_transport(session, route.source)
                self.counts.read(carried, result.nbytes, result.descriptors)
        # A read that was stopped because its sibling failed is not the cause.
        failures = [
            of_ranks(result, part.engine_id, [route.source.card])
            if isinstance(result, FabricError) and not isinstance(result, ReadCancelled)
            else result
            for route, result in zip(routes, results, strict=True)
            if isinstance(result, BaseException)
        ]
        failures.sort(key=lambda failure: isinstance(failure, ReadCancelled))
        if failures:
            raise failures[0]
        if device is not None:
            await settled(asyncio.ensure_future(_land(device, mirror, routes)), run.cancelled)
        total = ReadStats(wait=wait)
        for result in results:
            assert isinstance(result, ReadStats)
            total = total.merge(result)
        return total

    async def _unless_stopped(self, run: PartRun, work: Coroutine[Any, Any, T]) -> T:
        """`work`, or `ReadCancelled` as soon as the part is stopped: nothing is posted yet."""
        task = asyncio.ensure_future(work)
        ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def end(task: asyncio.Future[T]) -> None:
            task.cancelled() or task.exception()  # seen
            if not ended.done():
                ended.set_result(None)

        task.add_done_callback(end)
        try:
            await run.until(ended)
            return task.result()
        finally:
            task.cancel()

    async def _read_source(
        self, staging: Staging, route: Route, cancelled: CancelFlag, progress: Progress
    ) -> ReadStats:
        try:
            return await staging.read(route, cancelled, progress)
        except KVAgentError:
            cancelled.cancel("cancelled: another source of this fetch failed")
            raise


async def _outcome(read: Awaitable[ReadStats]) -> ReadStats | BaseException:
    """As one of `asyncio.gather`'s results."""
    try:
        return await read
    except Exception as error:
        return error


async def _land(device: Device, mirror: Mirror | None, routes: Sequence[Route]) -> None:
    """Every byte of a part has been read. Returns when kernels that are launched from now on see
    them in the GPU's memory."""
    if mirror is None:
        await device.flush()
    else:
        wanted = [each for route in routes for each in route.selections()]
        await mirror.up(selected_spans(mirror.ranges, wanted))
