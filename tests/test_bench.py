"""The benchmark with real sidecars and raw ranks, small: every byte that a fetch brings is
compared in it, so a workload that runs is one that is right."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from kvagent.bench.calls import measure_calls, measure_many, measure_small
from kvagent.bench.engines import page_kind
from kvagent.bench.idle import measure_idle
from kvagent.bench.measure import Bench, LocalFar
from kvagent.bench.prepared import measure_preparing
from kvagent.bench.shapes import Fragmentation, Shape, Workload
from kvagent.bench.world import Transport, World
from kvagent.errors import KVAgentError
from kvagent.memory.host import HostMemory


@pytest.mark.timeout(600)
def test_workloads_and_ceilings() -> None:
    windows = Shape(layers=4, kv_heads=4, head_size=16, window=32, full_every=2)
    workload = Workload(
        name="w",
        shape=windows,
        tokens=96,
        producer_tp=1,
        consumer_tp=2,
        fragmentation=Fragmentation.half,
        concurrency=2,
    )
    with World(Transport.shm) as world:
        bench = Bench(world, LocalFar(world), rounds=1)
        steps: list[str] = []
        ways = ["memcpy", "cma", "nixl", "nixl_ordinary", "tcp"]
        result = bench.run(workload, ways, steps.append)
        assert len(steps) == bench.steps(ways)
        assert list(result.seconds) == ["kvagent", *ways]
        assert all(len(times) == 1 and times[0] > 0 for times in result.seconds.values())
        per_token = 2 * 4 * 16 * 2
        assert result.nbytes == 2 * (2 * 96 + 2 * 32) * per_token
        phases = result.phases
        parts = phases.prepare + phases.post + phases.wire + phases.completion
        assert parts == pytest.approx(phases.total)
        assert result.pages in ("huge", "transparent", "ordinary")

        # The same world again: other engines in the same sidecars and raw ranks.
        latent = Workload(name="mla", shape=Shape(layers=2, latent=24), tokens=32, consumer_tp=2)
        again = bench.run(latent, ["nixl", "tcp"])
        assert again.nbytes == 2 * 2 * 32 * 24 * 2

        many = measure_many(bench, 4, blocks=2)
        assert many.rate > 0
        assert many.wait >= 1
        small = measure_small(bench, 3)
        assert 0 < small.p50 <= small.p99
        calls = measure_calls(bench, 0.05, large=64)
        assert min(calls.step, calls.offer, calls.fetch) > 0
        idle = measure_idle(bench, 0.1)
        assert idle.cpu >= 0
        assert 10 < idle.rss < 2000


def test_preparing_does_not_depend_on_the_size_of_the_cache() -> None:
    found = measure_preparing(layers=4, blocks=5000, fetched=64)
    assert (found.layers, found.blocks, found.fetched) == (4, 5000, 64)
    assert 0 < found.peer_bytes < 1 << 20
    assert min(found.peer_ms, found.select_ms, found.make_ms, found.ratio) > 0


def test_a_helper_that_ends_is_named_with_its_last_words() -> None:
    with World(Transport.shm) as world:
        code = "import sys; sys.exit('no luck')"
        with pytest.raises(KVAgentError, match="no luck"):
            world.helper("producer", [sys.executable, "-c", code])


def test_the_kind_of_pages_is_found() -> None:
    memory = HostMemory(4 << 20)
    assert page_kind(memory.address) == memory.pages
    memory.close()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_whole_command(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    command = [sys.executable, "-m", "kvagent", "bench", "--targets", "--quick", "--json", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=800, check=False)
    assert done.returncode in (0, 1), done.stderr  # tiny ones miss targets
    found = json.loads(out.read_text())
    assert {point["number"] for point in found["targets"]} == set(range(1, 10))
    assert len(done.stdout.splitlines()) > 30


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_tcp_with_a_peer_in_another_process(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "kvagent", "bench", "--transport", "tcp"]
    port = "127.0.0.1:27341"
    serving = subprocess.Popen([*command, "--serve", port])
    try:
        out = tmp_path / "out.json"
        small = ["--model", "smollm2-135m", "--size", "4", "--rounds", "1", "--json", str(out)]
        for _ in range(60):
            done = subprocess.run(
                [*command, "--peer", f"http://{port}", *small],
                capture_output=True,
                text=True,
                timeout=300,
                check=False,
            )
            if "refused" not in done.stderr:
                break
        assert done.returncode == 0, done.stderr
        (result,) = json.loads(out.read_text())["results"]
        assert result["gbps"].keys() == {"kvagent", "nixl", "nixl_plain", "nixl_default", "tcp"}
    finally:
        serving.terminate()
        serving.wait(60)
