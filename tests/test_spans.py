"""OpenTelemetry: spans of fetches, in the trace that the ticket names."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from kvagent.visible.trace import checked, current_traceparent
from tests.harness import Engine
from tests.loopback import LONG
from tests.test_agent_loopback import LOCAL, failed, offer, wait_for
from tests.test_agent_loopback import engines as engines
from tests.test_agent_loopback import stage as stage

trace = pytest.importorskip("opentelemetry.trace", reason="pip install 'kvagent[otel]'")
pytest.importorskip("opentelemetry.sdk.trace", reason="pip install 'kvagent[otel]'")

Engines = Callable[..., Engine]


@pytest.fixture(scope="module")
def provider() -> Any:
    from opentelemetry.sdk.trace import TracerProvider

    made = TracerProvider()
    trace.set_tracer_provider(made)  # once per process
    return made


@pytest.fixture
def spans(provider: Any) -> Iterator[Callable[[], dict[str, Any]]]:
    """What has ended, by name, once a fetch has. (Its report comes first.)"""
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    exporter = InMemorySpanExporter()
    provider.add_span_processor(SimpleSpanProcessor(exporter))

    def ended() -> dict[str, Any]:
        return {span.name: span for span in exporter.get_finished_spans()}

    def found() -> dict[str, Any]:
        wait_for(lambda: "kvagent.fetch" in ended(), "no span of the fetch")
        return ended()

    yield found
    exporter.shutdown()


def test_a_fetch_joins_the_requests_trace(
    engines: Engines, spans: Callable[[], dict[str, Any]]
) -> None:
    producer, consumer = engines("prefill"), engines("decode")
    with trace.get_tracer("router").start_as_current_span("request") as request:
        ticket = json.loads(json.dumps(offer(producer, "r")))
    assert ticket["kvagent"]["traceparent"].split("-")[2] == f"{request.context.span_id:016x}"
    consumer.client.fetch("r", ticket, LOCAL)
    assert consumer.received("r", LONG) is None
    found = spans()
    fetch = found["kvagent.fetch"]
    assert fetch.context.trace_id == request.context.trace_id
    assert fetch.parent.span_id == request.context.span_id
    assert fetch.attributes["kvagent.request_id"] == "r"
    assert fetch.attributes["kvagent.cause"] == "ok"
    stats = consumer.seen[-1].kv_connector_stats["fetches"]["r"]
    assert fetch.end_time - fetch.start_time == pytest.approx(stats["seconds"] * 1e9, rel=0.01)
    for phase in ("wait", "wire", "validate"):
        child = found[f"kvagent.{phase}"]
        assert child.parent.span_id == fetch.context.span_id
        assert fetch.start_time <= child.start_time <= child.end_time <= fetch.end_time + 1000


def test_a_failure_and_no_trace(engines: Engines, spans: Callable[[], dict[str, Any]]) -> None:
    producer, consumer = engines("prefill"), engines("decode")
    ticket = offer(producer, "r")
    assert "traceparent" not in ticket["kvagent"]
    producer.client.cancel("r")
    failed(consumer, "r", ticket)
    fetch = spans()["kvagent.fetch"]
    assert fetch.parent is None
    assert fetch.status.status_code is trace.StatusCode.ERROR
    assert fetch.status.description.startswith("cancelled: ")


GOOD = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


@pytest.mark.parametrize(
    "value", ["", None, 7, [], GOOD.upper(), GOOD + "\n", "01" + GOOD[2:], GOOD.replace("4bf", "x")]
)
def test_a_bad_traceparent_is_none(engines: Engines, value: object) -> None:
    assert checked(value) == ""
    producer, consumer = engines("prefill"), engines("decode")
    ticket = offer(producer, "r")
    ticket["kvagent"]["traceparent"] = value
    consumer.client.fetch("r", ticket, LOCAL)
    assert consumer.received("r", LONG) is None


def test_a_good_one() -> None:
    assert checked(GOOD) == GOOD
    assert current_traceparent() == ""
    assert checked(f"00-{'0' * 32}-00f067aa0ba902b7-01") == ""


def test_costs_no_import() -> None:
    """Neither an engine nor a sidecar loads OpenTelemetry because it is installed."""
    code = (
        "import sys, os, kvagent, kvagent.agent.serve\n"
        "from kvagent.visible import spans\n"
        "spans.start({})\n"
        "print([name for name in sys.modules if 'opentelemetry' in name])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_start(monkeypatch: pytest.MonkeyPatch) -> None:
    from kvagent.visible import spans

    made: list[Any] = []
    monkeypatch.setattr(trace, "set_tracer_provider", made.append)
    spans.start({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1"})
    (provider,) = made
    assert provider.resource.attributes["service.name"] == "kvagent"
    provider.shutdown()
