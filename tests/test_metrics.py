"""/metrics: names, help, bounds of labels, and that telemetry fails no transfer."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from kvagent.agent.causes import CAUSES
from kvagent.visible import figures, metrics
from kvagent.visible.events import FetchEnd
from kvagent.wire import control
from kvagent.wire.keys import make_keys
from tests.harness import Engine
from tests.loopback import Stage
from tests.test_agent_loopback import LOCAL, failed, good, offer, sidecar, wait_for
from tests.test_agent_loopback import engines as engines
from tests.test_agent_loopback import stage as stage
from tests.test_http import HTTP, get, status

Engines = Callable[..., Engine]
DASHBOARD = Path(__file__).parent.parent / "docker" / "grafana" / "kvagent.json"


def scrape(engine: Engine, rank: int = 0) -> dict[tuple[str, ...], float]:
    """(name, label values...) -> value."""
    text = get(sidecar(engine, rank), "/metrics").text
    return {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_numbers(engines: Engines) -> None:
    producer = engines("prefill", http=HTTP)
    consumer = engines("decode", 2, http=HTTP, expected_transport=["rdma"])
    good(producer, consumer, "first")
    good(producer, consumer, "second")
    both = scrape(consumer), scrape(consumer, 1)
    ticket = offer(producer, "r")
    producer.client.cancel("r")
    failed(consumer, "r", ticket)
    found = scrape(consumer)
    nbytes = consumer.seen[0].kv_connector_stats["fetches"]["first"]["bytes"]
    assert found["kvagent_ready",] == 1
    assert found["kvagent_fetches_ended_total", "ok"] == 2
    assert found["kvagent_fetches_ended_total", "cancelled"] == 1
    assert found["kvagent_received_bytes_total",] == 2 * nbytes
    # One of two ranks. (What it read of the third fetch before the refusal came is counted too.)
    assert [each["kvagent_read_bytes_total", "unknown"] for each in both] == [nbytes, nbytes]
    assert found["kvagent_peers",] == 1
    assert found["kvagent_peer_ranks", "prefill", "unknown"] == 1
    assert found["kvagent_unexpected_transports",] == 0, "unknown is not unexpected"
    for name in ("", "wait_", "post_", "wire_", "completion_"):
        assert found[f"kvagent_fetch_{name}seconds_count",] == 2
    assert found["kvagent_fetch_bytes_sum",] == 2 * nbytes
    assert found["kvagent_fetch_bytes_bucket", "+Inf"] == 2
    assert found["kvagent_blocks", "free"] == consumer.num_blocks
    lender = scrape(producer)
    assert lender["kvagent_leases_ended_total", "completed"] == 2
    assert lender["kvagent_fetch_seconds_count",] == 0


def test_help_says_unit_and_scope(engines: Engines) -> None:
    text = get(sidecar(engines("decode", http=HTTP)), "/metrics").text
    ours = [
        family
        for family in text_string_to_metric_families(text)
        if family.name.startswith("kvagent") and not family.name.endswith("_created")
    ]
    declared = {f.name for f in figures.FIGURES} | {t.name for t in metrics.TIMINGS}
    assert {family.name for family in ours} == declared
    for family in ours:
        assert family.documentation.endswith(
            ("(this rank)", "(the whole engine, at its leader)")
        ), family
        for unit in ("seconds", "bytes", "descriptors"):
            if family.name.endswith(unit):
                assert unit in family.documentation.lower()


def test_the_table_for_people_has_all() -> None:
    table = metrics.metrics_markdown()
    for figure in figures.FIGURES:
        assert f"`{figure.name}" in table
    for timing in metrics.TIMINGS:
        assert f"`{timing.name}`" in table


# ---------------------------------------------------------------- errors of telemetry


def test_a_metric_that_raises_fails_no_transfer(engines: Engines) -> None:
    producer, consumer = engines("prefill"), engines("decode", http=HTTP)
    watch = sidecar(consumer).agent.watch

    class Broken:
        def observe(self, value: float) -> None:
            raise RuntimeError(f"no room for {value}")

    watch.histograms.by_field["wire"] = Broken()  # type: ignore[assignment]
    watch.listeners.insert(0, lambda end: 1 / 0)  # type: ignore[arg-type,return-value]
    good(producer, consumer, "first")
    ticket = offer(producer, "r")
    producer.client.cancel("r")
    assert failed(consumer, "r", ticket).startswith("cancelled")
    wait_for(lambda: watch.errors == 3, f"{watch.errors} errors")
    assert scrape(consumer)["kvagent_telemetry_errors_total",] == 3
    assert len(status(consumer)["failures"]) == 1, "the other listeners were told"


def test_a_figure_that_raises_leaves_out_itself_alone(
    engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(_: figures.Status) -> figures.Values:
        raise KeyError("gone")

    changed = [
        figure._replace(values=broken) if figure.name == "kvagent_leases" else figure
        for figure in figures.FIGURES
    ]
    monkeypatch.setattr(metrics, "FIGURES", changed)
    engine = engines("decode", http=HTTP)
    found = scrape(engine)
    assert found["kvagent_ready",] == 1
    assert ("kvagent_leases", "offered") not in found
    assert sidecar(engine).agent.watch.errors


# ---------------------------------------------------------------- labels


def numbers(**changes: Any) -> dict[str, float]:
    """The samples of a /status with `changes`, as text lines."""
    numbers = """version engine_id rank role uptime_seconds unacknowledged_reports parts_reading
        in_flight_bytes descriptors_read fences handshakes handshakes_refused messages_rejected
        telemetry_errors unexpected_transports bytes_received ready"""
    tables = """fetches fetches_ended leases leases_ended ledger read_bytes_by_transport
        failing_peers"""
    fields: dict[str, Any] = dict.fromkeys(numbers.split(), 0) | {
        "silent_ranks": [],
        "peers": [],
        "keys": None,
    }
    fields |= {name: {} for name in tables.split()} | changes
    registry = metrics.make_registry(metrics.Histograms(), lambda: fields, lambda: None)
    return _samples(registry)


def _samples(registry: CollectorRegistry) -> dict[str, float]:
    lines = [line.rsplit(" ", 1) for line in generate_latest(registry).decode().splitlines()]
    return {name: float(value) for name, value in lines if not name.startswith("#")}


def test_causes_are_from_a_fixed_set() -> None:
    """A peer's verdict can be any word, and becomes the beginning of a cause."""
    words = {f"word-{i}": 1 for i in range(1000)}
    found = numbers(fetches_ended={"ok": 5, "expired": 2, **words})
    ended = {name: value for name, value in found.items() if "fetches_ended_total" in name}
    assert ended.keys() == {
        f'kvagent_fetches_ended_total{{cause="{cause}"}}' for cause in {"ok", *CAUSES}
    }
    assert {name: value for name, value in ended.items() if value} == {
        'kvagent_fetches_ended_total{cause="ok"}': 5,
        'kvagent_fetches_ended_total{cause="expired"}': 2,
        'kvagent_fetches_ended_total{cause="protocol"}': 1000,
    }


