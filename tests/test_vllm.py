"""What of the vLLM connector needs no vLLM: its options, and its link to a sidecar that dies.

The connector itself is tested with real servers, in test_vllm_e2e.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import kvagent.vllm
from kvagent import (
    EmbeddedAgent,
    EngineClient,
    FullAttentionSpec,
    ModelInfo,
    WorkerClient,
    WorkerInfo,
)
from kvagent.core.output import KVConnectorOutput
from kvagent.errors import AgentError, ConfigError
from kvagent.fabric.loopback import LoopbackFabric, LoopbackNetwork
from kvagent.vllm.link import Link
from kvagent.vllm.options import Options, read_options
from tests.harness import START_SECONDS, Engine, Sidecar, start

SPEC = FullAttentionSpec(block_size=4, num_kv_heads=1, head_size=8, dtype="float32")

# ---------------------------------------------------------------- options


def options(extra: dict[str, Any], **parallel: int) -> Options:
    sizes = {
        f"{kind}_parallel_size": 1
        for kind in ("tensor", "pipeline", "data", "decode_context", "prefill_context")
    }
    return read_options(
        SimpleNamespace(
            kv_transfer_config=SimpleNamespace(kv_connector_extra_config=extra),
            parallel_config=SimpleNamespace(**{**sizes, **parallel}),
        )
    )


def test_the_socket_of_each_rank() -> None:
    read = options(
        {"socket": "/run/{dp}/{rank}.sock"}, tensor_parallel_size=2, data_parallel_size=2
    )
    assert read.socket_of("engine", 1, 0) == "/run/0/1.sock"


def test_an_embedded_agent_has_a_socket_of_its_own() -> None:
    read = options({"embedded": True, "settings": {"lease_seconds": 5}}, tensor_parallel_size=2)
    paths = {read.socket_of(engine, rank, 0) for engine in "ab" for rank in (0, 1)}
    assert len(paths) == 4


@pytest.mark.parametrize(
    ("extra", "parallel", "word"),
    [
        ({}, {}, "give"),
        ({"sockets": "/run/a.sock"}, {}, "it takes socket"),
        ({"socket": "/run/a.sock", "embedded": "perhaps"}, {}, "embedded"),
        ({"socket": "/run/a.sock"}, {"tensor_parallel_size": 2}, "{rank}"),
        ({"socket": "/run/a.sock"}, {"pipeline_parallel_size": 2}, "{rank}"),
        ({"socket": "/run/{rank}.sock"}, {"data_parallel_size": 2}, "{dp}"),
        ({"socket": "/run/{rank}{host}.sock"}, {}, "braces"),
        ({"socket": "/run/a.sock", "settings": {"bind": "127.0.0.1:0"}}, {}, "kvagent serve"),
        ({"socket": "/run/a.sock"}, {"decode_context_parallel_size": 2}, "decode_context"),
    ],
)
def test_options_that_are_refused(
    extra: dict[str, Any], parallel: dict[str, int], word: str
) -> None:
    with pytest.raises(ConfigError, match=word):
        options(extra, **parallel)


# ---------------------------------------------------------------- releases


@pytest.mark.parametrize("release", ["0.31.2", "0.34.0", "1.0.0rc1"])
def test_other_releases_of_vllm_are_refused(monkeypatch: pytest.MonkeyPatch, release: str) -> None:
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(__version__=release))
    with pytest.raises(ConfigError, match=rf"this is vLLM {release}; .* 0\.32 and 0\.33"):
        _ = kvagent.vllm.KVAgentConnector


# ---------------------------------------------------------------- a sidecar that dies


def until(link: Link, done: Callable[[KVConnectorOutput], object]) -> KVConnectorOutput:
    end = time.monotonic() + START_SECONDS
    while time.monotonic() < end:
        out = link.step()
        if done(out):
            return out
        time.sleep(0.01)
    raise AssertionError("not seen")


def joined(sidecar: Sidecar) -> WorkerClient:
    """A worker; the engine's scheduler is the test's `Link`."""
    worker = WorkerClient(sidecar.socket, timeout=START_SECONDS)
    worker.join(WorkerInfo(engine_id="a", model=ModelInfo(name="m", num_layers=1)))
    worker.allocate_kv_caches({"layer": SPEC}, num_blocks=8)
    return worker


def test_a_link_survives_its_sidecar(tmp_path: Path) -> None:
    (sidecar,) = start(tmp_path, ["a"])
    worker = joined(sidecar)
    link = Link(sidecar.socket, START_SECONDS)
    ticket = link.offer("sent", [1, 2], 8)
    link.fetch("received", {**ticket, "remote_engine_id": "b", "remote_port": 1}, [3, 4], 0)
    assert link.fetching("received")
    sidecar.kill()
    assert worker.wait_lost(START_SECONDS)
    seen = KVConnectorOutput(finished_sending=set(), finished_recving=set())

    def both(out: KVConnectorOutput) -> bool:
        assert seen.finished_sending is not None
        assert seen.finished_recving is not None
        seen.finished_sending |= out.finished_sending or set()
        seen.finished_recving |= out.finished_recving or set()
        seen.failed_recving |= out.failed_recving
        return bool(seen.finished_sending and seen.finished_recving)

    until(link, both)
    assert seen.failed_recving.keys() == {"received"}
    assert not link.fetching("received")
    with pytest.raises(AgentError):
        link.offer("too soon", [1], 4)

    (again,) = start(tmp_path, ["a"])
    worker.close()
    worker = joined(again)
    end = time.monotonic() + START_SECONDS
    while True:
        try:
            link.offer("later", [1], 4)
            break
        except AgentError:
            assert time.monotonic() < end
            time.sleep(0.05)
    link.cancel("later")
    out = until(link, lambda out: out.finished_sending)
    assert out.finished_sending == {"later"}  # and not what ended before
    link.close()
    worker.close()
    again.close()


def test_nothing_is_lost_while_the_sidecar_lives(tmp_path: Path) -> None:
    (sidecar,) = start(tmp_path, ["a"])
    with Engine([sidecar], "a") as engine:
        assert not engine.workers[0].wait_lost(0.05)
        assert not engine.client.wait_lost(0.05)
        sidecar.kill()
        assert engine.workers[0].wait_lost(START_SECONDS)
        assert engine.client.wait_lost(START_SECONDS)


def test_the_scheduler_of_an_embedded_agent_may_be_elsewhere(tmp_path: Path) -> None:
    path = str(tmp_path / "embedded.sock")
    network = LoopbackNetwork()
    agent = EmbeddedAgent(socket=path, make_fabric=lambda name, _: LoopbackFabric(network, name))
    agent.join(WorkerInfo(engine_id="e", model=ModelInfo(name="m", num_layers=1)))
    agent.register_kv_caches({"layer": torch.zeros(2, 8, 4, 1, 8)}, {"layer": SPEC})
    client = EngineClient(path)
    client.wait_ready(START_SECONDS)
    assert client.offer("r", [1, 2], 8)["remote_engine_id"] == "e"
    client.close()
    agent.close()
