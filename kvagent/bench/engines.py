"""The two engines that the benchmark plays: workers that join sidecars, and their scheduler.

No model runs. The producer's caches are filled with numbers that differ everywhere, so that what
arrives can be checked.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from kvagent import EngineClient, ModelInfo, WorkerClient, WorkerInfo
from kvagent.bench.shapes import Request, Workload
from kvagent.bench.world import START_SECONDS, Side, World
from kvagent.core.output import KVConnectorOutput
from kvagent.core.specs import rank_heads
from kvagent.errors import KVAgentError

__all__ = ["Consumer", "Engine", "Producer", "Ticket", "same_bytes"]

Ticket = dict[str, Any]
FETCH_SECONDS = 120.0
NAP_SECONDS = 50e-6


class Engine:
    """One side's engine for one workload. `caches[rank][layer]` are its tensors."""

    def __init__(self, world: World, side: Side, workload: Workload, tp: int) -> None:
        sidecars = world.sidecars(side, tp)
        specs = workload.shape.specs(workload.block_size)
        self.pids = [sidecar.pid for sidecar in sidecars]
        self.caches: list[dict[str, torch.Tensor]] = []
        self.workers: list[WorkerClient] = []
        leader = None
        for rank, sidecar in enumerate(sidecars):
            worker = WorkerClient(sidecar.socket, timeout=START_SECONDS)
            self.workers.append(worker)
            worker.join(
                WorkerInfo(
                    engine_id=f"bench-{side}",
                    tp_rank=rank,
                    tp_size=tp,
                    leader=leader,
                    model=ModelInfo(name=workload.name, num_layers=workload.shape.layers),
                )
            )
            leader = leader or worker.endpoint
            self.caches.append(worker.allocate_kv_caches(specs, num_blocks=workload.num_blocks))
        self.client = EngineClient(sidecars[0].socket)
        self.client.wait_ready(START_SECONDS)

    @property
    def pages(self) -> str:
        """What the caches lie on: "huge", "transparent" or "ordinary"."""
        return page_kind(next(iter(self.caches[0].values())).data_ptr())

    def close(self) -> None:
        self.client.close()
        self.caches.clear()
        for worker in self.workers:
            worker.close()

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Producer(Engine):
    def __init__(self, world: World, workload: Workload) -> None:
        super().__init__(world, "producer", workload, workload.producer_tp)
        self._workload = workload
        self._sent: set[str] = set()
        number = 0
        for caches in self.caches:
            for tensor in caches.values():
                flat = tensor.view(torch.int16) if tensor.element_size() == 2 else tensor
                flat = flat.view(-1)
                # Neighbours differ, and so do places far apart: the period is a prime (and no NaN).
                flat.copy_(torch.arange(number, number + flat.numel()) % 31741)
                number += flat.numel()

    def offer(self, requests: Mapping[str, Request]) -> list[Ticket]:
        return [
            self.client.offer(name, self._workload.block_ids(request.remote), request.tokens)
            for name, request in requests.items()
        ]

    def settle(self, names: Sequence[str]) -> None:
        """Until these offers have ended."""
        left, until = set(names), time.monotonic() + FETCH_SECONDS
        left -= self._sent
        while left:
            done = self.client.step().finished_sending or set()
            self._sent |= done
            left -= done
            if left and not self.client.wait(until - time.monotonic()):
                raise KVAgentError(f"{len(left)} offers did not end")
        self._sent -= set(names)


class Consumer(Engine):
    def __init__(self, world: World, workload: Workload) -> None:
        super().__init__(world, "consumer", workload, workload.consumer_tp)
        self._workload = workload

    def fetch(
        self, requests: Mapping[str, Request], tickets: Sequence[Ticket]
    ) -> tuple[float, dict[str, float], dict[str, Any]]:
        """All of them at once: seconds until the last is reported by `step()`, seconds until each
        is, and the statistics that came with them."""
        left, ends, stats = set(requests), dict[str, float](), dict[str, Any]()
        step, clock = self.client.step, time.perf_counter
        calls = [
            (name, ticket, self._workload.block_ids(request.local))
            for (name, request), ticket in zip(requests.items(), tickets, strict=True)
        ]
        begin = clock()
        for call in calls:
            self.client.fetch(*call)
        while left:
            out = step()
            if out.finished_recving:
                now = clock() - begin
                ends.update(dict.fromkeys(out.finished_recving, now))
                left -= out.finished_recving
                stats.update(_stats(out))
            elif not self.client.wait(FETCH_SECONDS):
                raise KVAgentError(f"{len(left)} fetches did not end")
        return max(ends.values()), ends, stats


def _stats(out: KVConnectorOutput) -> dict[str, Any]:
    if out.failed_recving:
        raise KVAgentError(f"a fetch failed: {next(iter(out.failed_recving.values()))}")
    fetches: dict[str, Any] = out.kv_connector_stats["fetches"]
    return fetches


def same_bytes(
    workload: Workload, producer: Producer, consumer: Consumer, request: Request
) -> bool:
    """Whether what a fetch was to move is the same on both sides, by plain indexing."""
    for rank, caches in enumerate(consumer.caches):
        for layer, cache in caches.items():
            number = int(layer.rpartition(".")[2])
            window = 0 if workload.shape.full(number) else workload.shape.window
            reach = -(-window // workload.block_size) if window else workload.blocks
            local, remote = request.local[-reach:], request.remote[-reach:]
            if workload.shape.latent:
                if not torch.equal(cache[local], producer.caches[0][layer][remote]):
                    return False
                continue
            first, last = rank_heads(rank, workload.consumer_tp, workload.shape.kv_heads)
            for head in range(first, last):
                there, place = _holder(workload, head)
                want = producer.caches[there][layer][:, remote, place]
                if not torch.equal(cache[:, local, head - first], want):
                    return False
    return True


def _holder(workload: Workload, head: int) -> tuple[int, int]:
    """The first producer rank that holds a head, and the head's place there."""
    for rank in range(workload.producer_tp):
        first, last = rank_heads(rank, workload.producer_tp, workload.shape.kv_heads)
        if first <= head < last:
            return rank, head - first
    raise AssertionError(f"no rank holds head {head}")


def page_kind(address: int) -> str:
    """What the kernel mapped at an address: "huge", "transparent" or "ordinary"."""
    inside, kind = False, "ordinary"
    with open("/proc/self/smaps") as lines:
        for line in lines:
            name, _, rest = line.partition(" ")
            if "-" in name and not name.endswith(":"):
                begin, _, end = name.partition("-")
                inside = int(begin, 16) <= address < int(end, 16)
            elif inside and name == "KernelPageSize:" and int(rest.split()[0]) > 4:
                kind = "huge"
            elif inside and name in ("ShmemPmdMapped:", "AnonHugePages:"):
                kind = "transparent" if int(rest.split()[0]) else kind
    return kind
