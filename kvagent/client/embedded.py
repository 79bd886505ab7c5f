"""`EmbeddedAgent`: the agent in a thread of the worker's own process, behind the same methods.

The way to serve memory that only its own process can register, such as a cache that an unmodified
engine allocated with cudaMalloc. Everything but the process boundary is the same: the clients
talk to the agent over socket pairs.
"""

from __future__ import annotations

import asyncio
import socket as sockets
import threading
from collections.abc import Mapping
from typing import Any

import torch
import uvloop

from kvagent.agent.agent import Agent
from kvagent.agent.rank import FabricFactory
from kvagent.agent.serve import nixl_fabric
from kvagent.client.engine import EngineClient
from kvagent.client.worker import WorkerClient
from kvagent.config import load
from kvagent.core.output import KVConnectorOutput
from kvagent.core.specs import CacheSpec, WorkerInfo
from kvagent.cuda.calls import CudaCalls
from kvagent.cuda.handover import Handover
from kvagent.cuda.torch_cuda import TorchCuda
from kvagent.errors import AgentError
from kvagent.wire.codec import BlockIds


class EmbeddedAgent:
    """Has the methods of `WorkerClient` and, on rank 0, of `EngineClient`."""

    def __init__(
        self,
        *,
        socket: str = "",
        bind: str = "127.0.0.1:0",
        make_fabric: FabricFactory = nixl_fabric,
        cuda: CudaCalls | None = None,
        **settings: Any,
    ) -> None:
        """`settings` are the fields of `Config`. With `socket`, the path of a unix socket, the
        scheduler may be another process: an `EngineClient` of that path.

        Tensors on a GPU (`register_kv_caches`) are read and written in place. `cuda` is for tests.
        """
        self._cuda = cuda or TorchCuda()
        self._config = load(None, {**settings, "socket": socket, "bind": bind})
        self._make_fabric = make_fabric
        self._started = threading.Event()
        self._failure: BaseException | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: asyncio.Event | None = None
        self._agent: Agent | None = None
        self._thread = threading.Thread(target=self._run, name="kvagent", daemon=True)
        self._thread.start()
        self._started.wait()
        if self._failure is not None:
            self._thread.join()
            raise self._failure
        self._worker = WorkerClient(self._open(), cuda=self._cuda, handover=self._handover)
        self._engine: EngineClient | None = None

    # ------------------------------------------------------------ worker

    def join(self, info: WorkerInfo, *, keep_cache: bool = False) -> None:
        """See `WorkerClient.join`."""
        self._worker.join(info, keep_cache=keep_cache)

    @property
    def endpoint(self) -> str:
        """See `WorkerClient.endpoint`."""
        return self._worker.endpoint

    def allocate_kv_caches(
        self,
        specs: Mapping[str, CacheSpec],
        num_blocks: int,
        device: torch.device | str = "cpu",
    ) -> dict[str, torch.Tensor]:
        """See `WorkerClient.allocate_kv_caches`."""
        return self._worker.allocate_kv_caches(specs, num_blocks, device)

    def register_kv_caches(
        self, tensors: Mapping[str, torch.Tensor], specs: Mapping[str, CacheSpec]
    ) -> None:
        """See `WorkerClient.register_kv_caches`; here the tensors may lie anywhere: all in host
        memory, or all on one GPU. They must stay until `close`."""
        self._worker.register_kv_caches(tensors, specs)

    def wait_lost(self, timeout: float | None = None) -> bool:
        """See `WorkerClient.wait_lost`: here it is the end of the agent's thread."""
        self._thread.join(timeout)
        return not self._thread.is_alive()

    # ------------------------------------------------------------ scheduler

    def wait_ready(self, timeout: float = 30.0) -> None:
        """See `EngineClient.wait_ready`."""
        if self._engine is None:
            self._engine = EngineClient(self._open(), handover=self._handover)
        self._engine.wait_ready(timeout)

    def offer(
        self, request_id: str, block_ids: BlockIds, num_tokens: int, event: Any = None
    ) -> dict[str, Any]:
        """See `EngineClient.offer`."""
        return self._scheduler().offer(request_id, block_ids, num_tokens, event)

    def fetch(
        self,
        request_id: str,
        ticket: Mapping[str, Any],
        block_ids: BlockIds,
        start_token: int = 0,
    ) -> None:
        """See `EngineClient.fetch`."""
        self._scheduler().fetch(request_id, ticket, block_ids, start_token)

    def hold(self, ticket: Mapping[str, Any]) -> None:
        """See `EngineClient.hold`."""
        self._scheduler().hold(ticket)

    def release(self, ticket: Mapping[str, Any]) -> None:
        """See `EngineClient.release`."""
        self._scheduler().release(ticket)

    def cancel(self, request_id: str) -> None:
        """See `EngineClient.cancel`."""
        self._scheduler().cancel(request_id)

    def step(self) -> KVConnectorOutput:
        """See `EngineClient.step`."""
        return self._scheduler().step()

    def wait(self, timeout: float) -> bool:
        """See `EngineClient.wait`."""
        return self._scheduler().wait(timeout)

    def drain(self, timeout: float = 30.0) -> tuple[str, ...]:
        """See `EngineClient.drain`."""
        return self._scheduler().drain(timeout)

    def quiesce(self, timeout: float = 30.0) -> tuple[str, ...]:
        """See `EngineClient.quiesce`."""
        return self._scheduler().quiesce(timeout)

    def resume(self) -> None:
        """See `EngineClient.resume`."""
        self._scheduler().resume()

    def drop_peer(self, engine_id: str) -> None:
        """See `EngineClient.drop_peer`."""
        self._scheduler().drop_peer(engine_id)

    def close(self) -> None:
        """Stops the agent. Reads in flight are ended first; the tensors may go afterwards."""
        if self._engine is not None:
            self._engine.close()
        self._worker.close()
        if self._thread.is_alive() and self._loop is not None and self._stop is not None:
            self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()

    # ------------------------------------------------------------ inside

    def _scheduler(self) -> EngineClient:
        if self._engine is None:
            raise AgentError("not ready yet: call wait_ready() first")
        return self._engine

    @property
    def _handover(self) -> Handover:
        assert self._agent is not None
        return self._agent.handover

    def _open(self) -> sockets.socket:
        ours, theirs = sockets.socketpair()
        assert self._loop is not None
        assert self._agent is not None
        self._loop.call_soon_threadsafe(self._agent.adopt, theirs)
        return ours

    def _run(self) -> None:
        loop = uvloop.new_event_loop()
        try:
            loop.run_until_complete(self._serve())
        except BaseException as error:
            self._failure = error
        finally:
            self._started.set()
            loop.run_until_complete(loop.shutdown_default_executor())
            loop.close()

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._stop = asyncio.Event()
        self._agent = Agent(self._config, self._make_fabric, self._cuda)
        try:
            await self._agent.start()
            self._started.set()
            await self._stop.wait()
        finally:
            await self._agent.stop()
