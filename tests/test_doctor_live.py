"""`kvagent doctor` and `kvagent config` as commands, on this machine, with an engine to read."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.harness import Engine, start

pytest.importorskip("nixl")
pytestmark = pytest.mark.timeout(400)


def kvagent(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "kvagent", *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, **environ},
        timeout=380,
    )


def doctor(*arguments: str, **environ: str) -> tuple[dict[str, list[dict[str, str]]], int]:
    """The findings by check, and the exit code."""
    done = kvagent("doctor", "--json", *arguments, **environ)
    report: dict[str, Any] = json.loads(done.stdout)
    assert report["worst"] == done.returncode, done.stderr
    found: dict[str, list[dict[str, str]]] = {}
    for finding in report["findings"]:
        found.setdefault(finding["check"], []).append(finding)
    return found, done.returncode


def test_an_engine_is_read_rank_by_rank(tmp_path: Path) -> None:
    sidecars = start(tmp_path, ["rank0", "rank1"])
    try:
        with Engine(sidecars, "prefill", num_blocks=512, head_size=64) as engine:
            leader = engine.workers[0].endpoint
            found, _ = doctor("--peer", leader)
            met, *ranks = found[f"peer {leader}"]
            assert "engine 'prefill', this host; the handshake works; ranks: 2" in met["found"]
            assert [rank["severity"] for rank in ranks] == ["ok", "ok"]
            for rank, worker in zip(ranks, engine.workers, strict=True):
                assert worker.endpoint in rank["found"]
                assert "canary good" in rank["found"]
                assert "by cma/memory" in rank["found"]
    finally:
        for sidecar in sidecars:
            sidecar.close()
    for check in ("python", "torch", "nixl", "ucx", "transports", "ports", "advertise"):
        assert [each["severity"] for each in found[check]] == ["ok"], found[check]
    (own,) = found["read ordinary"]
    assert "by cma/memory" in own["found"]


def test_a_broken_environment_is_an_error() -> None:
    found, code = doctor(UCX_TLS="rc", UCX_NET_DEVICES="nix0")
    assert code == 2
    assert found["ucx"][0]["severity"] == "error"
    assert "nix0" in found["ucx"][0]["found"]
    assert found["read ordinary"][0]["severity"] == "error"


def test_settings_that_cannot_be_used() -> None:
    done = kvagent("config", KVAGENT_BIND="0.0.0.0:1")
    assert (done.returncode, done.stdout) == (2, "")
    assert "bind is from KVAGENT_BIND" in done.stderr


def test_settings_as_json(tmp_path: Path) -> None:
    file = tmp_path / "kvagent.toml"
    file.write_text("lease_seconds = 5\n")
    done = kvagent("config", "--json", "--config", str(file), "--http", "127.0.0.1:1")
    settings = json.loads(done.stdout)
    assert settings["lease_seconds"] == {"value": 5.0, "source": str(file)}
    assert settings["http"] == {"value": "127.0.0.1:1", "source": "--http"}
