"""An engine whose sidecar is killed says so and ends, and joins the next one when it is started
again. With real processes."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from tests.demo_models import write_tiny
from tests.harness import Sidecar, start

SECONDS = 60.0
"""A bound against hangs only."""
PROMPT = list(range(30, 60))
TCP = ("--bind", "127.0.0.1:0", "--http", "127.0.0.1:0")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("models") / "tiny")


@contextmanager
def sidecars(folder: Path, count: int) -> Iterator[list[Sidecar]]:
    started = start(folder, [str(rank) for rank in range(count)], *TCP)
    try:
        yield started
    finally:
        for sidecar in started:
            sidecar.close()


class EngineProcess:
    """`kvagent engine` with `tp` ranks, at the sidecars in `folder`."""

    def __init__(self, folder: Path, model: Path, tp: int) -> None:
        self.log = folder / "engine.log"
        command = [sys.executable, "-m", "kvagent", "engine", "--model", str(model)]
        command += ["--tp", str(tp), "--port", "0", "--device", "cpu", "--num-blocks", "1024"]
        command += ["--socket-template", str(folder / "{rank}.sock")]
        with self.log.open("w") as log:
            self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert "http://" in line, self.log.read_text()
        self.client = httpx.Client(base_url=line.split()[-1], timeout=SECONDS)

    def __enter__(self) -> EngineProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.client.close()
        self.process.kill()
        self.process.communicate()


@pytest.mark.parametrize(("tp", "rank"), [(1, 0), (2, 1)])
def test_an_engine_ends_when_its_sidecar_is_killed(
    model: Path, tmp_path: Path, tp: int, rank: int
) -> None:
    with sidecars(tmp_path, tp) as before, EngineProcess(tmp_path, model, tp) as engine:
        assert engine.client.get("/health").status_code == 200
        before[rank].kill()
        assert engine.process.wait(SECONDS) == 2
        said = engine.log.read_text()
        assert f"the sidecar of rank {rank} is gone" in said
        assert "start it again" in said
        assert "Traceback" not in said


def test_it_finishes_its_requests_first_and_takes_no_more(model: Path, tmp_path: Path) -> None:
    body = {"prompt": PROMPT, "max_tokens": 3000, "ignore_eos": True, "stream": True}
    with sidecars(tmp_path, 1) as (sidecar,), EngineProcess(tmp_path, model, 1) as engine:
        with engine.client.stream("POST", "/v1/completions", json=body) as reply:
            lines = (line for line in reply.iter_lines() if line)
            next(lines)
            sidecar.kill()
            until = time.monotonic() + SECONDS
            while engine.client.get("/health").status_code != 503:
                assert time.monotonic() < until
            refused = engine.client.post("/v1/completions", json={"prompt": PROMPT})
            assert refused.status_code == 503
            assert "takes no more requests" in refused.json()["error"]["message"]
            *_, last, done = lines
        assert json.loads(last.removeprefix("data: "))["choices"][0]["finish_reason"] == "length"
        assert done == "data: [DONE]"
        assert engine.process.wait(SECONDS) == 2


def test_started_again_it_joins_the_new_sidecar(model: Path, tmp_path: Path) -> None:
    body = {"prompt": PROMPT, "max_tokens": 1, "kv_transfer_params": {"do_remote_decode": True}}
    with sidecars(tmp_path, 1) as (first,), EngineProcess(tmp_path, model, 1) as engine:
        first.kill()
        assert engine.process.wait(SECONDS) == 2
    with sidecars(tmp_path, 1), EngineProcess(tmp_path, model, 1) as engine:
        answer = engine.client.post("/v1/completions", json=body).json()
        assert answer["kv_transfer_params"]["do_remote_prefill"] is True
