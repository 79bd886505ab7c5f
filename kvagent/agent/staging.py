"""One rank's staging buffer: reads that go through it, and the copies out of it.

Which reads those are, and what is copied, is decided by `kvagent.core.staging`; how, by `copies`.
The buffer is made and registered when the first peer needs it. Copies run in a thread of their own,
which numpy and torch let go on beside the event loop.

A read is over only when nothing can write any more, copies included: one that has begun is waited
for, and one that has not is left out when the read is cancelled. A hung peer may keep an area of
the buffer for as long as its read is in flight; who finds none free for `PATIENCE` reads directly.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvagent.agent.copies import Copier
from kvagent.agent.progress import Progress
from kvagent.core.assign import Assignment
from kvagent.core.plan import ReadPlan, Selection
from kvagent.core.regions import RankLayout
from kvagent.core.staged import Chunk, StagedPart, StagedTrack, remote_blocks
from kvagent.core.staging import AREAS, Buffer, plan_staging, short_tracks
from kvagent.core.stats import ReadStats
from kvagent.core.track import Granules, Track
from kvagent.errors import FabricError, KVAgentError
from kvagent.fabric.base import CancelFlag, Fabric, Prepared, ReadCancelled, RemoteAgent, settled

if TYPE_CHECKING:
    from kvagent.agent.peers import Source

__all__ = ["Route", "Staged", "Staging"]

log = logging.getLogger("kvagent.staging")

PATIENCE = 1.0
"""Seconds; a filling takes milliseconds."""


@dataclass(frozen=True)
class Staged:
    """A track of a plan that may be staged; what is prepared for each of its parts."""

    track: StagedTrack
    prepared: tuple[Prepared, ...]


@dataclass(frozen=True)
class Route:
    """How one fetch is read from one source: `direct`, and by way of the buffer the rest."""

    source: Source
    direct: Selection
    staged: tuple[tuple[Staged, Granules], ...]

    def selections(self) -> Iterator[tuple[ReadPlan, Selection]]:
        """Everything that is wanted, as if all of it were read directly."""
        plan = self.source.plan
        yield plan, self.direct
        for staged, granules in self.staged:
            yield plan, plan.pick({staged.track.track: granules})

    @property
    def nbytes(self) -> int:
        """Bytes that are wanted."""
        plan = self.source.plan
        return self.direct.nbytes + sum(
            plan.measure(staged.track.track, granules)[0] for staged, granules in self.staged
        )


class Staging:
    """`nbytes` of buffer for reads into `layout`, 0: none. Lives as long as its fabric."""

    def __init__(
        self, fabric: Fabric, layout: RankLayout, nbytes: int, run_bytes: int, copier: Copier
    ) -> None:
        self._fabric = fabric
        self._layout = layout
        self._copier = copier
        self._area_bytes = nbytes // AREAS
        self._run_bytes = run_bytes
        self._opening: asyncio.Task[Buffer | None] | None = None
        self._free: asyncio.Queue[int] = asyncio.Queue()
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="kvagent-staging")
        self._closed = False

    # ------------------------------------------------------------ preparing

    async def prepare(
        self, remote: RemoteAgent, layout: RankLayout, assignment: Assignment, plan: ReadPlan
    ) -> tuple[Staged, ...]:
        """What of a plan may be staged, prepared. `layout` is the remote rank's."""
        if not self._area_bytes or not short_tracks(plan, self._run_bytes):
            return ()
        if self._opening is None:
            self._opening = asyncio.create_task(self._open())
        buffer = await asyncio.shield(self._opening)
        if buffer is None:
            return ()
        tracks = plan_staging(self._layout, layout, assignment, plan, buffer, self._run_bytes)
        found = []
        for track in tracks:
            prepared = [
                await self._fabric.prepare(
                    remote,
                    part.local_rows,
                    part.plan.remote_rows,
                    local_kind=buffer.kind,
                    remote_kind=layout.kind,
                )
                for part in track.parts
            ]
            found.append(Staged(track, tuple(prepared)))
        return tuple(found)

    async def _open(self) -> Buffer | None:
        """Makes the buffer; without one everything is read directly."""
        size = AREAS * self._area_bytes
        loop = asyncio.get_running_loop()
        try:
            memory = await loop.run_in_executor(self._executor, self._copier.open, size)
            await self._fabric.register([memory])
        except KVAgentError as error:
            log.warning("no staging buffer of %d bytes, short runs stay short: %s", size, error)
            return None
        for area in range(AREAS):
            self._free.put_nowait(area)
        return Buffer(memory.address, self._area_bytes, memory.kind, memory.device)

    async def close(self) -> None:
        """Waits for copies, and gives the buffer up. After the fabric: nothing reads into it."""
        self._closed = True
        if self._opening is not None:
            await asyncio.gather(self._opening, return_exceptions=True)
        await asyncio.to_thread(self._executor.shutdown)
        self._copier.close()

    # ------------------------------------------------------------ reading

    def route(self, source: Source, found: dict[Track, Granules]) -> Route:
        """`found`: what `source.plan` located. Reads nothing yet."""
        staged = []
        for each in source.staged:
            granules = found[each.track.track]
            if each.track.is_better(source.plan, granules, self._run_bytes):
                staged.append((each, granules))
        away = {each.track.track for each, _ in staged}
        direct = {track: found[track] for track in found if track not in away}
        return Route(source, source.plan.pick(direct), tuple(staged))

    async def read(self, route: Route, cancelled: CancelFlag, progress: Progress) -> ReadStats:
        """Reads a whole route. Raises what `Fabric.read` does, and as late: when nothing of it can
        write any more."""
        reads: list[Awaitable[ReadStats]] = [
            self._read_staged(route.source, staged, granules, cancelled, progress)
            for staged, granules in route.staged
        ]
        if route.direct.descriptors or not reads:
            reads.append(
                self._fabric.read(route.source.prepared, route.direct, cancelled, progress.direct)
            )
        if len(reads) == 1:
            return await reads[0]
        total = ReadStats()
        for stats in await _every([_start(read, cancelled) for read in reads], cancelled):
            total = total.merge(stats)
        return total

    async def _read_staged(
        self,
        source: Source,
        staged: Staged,
        granules: Granules,
        cancelled: CancelFlag,
        progress: Progress,
    ) -> ReadStats:
        begin = time.monotonic()
        nbytes = source.plan.measure(staged.track.track, granules)[0]
        steps = staged.track.work(len(remote_blocks(granules)), nbytes).steps
        running: list[asyncio.Future[ReadStats]] = []
        try:
            for step, (part, prepared, chunk) in enumerate(_chunks(staged, granules)):
                if cancelled.cancelled:
                    break
                area = await self._take_area()
                if area is None:
                    log.warning("the staging buffer is held up: reading %s directly", source)
                    selection = source.plan.pick({staged.track.track: granules})
                    read = self._fabric.read(source.prepared, selection, cancelled, progress.direct)
                    running.append(_start(read, cancelled))
                    break
                share = nbytes * (step + 1) // steps - nbytes * step // steps
                work = self._read_chunk(part, prepared, chunk, area, cancelled)
                running.append(_start(_counted(work, progress, share), cancelled))
        except BaseException:
            cancelled.cancel("cancelled: the read was given up")
            await settled(asyncio.gather(*running, return_exceptions=True), cancelled)
            raise
        done = await _every(running, cancelled)
        if cancelled.reason is not None:
            raise ReadCancelled(cancelled.reason)
        wait = done[0].wait if done else 0.0
        return ReadStats(
            nbytes=nbytes,
            descriptors=sum(stats.descriptors for stats in done),
            staged=sum(stats.staged for stats in done),
            wait=wait,
            post=sum(stats.post for stats in done),
            wire=time.monotonic() - begin - wait,
        )

    async def _take_area(self) -> int | None:
        """A free area, as soon as there is one; None when there is none for too long."""
        taking = asyncio.ensure_future(self._free.get())
        try:
            await asyncio.wait({taking}, timeout=PATIENCE)
        except BaseException:
            if taking.done():
                self._free.put_nowait(taking.result())
            raise
        finally:
            taking.cancel()  # nothing is lost: what it did not take is still there
        return taking.result() if taking.done() else None

    async def _read_chunk(
        self,
        part: StagedPart,
        prepared: Prepared,
        chunk: Chunk,
        area: int,
        cancelled: CancelFlag,
    ) -> ReadStats:
        try:
            stats = await self._fabric.read(prepared, part.selection(chunk, area), cancelled)
            if cancelled.reason is not None:
                raise ReadCancelled(cancelled.reason)
            if self._closed:
                raise FabricError("the staging buffer was closed")
            copying = asyncio.get_running_loop().run_in_executor(
                self._executor, self._copier.copy, part, chunk, area
            )
            await settled(copying, cancelled)
        finally:
            self._free.put_nowait(area)
        return ReadStats(
            staged=stats.nbytes,
            descriptors=stats.descriptors,
            wait=stats.wait,
            post=stats.post,
        )


