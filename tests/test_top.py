"""`kvagent top` and `kvagent status`: many sidecars, lost ones, and hostile words."""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib.metadata import version

import pytest
from typer.testing import CliRunner

from kvagent.cli import app
from kvagent.errors import ConfigError
from kvagent.top.ask import url_of
from kvagent.top.render import amount, duration
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
