"""The demo engine over HTTP: answers, streams, refusals, clients that leave, a clean end."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.demo_models import write_tiny

SECONDS = 60.0
"""A bound against hangs only."""
PROMPT = list(range(30, 60))


@contextmanager
def server(model: Path, *arguments: str) -> Iterator[tuple[subprocess.Popen[str], httpx.Client]]:
    command = [sys.executable, "-m", "kvagent", "engine", "--model", str(model), "--port", "0"]
    with subprocess.Popen([*command, *arguments], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            assert "http://" in line, "it did not start"
            address = line.split()[-1]
            with httpx.Client(base_url=address, timeout=SECONDS) as client:
                yield process, client
        finally:
            process.kill()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def client(model: Path) -> Iterator[httpx.Client]:
    with server(model, "--num-blocks", "8192") as (_, client):
        yield client


def complete(client: httpx.Client, **body: Any) -> dict[str, Any]:
    wanted = {"prompt": PROMPT, "max_tokens": 10, "return_token_ids": True, "ignore_eos": True}
    response = client.post("/v1/completions", json={**wanted, **body})
    assert response.status_code == 200, response.text
    answer = response.json()
    assert isinstance(answer, dict)
    return answer


def stream(client: httpx.Client, **body: Any) -> list[dict[str, Any]]:
    wanted = {"prompt": PROMPT, "max_tokens": 10, "return_token_ids": True, "ignore_eos": True}
    with client.stream("POST", "/v1/completions", json={**wanted, "stream": True, **body}) as reply:
        assert reply.headers["content-type"].startswith("text/event-stream")
        lines = [line.removeprefix("data: ") for line in reply.iter_lines() if line]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


def test_a_completion(client: httpx.Client) -> None:
    answer = complete(client, model="tiny")
    choice = answer["choices"][0]
    assert answer["object"] == "text_completion"
    assert len(choice["token_ids"]) == 10
    assert choice["finish_reason"] == "length"
    assert answer["usage"] == {"prompt_tokens": 30, "completion_tokens": 10, "total_tokens": 40}
    assert answer["kv_transfer_params"] is None
    assert answer["kv_transfer"]["prefill_ms"] > 0
    assert answer["kv_transfer"]["decode_tokens_per_s"] > 0


def test_a_text_is_its_tokens(client: httpx.Client) -> None:
    text = complete(client, prompt="hello")
    assert text["usage"]["prompt_tokens"] == 5
    assert "token_ids" not in complete(client, prompt="hello", return_token_ids=False)["choices"][0]


def test_a_stream_is_the_answer_in_pieces(client: httpx.Client) -> None:
    whole = complete(client, max_tokens=40)
    pieces = stream(client, max_tokens=40)
    choices = [piece["choices"][0] for piece in pieces]
    assert len(pieces) == 40
    assert "".join(c["text"] for c in choices) == whole["choices"][0]["text"]
    assert [id for c in choices for id in c["token_ids"]] == whole["choices"][0]["token_ids"]
    assert [c["finish_reason"] for c in choices] == [None] * 39 + ["length"]
    assert pieces[-1]["usage"] == whole["usage"]
    assert pieces[-1]["kv_transfer"]["prefill_ms"] > 0


def test_a_stop_string_ends_the_answer_before_it(client: httpx.Client) -> None:
    text = complete(client, max_tokens=40)["choices"][0]["text"]
    middle = len(text) // 2
    stop = text[middle : middle + 2]
    expected = text[: text.find(stop)]
    for choice in (
        complete(client, max_tokens=40, stop=[stop])["choices"][0],
        {
            "text": "".join(
                piece["choices"][0]["text"] for piece in stream(client, max_tokens=40, stop=stop)
            ),
            "finish_reason": "stop",
        },
    ):
        assert choice["text"] == expected
        assert choice["finish_reason"] == "stop"


def test_models_and_health(client: httpx.Client) -> None:
    assert client.get("/v1/models").json()["data"][0]["id"] == "tiny"
    health = client.get("/health").json()
    assert health["status"] == "ok"
    assert health["num_blocks"] == 8192


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ({"prompt": []}, 400),
        ({"prompt": ["two", "texts"]}, 400),
        ({"prompt": [999]}, 400),
        ({"max_tokens": 0}, 400),
        ({"max_tokens": 10**9}, 400),
        ({"n": 2}, 400),
        ({"top_p": 0.5}, 400),
        ({"model": "another"}, 404),
    ],
)
def test_what_is_refused(client: httpx.Client, body: dict[str, Any], status: int) -> None:
    response = client.post("/v1/completions", json={"prompt": PROMPT, **body})
    assert response.status_code == status
    assert response.json()["error"]["message"]


def test_a_body_that_is_not_json(client: httpx.Client) -> None:
    assert client.post("/v1/completions", content=b"{").status_code == 400


def all_blocks_come_back(client: httpx.Client) -> None:
    """Long before the answer could have been complete."""
    end = time.monotonic() + SECONDS
    while True:
        health = client.get("/health").json()
        if health["free_blocks"] == health["num_blocks"]:
            return
        assert time.monotonic() < end, health
        time.sleep(0.05)


def test_leaving_a_stream_cancels_it(client: httpx.Client) -> None:
    body = {"prompt": PROMPT, "max_tokens": 90_000, "ignore_eos": True, "stream": True}
    with client.stream("POST", "/v1/completions", json=body) as reply:
        lines = reply.iter_lines()  # kept: when it is dropped, httpx ends the connection
        for _ in range(6):
            next(lines)
        assert client.get("/health").json()["free_blocks"] < 8192
    all_blocks_come_back(client)


def test_leaving_before_the_answer_cancels_it(client: httpx.Client) -> None:
    body = {"prompt": PROMPT, "max_tokens": 90_000, "ignore_eos": True}
    with pytest.raises(httpx.ReadTimeout):
        client.post("/v1/completions", json=body, timeout=0.5)
    all_blocks_come_back(client)


def test_all_ranks_end_with_the_server(model: Path) -> None:
    with server(model, "--tp", "2") as (process, client):
        children = psutil.Process(process.pid).children()
        assert len(children) == 1
        assert len(complete(client)["choices"][0]["token_ids"]) == 10
        process.send_signal(signal.SIGTERM)
        assert process.wait(SECONDS) == 0
        assert not psutil.wait_procs(children, SECONDS)[1]


def test_no_rank_outlives_a_killed_server(model: Path) -> None:
    with server(model, "--tp", "2") as (process, _):
        children = psutil.Process(process.pid).children()
        process.kill()
        process.wait(SECONDS)
        assert not psutil.wait_procs(children, SECONDS)[1]


def test_a_server_whose_rank_died_ends(model: Path) -> None:
    with server(model, "--tp", "2") as (process, _):
        psutil.Process(process.pid).children()[0].kill()
        assert process.wait(SECONDS) == 2


def test_a_rank_that_dies_ends_the_requests_that_run(model: Path) -> None:
    body = {"prompt": PROMPT, "max_tokens": 90_000, "ignore_eos": True, "stream": True}
    with server(model, "--tp", "2", "--num-blocks", "8192") as (process, client):
        with client.stream("POST", "/v1/completions", json=body) as reply:
            lines = (line for line in reply.iter_lines() if line)
            next(lines)
            psutil.Process(process.pid).children()[0].kill()
            *_, last, done = lines
        assert json.loads(last.removeprefix("data: "))["error"]["code"] == 500
        assert done == "data: [DONE]"
        assert process.wait(SECONDS) == 2


def test_what_cannot_start_says_why(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "kvagent", "engine", "--model", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("kvagent: ")
