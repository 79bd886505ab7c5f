"""`kvagent top` and `kvagent status`: many sidecars, lost ones, and hostile words."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import msgspec
import pytest
from rich.console import Console
from typer.testing import CliRunner

from kvagent.cli import app
from kvagent.errors import ConfigError
from kvagent.top.ask import Answer, Lost, Report, Throughput, url_of
from kvagent.top.render import amount, duration, overview, screen
from tests.harness import Engine
from tests.loopback import LONG
from tests.test_agent_loopback import LOCAL, failed, good, hung, offer, sidecar
from tests.test_agent_loopback import engines as engines
from tests.test_agent_loopback import stage as stage
from tests.test_http import HTTP

Engines = Callable[..., Engine]
GONE = "127.0.0.1:1"


def address(engine: Engine, rank: int = 0) -> str:
    http = sidecar(engine, rank).agent._http
    assert http is not None
    return http.address


def run(*arguments: str) -> tuple[int, str]:
    done = CliRunner().invoke(app, arguments)
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return done.exit_code, done.output


def test_status(engines: Engines) -> None:
    producer, consumer = engines("prefill", http=HTTP), engines("decode", 2, http=HTTP)
    good(producer, consumer, "first")
    places = [address(producer), f"http://{address(consumer)}/status", address(consumer, 1)]
    code, text = run("status", *places)
    assert code == 0, text
    lines = text.splitlines()
    assert len(lines) == 4
    for line, words in zip(
        lines[1:],
        (("prefill", "0, alone"), ("decode", "0, leads 2"), ("decode", "1, follower")),
        strict=True,
    ):
        assert all(word in line for word in (*words, "ready"))
    consumer.client.quiesce(LONG)
    code, text = run("status", *places)
    assert (code, "quiesced" in text) == (1, True)


def report(**changes: Any) -> Answer:
    zero = msgspec.convert(
        {"step_seconds": 5.0, "last_step_seconds": 1.0, "read_bytes": [10**9] * 24}
        | {"fetches_failed": [1]},
        Throughput,
    )
    fields: dict[str, Any] = dict.fromkeys(
        ("uptime_seconds", "parts_reading", "bytes_read", "in_flight_bytes"), 0
    )
    fields |= {key: {} for key in ("fetches", "leases", "ledger")} | {"throughput": zero}
    fields |= dict.fromkeys(("transfers", "failures", "peers"), ()) | {"version": "", "host": ""}
    fields |= {"engine_id": "decode-llama-70b-a", "rank": 1, "world_size": 2, "role": "follower"}
    fields |= {"ready": True, "not_ready": ""} | changes
    return Answer(f"10.211.123.{changes['uptime_seconds']}:19100", Report(**fields), {})


@pytest.mark.parametrize("width", [40, 60, 80, 100, 130, 200])
def test_addresses_and_states_stay_on_narrow_terminals(width: int) -> None:
    answers: list[Answer | Lost] = [
        report(uptime_seconds=100),
        report(uptime_seconds=200, ready=False, not_ready="draining", ledger={"free": 1}),
        report(uptime_seconds=150, ready=False, not_ready="no engine has registered a cache"),
        Lost("10.211.123.101:19100", "no answer in 3 s"),
    ]
    console = Console(width=width, height=50, file=io.StringIO())
    with console.capture() as captured:
        console.print(overview(answers, width))
    lines = captured.get().splitlines()
    assert max(map(len, lines)) <= width
    for answer, state in zip(answers, ("ready", "draining", "no engine", "lost:"), strict=True):
        (line,) = [line for line in lines if answer.address in line]
        assert state in line
    for title, least in (("failed", 60), ("reading", 60), ("rank", 80), ("last 2 min", 200)):
        assert (title in lines[0]) == (width >= least), title
    assert ("█" * 24 in captured.get()) == (width == 200)
    with console.capture() as captured:
        console.print(screen(answers, console))
    assert all(answer.address in captured.get() for answer in answers)


def test_nobody_listens() -> None:
    for host in ("127.0.0.1", "localhost"):
        assert "lost: nobody listens there" in run("status", f"{host}:1")[1]


def test_version() -> None:
    assert run("--version") == (0, f"kvagent {version('kvagent')}\n")


def test_status_json(engines: Engines) -> None:
    engine = engines("decode", http=HTTP)
    code, text = run("status", "--json", address(engine), GONE)
    assert code == 1
    first, second = json.loads(text)
    assert first["status"]["engine_id"] == "decode"
    assert (second["address"], bool(second["error"])) == (GONE, True)


def test_top(engines: Engines) -> None:
    producer, consumer = engines("prefill", http=HTTP), engines("decode", http=HTTP)
    good(producer, consumer, "first")
    ticket = offer(producer, "cancelled")
    producer.client.cancel("cancelled")
    failed(consumer, "cancelled", ticket)
    hung(producer, consumer, "a long request")
    looks = ("--rounds", "2", "--every", "0.1")
    code, text = run("top", *looks, address(producer), address(consumer), GONE)
    assert code == 0
    last = text.rsplit("sidecar ", 1)[-1]
    for words in (
        "a long request",
        "reading",
        "0 B of",
        "peers  1",
        "lost:",
        "the producer cancelled",
    ):
        assert words in last
    sidecar(producer).resume()
    assert consumer.received("a long request", LONG) is None


def test_words_from_outside_steer_no_terminal(engines: Engines) -> None:
    evil = "x\x1b]0;owned\x07\x1b[2J[bold]\u202e\ny"
    producer, consumer = engines(evil, http=HTTP), engines("decode", http=HTTP)
    good(producer, consumer, "first")
    hung(producer, consumer, evil)
    for command in (("top", "--rounds", "1"), ("status", "--json"), ("status",)):
        _, text = run(*command, address(producer), address(consumer))
        assert "owned" in text
        assert not set(text) & {"\x1b", "\x07", "\u202e"}
    assert "[bold]" in run("status", address(producer))[1]
    sidecar(producer).resume()
    assert consumer.received(evil, LONG) is None


def test_what_is_no_sidecar(engines: Engines) -> None:
    code, text = run("status", f"http://{address(engines('decode', http=HTTP))}/metrics")
    assert (code, "lost:" in text) == (1, True)


def test_addresses() -> None:
    assert url_of("h:1") == url_of("http://h:1/") == url_of("http://h:1/status")
    assert url_of("[::1]:9100") == "http://[::1]:9100/status?cards=0"
    assert url_of("https://h/kv/") == "https://h/kv/status?cards=0"
    with pytest.raises(ConfigError, match="address 'h' is not HOST:PORT"):
        url_of("h")


def test_words_for_numbers() -> None:
    assert [amount(n) for n in (0, 999, 1000, 123456, 5e12)] == [
        "0 B",
        "999 B",
        "1.0 kB",
        "123 kB",
        "5.0 TB",
    ]
    assert [duration(s) for s in (-1, 0.25, 3, 61, 180, 8000, 200000)] == [
        "0 ms",
        "250 ms",
        "3.0 s",
        "61 s",
        "3 min",
        "2 h",
        "2 d",
    ]


def test_a_follower_has_no_local_requests(engines: Engines) -> None:
    producer, consumer = engines("prefill", http=HTTP), engines("decode", 2, http=HTTP)
    good(producer, consumer, "first")
    hung(producer, consumer, "r", local=LOCAL)
    _, text = run("top", "--rounds", "1", address(consumer, 1))
    assert "a share" in text
    assert "1 shares" in text
    sidecar(producer).resume()
    assert consumer.received("r", LONG) is None
