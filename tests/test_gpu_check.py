"""`scripts/gpu_check`: that it works, on host memory; and what it says where it cannot."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from kvagent.gpu_check.setup import cases

SCRIPT = Path(__file__).parent.parent / "scripts/gpu_check"


def run(*arguments: str, python: tuple[str, ...] = (sys.executable,)) -> tuple[int, str]:
    done = subprocess.run(
        [*python, str(SCRIPT), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=290,
        check=False,
        env={name: text for name, text in os.environ.items() if name != "PYTHONPATH"},
    )
    return done.returncode, done.stdout


def test_the_pair_that_it_begins_with(tmp_path: Path) -> None:
    """Two processes with an agent each; bytes, rates and the transport."""
    report = tmp_path / "report.json"
    code, said = run(
        "--device", "cpu", "--no-demo", "--only", "embedded, same", "--json", str(report)
    )
    assert code == 0, said
    assert "all is well" in said
    (found,) = json.loads(report.read_text())["cases"]
    assert (found["ok"], found["transfers"], found["transport"]) == (True, 3, "shared_memory")
    assert min(found["fetch_rate"], found["wire_rate"], found["copy_rate"]) > 0


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_all_of_it_on_the_host(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    code, said = run("--device", "cpu", "--json", str(report))
    assert code == 0, said
    found = json.loads(report.read_text())
    assert len(found["cases"]) == len([*cases("cpu")])
    assert found["demo"]["ok"] is True


def test_what_is_not_done_is_not_well(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    code, said = run("--device", "cpu", "--seconds", "0", "--json", str(report))
    assert code == 1
    assert "the time is up" in said
    assert json.loads(report.read_text())["ok"] is False


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu() -> None:
    code, said = run()
    assert code == 3
    assert "no GPU: torch" in said


@pytest.mark.parametrize("arguments", [("--device", "tpu"), ("--jsn",)])
def test_wrong_arguments(arguments: tuple[str, ...]) -> None:
    code, said = run(*arguments)
    assert (code, "usage" in said) == (2, True)


def test_a_python_that_lacks_packages(tmp_path: Path) -> None:
    bare = (sys.executable, "-I", "-S")  # without site-packages
    code, needs = run("--needs", python=bare)
    assert code == 0
    assert {"nixl>=1.5", "msgspec>=0.19"} <= set(needs.split())
    code, said = run("--wheels", str(tmp_path / "nothing"), python=bare)
    assert (code, "there is no such folder" in said) == (2, True)
    code, said = run("--wheels", str(tmp_path), python=bare)
    assert (code, "has no wheel for" in said) == (2, True)


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.timeout(310)
def test_all_of_it_on_the_gpu(tmp_path: Path) -> None:
    code, said = run("--json", str(tmp_path / "report.json"))
    assert code == 0, said