def test_keys_that_go_are_seen(
    stage: Stage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "kvagent_keys_allowed" not in numbers(), "without keys"
    monkeypatch.setattr(control, "LOOK_SECONDS", 0.05)
    _, public = make_keys(str(tmp_path), "here")
    own = public.stem.rpartition("-")[2]
    (one,) = stage.sidecars(1, keys=str(tmp_path), http=HTTP)

    def shown() -> tuple[dict[str, Any], str]:
        return get(one, "/status").json()["keys"], get(one, "/metrics").text

    keys, text = shown()
    assert keys == {"own": own, "allowed": [own], "allowed_keys": 1, "problems": []}
    assert "\nkvagent_keys_allowed 1.0\n" in text
    public.write_text("no key")
    wait_for(lambda: shown()[0]["problems"], "it is noticed")
    keys, text = shown()
    assert (keys["own"], keys["allowed"], keys["allowed_keys"]) == (own, [], 0)
    assert str(public) in keys["problems"][0]
    assert "\nkvagent_keys_allowed 0.0\n" in text


def test_peers_are_bounded_and_escaped() -> None:
    rank = {"transport": "tcp", "bytes_per_second": 5.0}
    peers = [
        {"engine_id": f'"}} 1\nforged{{x="{i}', "ranks": [rank, {**rank, "bytes_per_second": 3.0}]}
        for i in range(1000)
    ]
    found = numbers(peers=peers)
    ranks = [name for name in found if name.startswith("kvagent_peer_ranks{")]
    rates = [v for name, v in found.items() if name.startswith("kvagent_peer_bytes_per_second{")]
    assert len(ranks) == len(rates) == figures.MAX_PEERS
    assert set(rates) == {3.0}, "the slowest rank"
    assert found["kvagent_peers"] == 1000
    assert not [name for name in found if name.startswith("forged")]


def test_histograms_take_good_fetches_only() -> None:
    histograms = metrics.Histograms()
    histograms.observe(
        FetchEnd(
            request_id="r",
            transfer_id="t",
            fetch_id="f",
            peer="p",
            address="a:1",
            num_tokens=1,
            seconds=1.0,
            cause="expired: too late",
        )
    )
    registry = metrics.make_registry(histograms, dict, lambda: None)
    assert _samples(registry)["kvagent_fetch_seconds_count"] == 0


# ---------------------------------------------------------------- the dashboard


def test_the_dashboard_asks_for_what_there_is(engines: Engines) -> None:
    producer, consumer = engines("prefill", http=HTTP), engines("decode", http=HTTP)
    good(producer, consumer, "first")
    consumer.client.fetch("bad", {**offer(producer, "bad"), "remote_port": 1}, LOCAL)
    consumer.until(lambda out: "bad" in out.failed_recving)
    labels: dict[str, set[str]] = {}
    for engine in (producer, consumer):
        text = get(sidecar(engine), "/metrics").text
        for family in text_string_to_metric_families(text):
            labels.setdefault(family.name, set()).update(
                *(sample.labels for sample in family.samples)
            )
            for sample in family.samples:
                labels.setdefault(sample.name, set()).update(sample.labels)
    labels["kvagent_peer_bytes_per_second"] = {"peer", "transport"}  # not over the loopback
    labels["up"] = set()  # Prometheus' own
    for name in labels:
        labels[name].add("instance")  # Prometheus adds it
    dashboard = json.loads(DASHBOARD.read_text())
    targets = [target for panel in dashboard["panels"] for target in panel.get("targets", [])]
    variables = [
        v["query"]["query"] for v in dashboard["templating"]["list"] if v["type"] == "query"
    ]
    assert len(targets) > 30
    asked = set()
    for query, legend in [(t["expr"], t["legendFormat"]) for t in targets] + [
        (variable, "") for variable in variables
    ]:
        selectors = re.findall(r"\b((?:kvagent|process)_\w+|up)\b(?:\{([^}]*)\})?", query)
        assert selectors, query
        known = set()
        for name, matchers in selectors:
            assert name in labels, query
            assert set(re.findall(r'(\w+)(?:=~|!=|=)"', matchers)) <= labels[name], query
            known |= labels[name]
            asked.add(name)
        groups = re.findall(r"\b(?:by|on|group_left) \(([^)]*)\)", query)
        assert {label for group in groups for label in group.split(", ")} <= known, query
        assert set(re.findall(r"\{\{(\w+)\}\}", legend)) <= known, query
    ours = {name for name in labels if name.startswith("kvagent")}
    declared = {figure.name for figure in figures.FIGURES} | {t.name for t in metrics.TIMINGS}
    missing = [name for name in declared if not any(each.startswith(name) for each in asked)]
    assert not missing, "a metric that the dashboard does not show"
    assert ours >= declared


def test_the_dashboards_structure() -> None:
    dashboard = json.loads(DASHBOARD.read_text())
    panels = dashboard["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    variables = [variable["name"] for variable in dashboard["templating"]["list"]]
    assert variables == ["datasource", "engine", "rank", "instance"]
    assert dashboard["uid"] == "kvagent"
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken, panel["title"]
        assert place["x"] + place["w"] <= 24
        taken |= cells
        if panel["type"] != "row":
            assert panel["datasource"]["uid"] == "${datasource}"
            assert all(panel["targets"])
            for target in panel["targets"]:
                assert target["expr"].count("(") == target["expr"].count(")")
                assert 'instance=~"$instance"' in target["expr"]
                windows = set(re.findall(r"\[(.*?)\]", target["expr"]))
                assert windows <= {"$__rate_interval"} or "5 min" in panel["title"]
                assert target["legendFormat"] or target["format"] == "table"
            assert panel["description"].endswith(".")
            assert panel["fieldConfig"]["defaults"]["unit"]


def test_the_readme_has_the_metrics() -> None:
    """When this fails: scripts/readme_tables."""
    text = (Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")
    table = text.partition("<!-- metrics -->\n")[2].partition("\n<!-- /metrics -->")[0]
    assert table == metrics.metrics_markdown()
