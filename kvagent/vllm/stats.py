"""Transfers in vLLM's own log line ("KV Transfer metrics: ...") and among its Prometheus metrics.

Counted where a transfer ends: at the decode side's scheduler. The sidecars have metrics of their
own, for both sides.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)
from vllm.v1.metrics.utils import create_metric_per_engine

SERIES = ("seconds", "bytes", "descriptors", "wait", "wire", "validate")
"""Of each good fetch; the names are those of kvagent's `FetchStats`."""
MIB = 1 << 20


@dataclass
class KVAgentStats(KVConnectorStats):
    """`data` is plain lists and numbers: it travels between vLLM's processes."""

    def __post_init__(self) -> None:
        if not self.data:
            self.reset()

    def reset(self) -> None:
        self.data: dict[str, Any] = {name: [] for name in SERIES}
        self.data |= {"not_needed": 0, "failures": {}}

    def fetched(self, fetch: dict[str, Any]) -> None:
        for name in SERIES:
            self.data[name].append(fetch[name])

    def failed(self, cause: str, count: int = 1) -> None:
        failures = self.data["failures"]
        failures[cause] = failures.get(cause, 0) + count

    def add(self, name: str, count: int) -> None:
        self.data[name] += count

    def is_empty(self) -> bool:
        return not any(self.data.values())

    def aggregate(self, other: KVConnectorStats) -> KVAgentStats:
        for name in SERIES:
            self.data[name] += other.data[name]
        self.add("not_needed", other.data["not_needed"])
        for cause, count in other.data["failures"].items():
            self.failed(cause, count)
        return self

    def reduce(self) -> dict[str, int | float | str]:
        seconds, sizes = self.data["seconds"], self.data["bytes"]
        line: dict[str, int | float | str] = {"Num successful transfers": len(seconds)}
        if seconds:
            line |= {
                "Avg xfer time (ms)": round(1e3 * statistics.mean(seconds), 3),
                "Max xfer time (ms)": round(1e3 * max(seconds), 3),
                "Avg wire time (ms)": round(1e3 * statistics.mean(self.data["wire"]), 3),
                "Avg MB per transfer": round(statistics.mean(sizes) / MIB, 3),
                "Throughput (MB/s)": round(sum(sizes) / MIB / sum(seconds), 3),
                "Avg number of descriptors": round(statistics.mean(self.data["descriptors"]), 1),
            }
        failures = self.data["failures"]
        causes = " ".join(f"{cause}:{count}" for cause, count in sorted(failures.items()))
        return line | {
            "Num tickets not needed": self.data["not_needed"],
            "Num failed transfers": sum(failures.values()),
            **({"Causes": causes} if causes else {}),
        }


class KVAgentPromMetrics(KVConnectorPromMetrics):
    """`vllm:kvagent_*`."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: dict[type, type],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        powers = [4.0**i for i in range(11)]

        def histogram(name: str, documentation: str, buckets: list[float]) -> Any:
            metric = self._histogram_cls(
                name=f"vllm:kvagent_{name}",
                documentation=documentation,
                buckets=buckets,
                labelnames=labelnames,
            )
            return create_metric_per_engine(metric, per_engine_labelvalues)

        times = [0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 60]
        self._histograms = {
            "seconds": histogram(
                "fetch_seconds", "From the scheduler's call to the verdict", times
            ),
            "wire": histogram("fetch_wire_seconds", "From the first read to the last byte", times),
            "bytes": histogram("fetch_bytes", "Bytes of each fetch", [1024 * x for x in powers]),
            "descriptors": histogram("fetch_descriptors", "NIXL descriptors of each fetch", powers),
        }
        not_needed = self._counter_cls(
            name="vllm:kvagent_tickets_not_needed",
            documentation="Tickets that were released unread, the prompt being cached here",
            labelnames=labelnames,
        )
        self._not_needed = create_metric_per_engine(not_needed, per_engine_labelvalues)
        self._failures = self._counter_cls(
            name="vllm:kvagent_failed_transfers",
            documentation="Fetches and offers that came to nothing, by cause",
            labelnames=[*labelnames, "cause"],
        )

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        for name, metrics in self._histograms.items():
            for value in transfer_stats_data[name]:
                metrics[engine_idx].observe(value)
        self._not_needed[engine_idx].inc(transfer_stats_data["not_needed"])
        labels = self.per_engine_labelvalues[engine_idx]
        for cause, count in transfer_stats_data["failures"].items():
            self._failures.labels(*labels, cause).inc(count)
