"""What sidecars cost that have nothing to do: processor time, and memory without a cache."""

from __future__ import annotations

import os
import time

import msgspec

from kvagent.bench.calls import BLOCK_64K
from kvagent.bench.engines import Consumer
from kvagent.bench.measure import Bench
from kvagent.bench.shapes import Request, Workload

__all__ = ["Idle", "measure_idle"]


class Idle(msgspec.Struct, frozen=True):
    """`cpu`: percent of a core, of the worst of the sidecars. `rss`: MiB, of one without cache."""

    cpu: float
    rss: float


def measure_idle(bench: Bench, seconds: float) -> Idle:
    """A sidecar that nobody joined, and two that have read from one another."""
    empty = bench.world.sidecars("consumer", 2)[1]  # the second: no engine here has two ranks
    workload = Workload(name="idle", shape=BLOCK_64K, tokens=16)
    bench.far.setup(workload)
    try:
        with Consumer(bench.world, workload) as consumer:
            (name,) = bench.names(1)
            requests = {name: Request([0], [0], 16)}
            consumer.fetch(requests, bench.far.offer(requests))
            bench.far.settle([name])
            producer = bench.far.here
            pids = [empty.pid, *consumer.pids, *(producer.pids if producer else [])]
            time.sleep(1.0)  # the end of the transfer is over
            before, begin = [_cpu_seconds(pid) for pid in pids], time.monotonic()
            time.sleep(seconds)
            spent = [_cpu_seconds(pid) - old for pid, old in zip(pids, before, strict=True)]
            return Idle(100 * max(spent) / (time.monotonic() - begin), _rss_mib(empty.pid))
    finally:
        bench.far.close()


def _cpu_seconds(pid: int) -> float:
    with open(f"/proc/{pid}/stat") as file:
        fields = file.read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _rss_mib(pid: int) -> float:
    with open(f"/proc/{pid}/status") as lines:
        return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("VmRSS:"))
