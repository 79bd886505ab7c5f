"""The log: one line per record, JSON when asked for, no forged lines, no floods."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvagent.visible.logs import (
    BURST,
    MAX_KINDS,
    PERIOD,
    FloodFilter,
    JsonFormatter,
    TextFormatter,
    event,
)
from tests.faults import SMALL, Watched, engine, offer
from tests.harness import Engine, random_fill
from tests.test_agent_loopback import engines as engines
from tests.test_agent_loopback import failed, good, wait_for
from tests.test_agent_loopback import offer as small_offer
from tests.test_agent_loopback import stage as stage

log = logging.getLogger("kvagent.test")
Engines = Callable[..., Engine]


def record(message: str, *args: object, line: int = 1, **more: Any) -> logging.LogRecord:
    made = logging.LogRecord("kvagent.x", logging.WARNING, "x.py", line, message, args, None)
    for name, value in more.items():
        setattr(made, name, value)
    return made


def test_a_failed_fetch_is_one_line(engines: Engines, caplog: pytest.LogCaptureFixture) -> None:
    producer, consumer = engines("prefill"), engines("decode")
    ticket = small_offer(producer, "a request")
    producer.client.cancel("a request")
    with caplog.at_level(logging.INFO, "kvagent.fetch"):
        failed(consumer, "a request", ticket)
        wait_for(lambda: [one for one in caplog.records if hasattr(one, "event")], "no line")
    (line,) = [each for each in caplog.records if hasattr(each, "event")]
    assert line.levelno == logging.WARNING
    assert line.event == "fetch failed"
    fields = line.fields  # type: ignore[attr-defined]
    assert fields["request"] == "a request"
    assert fields["transfer"] == ticket["kvagent"]["transfer_id"]
    assert fields["peer"] == "prefill"
    assert fields["address"] == f"{ticket['remote_host']}:{ticket['remote_port']}"
    assert fields["cause"] == "cancelled"
    assert fields["stage"] == "validating"
    assert fields["root"] == "cancelled: the producer cancelled the request"
    assert {"fetch", "bytes", "wanted", "tokens", "seconds"} <= fields.keys()
    text = TextFormatter().format(line)
    assert 'fetch failed: request="a request" transfer=' in text
    assert json.loads(JsonFormatter().format(line))["root"] == fields["root"]


def test_json() -> None:
    line = json.loads(JsonFormatter().format(record("%d bytes\nfrom %s", 3, "\ud800")))
    assert (line["level"], line["logger"]) == ("warning", "kvagent.x")
    assert line["message"] == "3 bytes\nfrom \ud800"
    assert line["time"].endswith("+00:00")
    fields = {"peer": "p", "level": "forged", "odd": Path("/x")}
    line = json.loads(JsonFormatter().format(record("text", event="fetch failed", fields=fields)))
    assert line == line | {"message": "fetch failed", "peer": "p", "odd": "/x", "level": "warning"}
    try:
        raise ValueError("inner")
    except ValueError:
        made = record("outer")
        made.exc_info = sys.exc_info()
    assert "ValueError: inner" in json.loads(JsonFormatter().format(made))["exception"]


def test_nobody_forges_a_line() -> None:
    evil = "x\n2026-01-01 ERROR kvagent \x1b[31mall is lost\u2028\x85"
    for each in (record("peer %s", evil), record(evil)):
        text = TextFormatter().format(each)
        assert len(text.splitlines()) == 1
        assert "\x1b" not in text
        assert "\n" not in JsonFormatter().format(each)


def test_floods() -> None:
    now = [0.0]
    flood = FloodFilter(lambda: now[0])
    passed = [flood.filter(record("%d", i)) for i in range(1000)]
    assert sum(passed) == BURST
    assert flood.filter(record("another line of code", line=2))
    now[0] = PERIOD
    again = record("%s%%", "again")
    assert flood.filter(again)
    assert again.getMessage() == f"again% [{1000 - BURST} more like it were left out]"
    later = record("later")
    assert flood.filter(later)
    assert later.getMessage() == "later"


def test_events_are_never_left_out() -> None:
    flood = FloodFilter(lambda: 0.0)
    assert all(flood.filter(record("x", event="fetch failed")) for _ in range(1000))


def test_the_filter_is_bounded() -> None:
    flood = FloodFilter(lambda: 0.0)
    for line in range(MAX_KINDS * 2):
        assert flood.filter(record("x", line=line))
    assert len(flood._kinds) == MAX_KINDS


def test_event_words(caplog: pytest.LogCaptureFixture) -> None:
    event(log, logging.WARNING, "what", a=1, b="two words", c="", d='"', e="k=v")
    assert caplog.messages == ['what: a=1 b="two words" c="" d="\\"" e="k=v"']


def test_an_orderly_close_is_no_trouble(engines: Engines, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="kvagent")
    producer, consumer = engines("prefill", 2), engines("decode", 2)
    good(producer, consumer, "first")
    for made in (consumer, producer):
        made.close()
    closed = "the engine's worker is gone; its cache stays"
    wait_for(lambda: caplog.messages.count(closed) == 4, "all workers have gone")
    assert not [line for line in caplog.records if line.levelno > logging.INFO]


def test_a_sidecar_that_logs_json(tmp_path: Path) -> None:
    made = Watched(tmp_path, "decode", "tcp", log_format='"json"')  # type: ignore[arg-type]
    other = Watched(tmp_path, "prefill", "tcp")
    try:
        with (
            engine([made.wait()], "decode", SMALL) as consumer,
            engine([other.wait()], "prefill", SMALL, random_fill(1)) as producer,
        ):
            consumer.client.fetch("r", offer(producer, "r", range(SMALL)), list(range(SMALL)))
            assert consumer.received("r") is None
            ticket = offer(producer, "lost", range(SMALL))
            producer.client.cancel("lost")
            consumer.client.fetch("lost", ticket, list(range(SMALL)))
            assert str(consumer.received("lost")).startswith("cancelled")
    finally:
        made.close()
        other.close()
    lines = [json.loads(line) for line in made.log.read_text().splitlines()]
    (failure,) = [line for line in lines if line["message"] == "fetch failed"]
    assert (failure["request"], failure["peer"]) == ("lost", "prefill")
    assert failure["cause"] == "cancelled"
    assert [line for line in lines if "go by tcp" in line["message"]]


def test_the_flag() -> None:
    command = [sys.executable, "-m", "kvagent", "config", "--json", "--log-format", "json"]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ, check=True)
    assert json.loads(done.stdout)["log_format"] == {"value": "json", "source": "--log_format"}
