"""The connector between real vLLM servers. Skipped where scripts/vllm_setup was not run."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.vllm_servers import ROOT, environment

pytestmark = pytest.mark.skipif(
    environment() is None, reason="no vLLM here: scripts/vllm_setup makes its environment (3.5 GB)"
)


def run(*options: str) -> None:
    command = [sys.executable, str(ROOT / "scripts" / "vllm_e2e"), *options]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_two_servers() -> None:
    run("--short")


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_beside_nixl_connector() -> None:
    run()
