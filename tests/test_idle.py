"""A sidecar with nothing to do: next to no CPU, and little memory before it has a cache."""

from __future__ import annotations

import time
from pathlib import Path

import psutil

from tests.harness import Engine, random_fill, start

SECONDS = 3.0
MIB = 2**20


def busy(process: psutil.Process) -> float:
    """Seconds of CPU time so far."""
    times = process.cpu_times()
    return float(times.user + times.system)


def test_idle_sidecars(tmp_path: Path) -> None:
    """Two ranks and a peer, which have met and read from each other, at rest."""
    sidecars = start(tmp_path, ["prefill", "decode-0", "decode-1"])
    try:
        processes = [psutil.Process(sidecar.process.pid) for sidecar in sidecars]
        for process in processes:
            assert process.memory_info().rss < 350 * MIB
        with (
            Engine(sidecars[:1], "prefill", fill=random_fill(1)) as producer,
            Engine(sidecars[1:], "decode") as consumer,
        ):
            ticket = producer.client.offer("r", [1, 2, 3], 12)
            consumer.client.fetch("r", ticket, [4, 5, 6])
            assert consumer.received("r") is None
            producer.sent("r")
            time.sleep(0.5)
            before = [busy(process) for process in processes]
            began = time.monotonic()
            time.sleep(SECONDS)
            passed = time.monotonic() - began
            used = [busy(p) - b for p, b in zip(processes, before, strict=True)]
        # cpu_times has ticks of 10 ms: 2 % of three seconds are six of them.
        assert max(used) / passed < 0.02, [f"{100 * u / passed:.1f} %" for u in used]
    finally:
        for sidecar in sidecars:
            sidecar.close()
