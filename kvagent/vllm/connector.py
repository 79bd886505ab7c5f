"""The class that vLLM makes twice: in its scheduler, and in each of its workers.

It only hands calls on, to `SchedulerSide` or `WorkerSide`. What those do not need, such as hooks
for each layer, is empty.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorRole,
    KVConnectorTransferResults,
)
from vllm.v1.metrics.cache_hit_source import CacheHitSource
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request

from kvagent.vllm.geometry import block_size
from kvagent.vllm.link import Link
from kvagent.vllm.metadata import Ended
from kvagent.vllm.options import read_options
from kvagent.vllm.scheduler import SchedulerSide
from kvagent.vllm.stats import KVAgentPromMetrics, KVAgentStats
from kvagent.vllm.worker import WorkerSide


class KVAgentConnector(KVConnectorBase_V1):
    """See `kvagent.vllm`, and README.md for the options."""

    _cache_hit_source = CacheHitSource.P2P

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        options = read_options(vllm_config)
        self._scheduler: SchedulerSide | None = None
        self._worker: WorkerSide | None = None
        if role == KVConnectorRole.WORKER:
            self._worker = WorkerSide(vllm_config, kv_cache_config, options)
            return
        transfer = vllm_config.kv_transfer_config
        dp = vllm_config.parallel_config.data_parallel_index
        self._scheduler = SchedulerSide(
            Link(options.socket_of(transfer.engine_id, 0, dp), options.ready_timeout),
            block_size(kv_cache_config),
            produces=transfer.is_kv_producer,
            consumes=transfer.is_kv_consumer,
        )

    # ------------------------------------------------------------ scheduler

    def on_new_request(self, request: Request) -> None:
        assert self._scheduler is not None
        self._scheduler.new_request(request)

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        assert self._scheduler is not None
        count = self._scheduler.matched_tokens(request, num_computed_tokens)
        return count, count > 0

    def update_state_after_alloc(
        self, request: Request, blocks: Any, num_external_tokens: int
    ) -> None:
        assert self._scheduler is not None
        self._scheduler.allocated(request, blocks.get_block_ids()[0], num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> Ended:
        assert self._scheduler is not None
        return self._scheduler.ended()

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """A step has ended. What else has ended by now goes into its output, and not, by way of
        the workers, into the next one's. vLLM looks for failed loads before it comes here, so
        those take the longer way."""
        assert self._scheduler is not None
        sent, received = self._scheduler.ended_well()
        if sent:
            connector_output.finished_sending = sent | (connector_output.finished_sending or set())
        if received:
            connector_output.finished_recving = received | (
                connector_output.finished_recving or set()
            )

    def request_finished(
        self, request: Request, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        assert self._scheduler is not None
        ticket = self._scheduler.finished(request, block_ids)
        return ticket is not None, ticket

    # ------------------------------------------------------------ worker

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        assert self._worker is not None
        self._worker.register(kv_caches)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        ended = self._get_connector_metadata()
        return KVConnectorTransferResults(ended.sent, ended.received, ended.failed)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Nothing: the sidecar loads."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing: a request runs when all of its layers are there."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Nothing: the cache itself is what others read."""

    def wait_for_save(self) -> None:
        """Nothing."""

    # ------------------------------------------------------------ both, and neither

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config: Any) -> bool:
        """No (vLLM 0.33 asks): a sleeping engine's cache moves, and the agent has it mapped."""
        return False

    def shutdown(self) -> None:
        for side in (self._scheduler, self._worker):
            if side is not None:
                side.close()

    def get_kv_connector_stats(self) -> KVAgentStats | None:
        return None if self._scheduler is None else self._scheduler.take_stats()

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVAgentStats:
        return KVAgentStats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: Any,
        metric_types: dict[type, type],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> KVAgentPromMetrics:
        return KVAgentPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)
