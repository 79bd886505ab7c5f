"""The worker's half: gives its cache to the sidecar at start-up, and again when that was restarted.

A worker does no transfer work at all. In a step it hands back what the scheduler's half wrote into
the step's metadata; see `metadata`.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Mapping
from typing import Any

import torch
from vllm.distributed.parallel_state import (
    get_pp_group,
    get_tensor_model_parallel_rank,
    get_world_group,
)
from vllm.v1.kv_cache_interface import KVCacheConfig

from kvagent.client.embedded import EmbeddedAgent
from kvagent.client.worker import WorkerClient
from kvagent.core.specs import CacheSpec, WorkerInfo
from kvagent.errors import AgentError, GeometryError, KVAgentError
from kvagent.vllm.geometry import describe, fingerprint
from kvagent.vllm.options import Options

log = logging.getLogger("vllm.kvagent")  # vLLM shows the log of what is below its own name

RETRY_SECONDS = 1.0


class WorkerSide:
    """One per worker process; `register` is called by all ranks at once."""

    def __init__(self, vllm_config: Any, kv_cache_config: KVCacheConfig, options: Options) -> None:
        self._vllm_config = vllm_config
        self._kv_cache_config = kv_cache_config
        self._options = options
        self._agent: EmbeddedAgent | None = None
        self._client: WorkerClient | None = None
        self._closing = False

    def register(self, kv_caches: Mapping[str, torch.Tensor]) -> None:
        """Joins this rank's sidecar and lets it map the cache. Raises on all ranks when rank 0
        fails."""
        world = get_world_group()
        rank = world.rank_in_group
        leader: str | AgentError | None = None
        if rank == 0:
            try:
                leader = self._join_and_register(kv_caches, rank, None)
            except KVAgentError as error:
                if world.world_size > 1:
                    world.broadcast_object(AgentError(f"rank 0: {error}"), src=0)
                raise
        if world.world_size > 1:
            leader = world.broadcast_object(leader, src=0)
        if isinstance(leader, AgentError):
            raise leader
        if rank:
            self._join_and_register(kv_caches, rank, leader)

    def close(self) -> None:
        self._closing = True
        if self._client is not None:
            self._client.close()
        if self._agent is not None:
            self._agent.close()

    def _join_and_register(
        self, kv_caches: Mapping[str, torch.Tensor], rank: int, leader: str | None
    ) -> str:
        parallel = self._vllm_config.parallel_config
        info = WorkerInfo(
            engine_id=self._vllm_config.kv_transfer_config.engine_id,
            model=fingerprint(self._vllm_config, self._kv_cache_config),
            tp_rank=get_tensor_model_parallel_rank(),
            tp_size=parallel.tensor_parallel_size,
            pp_rank=get_pp_group().rank_in_group,
            pp_size=parallel.pipeline_parallel_size,
            leader=leader,
        )
        path = self._options.socket_of(info.engine_id, rank, parallel.data_parallel_index)
        tensors, specs = describe(self._vllm_config, self._kv_cache_config, kv_caches, info)
        if self._options.embedded:
            agent = self._agent = EmbeddedAgent(socket=path, **self._options.settings)
            agent.join(info)
            agent.register_kv_caches(tensors, specs)
            log.info("kvagent runs in this worker: %s, scheduler's socket %s", agent.endpoint, path)
            return agent.endpoint
        for tensor in tensors.values():
            _share(tensor)
        client = self._client = _connect(path, info, tensors, specs)
        threading.Thread(
            target=self._keep, args=(path, info, tensors, specs), name="kvagent-keep", daemon=True
        ).start()
        log.info("joined the sidecar at %s, whose endpoint is %s", path, client.endpoint)
        return client.endpoint

    def _keep(
        self,
        path: str,
        info: WorkerInfo,
        tensors: dict[str, torch.Tensor],
        specs: dict[str, CacheSpec],
    ) -> None:
        """Joins again whenever the sidecar was lost. The cache is ours and its bytes stay."""
        while not self._closing:
            assert self._client is not None
            self._client.wait_lost()
            if self._closing:
                return
            self._client.close()
            log.error("the sidecar at %s is gone: no KV transfers until it is back", path)
            while not self._closing:
                try:
                    self._client = _connect(path, info, tensors, specs)
                except KVAgentError as error:
                    log.debug("the sidecar at %s: %s", path, error)
                    time.sleep(RETRY_SECONDS)
                else:
                    log.info("the sidecar at %s is back", path)
                    break


def _connect(
    path: str,
    info: WorkerInfo,
    tensors: dict[str, torch.Tensor],
    specs: dict[str, CacheSpec],
) -> WorkerClient:
    client = WorkerClient(path)
    try:
        client.join(info)
        client.register_kv_caches(tensors, specs)
    except BaseException:
        client.close()
        raise
    return client


def _share(tensor: torch.Tensor) -> None:
    """Moves the tensor's storage into shared memory. All views of it, which vLLM's layers have,
    see the new place."""
    if tensor.device.type != "cpu":
        raise GeometryError(
            f"the KV cache is on {tensor.device}, where a sidecar cannot map it: set "
            '"embedded": true in kv_connector_extra_config'
        )
    storage = tensor.untyped_storage()
    if storage.is_shared():
        return
    shm = os.statvfs("/dev/shm")
    if storage.nbytes() > shm.f_bavail * shm.f_frsize:
        raise GeometryError(
            f"the KV cache has {storage.nbytes() >> 20} MiB, /dev/shm has room for "
            f"{shm.f_bavail * shm.f_frsize >> 20}: make it larger (docker run --shm-size, or "
            "--ipc=host), or the cache smaller"
        )
    storage.share_memory_()
