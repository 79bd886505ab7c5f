"""vLLM's NixlConnector and ours, timed alike: what each costs a step of the engine.

vLLM loads the classes in its own processes (`kv_connector_module_path`). Every step is one line of
the file that KVAGENT_STEP_LOG names, followed by `.worker` or `.scheduler`: microseconds spent in
the connector's calls, by the clock and by the calling thread's processor time, which does not
count when others had the core. The writing is not timed.
"""

from __future__ import annotations

import importlib
import os
import time
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.nixl import NixlConnector

from kvagent.vllm import KVAgentConnector


class _Timed:
    """Mixed into a connector class, before it."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)  # type: ignore[call-arg]
        self._clock = self._cpu = 0
        self._steps = open(  # noqa: SIM115  (as long as the process lives)
            os.environ["KVAGENT_STEP_LOG"]
            + (".worker" if role == KVConnectorRole.WORKER else ".scheduler"),
            "w",
        )

    def start_load_kv(self, *args: Any, **kwargs: Any) -> None:
        self._timed("start_load_kv", *args, **kwargs)

    def get_transfer_results(self, *args: Any) -> Any:
        result = self._timed("get_transfer_results", *args)
        self._end_step()
        return result

    def get_num_new_matched_tokens(self, *args: Any) -> Any:
        return self._timed("get_num_new_matched_tokens", *args)

    def update_state_after_alloc(self, *args: Any) -> Any:
        return self._timed("update_state_after_alloc", *args)

    def update_connector_output(self, *args: Any) -> None:
        self._timed("update_connector_output", *args)

    def build_connector_meta(self, *args: Any) -> Any:
        result = self._timed("build_connector_meta", *args)
        self._end_step()
        return result

    def _timed(self, name: str, *args: Any, **kwargs: Any) -> Any:
        clock, cpu = time.perf_counter_ns(), time.thread_time_ns()
        result = getattr(super(), name)(*args, **kwargs)
        self._cpu += time.thread_time_ns() - cpu
        self._clock += time.perf_counter_ns() - clock
        return result

    def _end_step(self) -> None:
        self._steps.write(f"{self._clock / 1000:.1f} {self._cpu / 1000:.1f}\n")
        self._steps.flush()
        self._clock = self._cpu = 0


class TimedStockNixlConnector(_Timed, NixlConnector):
    """vLLM's own."""


class TimedNixlConnector(TimedStockNixlConnector):
    """vLLM's own, helped where it is at a loss on a machine with few cores.

    Its worker moves the main thread, which computes, to the last core of the machine, whatever
    VLLM_CPU_OMP_THREADS_BIND says: here two servers would share one core. NIXL's progress thread
    spins, on a lock that the main thread needs as well, which then waits for seconds now and then;
    there is a field for how long it sleeps, which NIXL's Python interface zeroes. And vLLM's cache
    is memory that was never touched, into which the first copy takes several times as long.
    """

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        cores = os.sched_getaffinity(0)
        threads = set(os.listdir("/proc/self/task"))
        bindings = importlib.import_module("nixl._api").nixlBind
        original = bindings.nixlAgentConfig

        class Sleeping(original):  # type: ignore[misc]
            def __setattr__(self, name: str, value: Any) -> None:
                super().__setattr__(name, 1000 if name == "pthrDelay" else value)

        bindings.nixlAgentConfig = Sleeping
        try:
            super().__init__(vllm_config, role, kv_cache_config)
        finally:
            bindings.nixlAgentConfig = original
            if role == KVConnectorRole.WORKER:
                os.sched_setaffinity(0, cores)
                for thread in set(os.listdir("/proc/self/task")) - threads:
                    os.sched_setaffinity(int(thread), range(os.cpu_count() or 1))

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        for cache in kv_caches.values():
            cache.zero_()
        super().register_kv_caches(kv_caches)


class TimedKVAgentConnector(_Timed, KVAgentConnector):
    """Ours."""
