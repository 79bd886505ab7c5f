"""The real fabric: NIXL over UCX, owned by one thread (and what `hands` gives to another).

The event loop hands commands to the thread through a queue, and gets results back with
`call_soon_threadsafe`; neither ever waits for the other. The thread sleeps in the queue while no
read is in flight, so an idle fabric costs nothing. While there are reads it polls: without a pause
as long as pieces land, since nobody but us takes what TCP brings, and with naps of a millisecond
when none has for a while.

What runs on the thread: `worker`. Importing this module does not import NIXL; `start` does.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from kvagent.core.regions import MemoryRange
from kvagent.core.stats import ReadStats
from kvagent.errors import FabricError, PeerGoneError
from kvagent.fabric.base import (
    CancelFlag,
    Kind,
    PeerMetadata,
    Prepared,
    ReadFuture,
    RemoteAgent,
    RowArray,
    Selection,
    check_metadata,
    check_probe,
    ignore,
)
from kvagent.fabric.pieces import Rows

if TYPE_CHECKING:
    from kvagent.fabric.worker import NixlRemote, NixlWorker

__all__ = ["NixlFabric"]

T = TypeVar("T")
log = logging.getLogger(__name__)

TIGHT_SECONDS = 10e-3
"""A piece takes less on any link that this is for."""
NAP = 1e-3
MAX_WAIT = 0.2
"""Seconds between looks at a worker that cannot read for the moment."""


class NixlFabric:
    """A `Fabric`. `name` begins its agents' names: engine and rank.

    `piece_bytes` is what is posted at once, `inflight_bytes` the bound per peer.
    """

    def __init__(
        self,
        name: str,
        *,
        piece_bytes: int = 16 << 20,
        inflight_bytes: int = 64 << 20,
    ) -> None:
        self._name = name
        self._piece_bytes = piece_bytes
        self._inflight_bytes = inflight_bytes
        self._options: dict[str, str] = {}
        self._metadata: PeerMetadata | None = None
        self.trouble = ""
        self._commands: queue.SimpleQueue[_Command] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._gate = threading.Lock()
        self._open = False
        """Whether commands are taken; guarded by `_gate`, so that none is left unanswered."""
        self._loop: asyncio.AbstractEventLoop

    # ------------------------------------------------------------ Fabric

    @property
    def metadata(self) -> PeerMetadata:
        if self._metadata is None:
            raise FabricError("the fabric is not started")
        return self._metadata

    async def start(self, bind: Callable[[], None] | None = None) -> None:
        assert self._thread is None
        self._loop = asyncio.get_running_loop()
        started: asyncio.Future[None] = self._future()
        # A daemon: a process that ends without close() must not hang.
        self._thread = threading.Thread(
            target=self._main, args=(started, bind), name="kvagent-fabric", daemon=True
        )
        self._open = True
        self._thread.start()
        await started
        await self.register(())

    async def close(self) -> None:
        with self._gate:
            if self._open:
                self._open = False
                self._commands.put(_Command(_stop, None))
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join)

    async def register(self, ranges: Sequence[MemoryRange]) -> None:
        def run(worker: NixlWorker) -> PeerMetadata:
            worker.register(ranges)
            return worker.metadata(self._options)

        self._metadata = await self._call(run)

    async def connect(self, meta: PeerMetadata) -> RemoteAgent:
        check_metadata(meta, self._options)
        remote = await self._call(lambda worker: worker.load(meta), undo=self._abandon)
        future = self._future()
        try:
            self._submit(
                lambda worker: worker.probe(remote, CancelFlag(), self._resolver(future)), future
            )
            await future
            check_probe(meta, remote.landing.tobytes())
        except PeerGoneError as error:
            self._abandon(remote)
            raise PeerGoneError(
                f"{error}; or its memory cannot be read from here: on one host, UCX needs both "
                "processes to have the same uid (or set UCX_TLS=tcp)"
            ) from error
        except BaseException:
            self._abandon(remote)
            raise
        return remote

    async def disconnect(self, remote: RemoteAgent) -> None:
        future: asyncio.Future[None] = self._future()
        self._submit(
            lambda worker: worker.forget(remote, lambda: self._settle(future, None)), future
        )
        await future

    async def prepare(
        self,
        remote: RemoteAgent,
        local_rows: RowArray,
        remote_rows: RowArray,
        *,
        local_kind: Kind = "dram",
        remote_kind: Kind = "dram",
    ) -> Prepared:
        local, far = Rows(local_rows), Rows(remote_rows)
        return await self._call(
            lambda worker: worker.prepare(remote, local, far, local_kind, remote_kind),
            undo=lambda prepared: self._submit(lambda worker: worker.release(prepared)),
        )

    async def read(
        self,
        prepared: Prepared,
        selection: Selection,
        cancelled: CancelFlag,
        landed: Callable[[int], None] = ignore,
    ) -> ReadStats:
        future = ReadFuture(cancelled, self._loop)
        now = time.monotonic()
        resolve = self._resolver(future)
        self._submit(
            lambda worker: worker.read(prepared, selection, cancelled, landed, now, resolve), future
        )
        return await future

    async def release(self, prepared: Prepared) -> None:
        await self._call(lambda worker: worker.release(prepared))

    async def fence(self) -> None:
        await self._call(lambda worker: worker.fence("asked for"))

    # ------------------------------------------------------------ loop side

    def _future(self) -> asyncio.Future[Any]:
        return self._loop.create_future()

    async def _call(
        self, run: Callable[[NixlWorker], T], undo: Callable[[T], None] | None = None
    ) -> T:
        """`run` on the thread. `undo` its result when nobody waits for it any more."""
        future: asyncio.Future[T] = self._future()
        self._submit(lambda worker: self._settle(future, run(worker), undo), future)
        return await future

    def _submit(
        self, run: Callable[[NixlWorker], None], future: asyncio.Future[Any] | None = None
    ) -> None:
        """`run` must settle the future, now or later; what it raises does. A command without a
        future is dropped when the fabric is closed."""
        with self._gate:
            if self._open:
                self._commands.put(_Command(run, future))
            elif future is not None:
                raise FabricError(_NOT_RUNNING)

    def _abandon(self, remote: NixlRemote) -> None:
        self._submit(lambda worker: worker.forget(remote, lambda: None))

    # ------------------------------------------------------------ thread side

    def _resolver(self, future: asyncio.Future[Any]) -> Callable[[ReadStats | FabricError], None]:
        return lambda outcome: self._settle(future, outcome)

    def _settle(
        self,
        future: asyncio.Future[Any],
        outcome: Any,
        undo: Callable[[Any], None] | None = None,
    ) -> None:
        def settle() -> None:
            if future.done():
                if undo is not None:
                    undo(outcome)
            elif isinstance(outcome, Exception):
                future.set_exception(outcome)
            else:
                future.set_result(outcome)

        try:
            self._loop.call_soon_threadsafe(settle)
        except RuntimeError:
            pass  # the loop was closed first: nobody waits

    def _main(self, started: asyncio.Future[None], bind: Callable[[], None] | None = None) -> None:
        worker: NixlWorker | None = None
        try:
            if bind is not None:
                bind()
            worker = self._make_worker()
            self._settle(started, None)
            self._serve(worker)
        except _Stop:
            pass
        except FabricError as error:
            log.error("%s: the fabric has ended: %s", self._name, error)
            self._settle(started, error)
        except Exception as error:
            log.exception("%s: the fabric has ended", self._name)
            self._settle(started, FabricError(f"{type(error).__name__}: {error}"))
        finally:
            self._finish(worker)

    def _make_worker(self) -> NixlWorker:
        try:
            from kvagent.fabric.agent import nixl_version
            from kvagent.fabric.worker import NixlWorker
        except ImportError as error:
            raise FabricError(f"NIXL cannot be loaded: {error}") from error
        self._options = {"nixl": nixl_version()}
        return NixlWorker(self._name, self._piece_bytes, self._inflight_bytes)

    def _serve(self, worker: NixlWorker) -> None:
        changed, changed_at = True, time.monotonic()
        while True:
            if not changed:
                self._wait(worker, time.monotonic() - changed_at)
            changed = not self._commands.empty()
            while not self._commands.empty():  # reads that came together are posted together
                self._obey(worker, self._commands.get_nowait())
            changed |= worker.step()
            if changed:
                changed_at = time.monotonic()
            self.trouble = worker.trouble

    def _wait(self, worker: NixlWorker, quiet: float) -> None:
        """For a command, as long as there is nothing else to do; `quiet` seconds nothing has
        happened."""
        if worker.active and quiet < TIGHT_SECONDS:
            time.sleep(0)  # the event loop may need the interpreter
            return
        wait = NAP if worker.active else MAX_WAIT if worker.trouble else None
        try:
            self._obey(worker, self._commands.get(timeout=wait))
        except queue.Empty:
            pass

    def _obey(self, worker: NixlWorker, command: _Command) -> None:
        try:
            command.run(worker)
        except Exception as error:
            if command.future is None:
                raise
            self._settle(command.future, error)

    def _finish(self, worker: NixlWorker | None) -> None:
        with self._gate:
            self._open = False
        self.trouble = self.trouble or _NOT_RUNNING
        if worker is not None:
            worker.close()
        while not self._commands.empty():
            future = self._commands.get().future
            if future is not None:
                self._settle(future, FabricError(_NOT_RUNNING))


_NOT_RUNNING = "the fabric is not running"


class _Command(NamedTuple):
    run: Callable[[NixlWorker], None]
    future: asyncio.Future[Any] | None
    """Gets what `run` raises; without one, that ends the fabric."""


class _Stop(Exception):
    """Ends the thread."""


def _stop(worker: NixlWorker) -> None:
    raise _Stop