async def _counted(work: Awaitable[ReadStats], progress: Progress, share: int) -> ReadStats:
    stats = await work
    progress.staged(share)
    return stats


def _chunks(staged: Staged, granules: Granules) -> Iterator[tuple[StagedPart, Prepared, Chunk]]:
    for part, prepared in zip(staged.track.parts, staged.prepared, strict=True):
        for chunk in part.chunks(granules):
            yield part, prepared, chunk


def _start(read: Awaitable[ReadStats], cancelled: CancelFlag) -> asyncio.Future[ReadStats]:
    """Begins a read. When it fails, it stops the others that share its flag."""

    def ended(read: asyncio.Future[ReadStats]) -> None:
        if read.cancelled() or read.exception() is not None:
            cancelled.cancel("cancelled: another piece of this fetch failed")

    future = asyncio.ensure_future(read)
    future.add_done_callback(ended)
    return future


async def _every(
    reads: Sequence[asyncio.Future[ReadStats]], cancelled: CancelFlag
) -> list[ReadStats]:
    """The results of all reads, when all are over."""
    results = await settled(asyncio.gather(*reads, return_exceptions=True), cancelled)
    failures = [result for result in results if isinstance(result, BaseException)]
    # A read that was stopped because its sibling failed is not the cause.
    failures.sort(key=lambda failure: isinstance(failure, ReadCancelled))
    if failures:
        raise failures[0]
    return [result for result in results if isinstance(result, ReadStats)]
