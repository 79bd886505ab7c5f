"""The decoders of both protocols under a coverage-guided fuzzer, from real messages as seeds."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.fuzz import local_messages

pytest.importorskip("atheris", reason="atheris is not installed (it has wheels for Linux only)")


@pytest.mark.parametrize(
    "runs", [20_000, pytest.param(1_000_000, marks=[pytest.mark.slow, pytest.mark.timeout(1200)])]
)
def test_nothing_but_a_refusal(tmp_path: Path, runs: int) -> None:
    for number, message in enumerate(local_messages()):
        (tmp_path / str(number)).write_bytes(message)
    command = [sys.executable, "-m", "tests.atheris_target", f"-runs={runs}", "-seed=1"]
    done = subprocess.run(
        [*command, "-max_len=4096", str(tmp_path)],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parent.parent,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert f"Done {runs} runs" in done.stderr
