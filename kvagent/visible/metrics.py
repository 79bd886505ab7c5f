"""/metrics: histograms that are filled as fetches end, and the figures, as Prometheus wants them.

Both, with `figures`, are all the metrics that there are; the README's table is made from them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import NamedTuple

from prometheus_client import CollectorRegistry, Histogram, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from kvagent.visible.events import FetchEnd
from kvagent.visible.figures import FIGURES, Figure, Scope, Status, Values

__all__ = ["SCOPES", "TIMINGS", "Histograms", "make_registry", "metrics_markdown"]

log = logging.getLogger("kvagent.visible")

SCOPES = {"rank": "this rank", "engine": "the whole engine, at its leader"}

SECONDS = (1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)
BYTES = tuple(float(4**power) for power in range(6, 20))  # 4 KiB to 256 GiB
COUNT = tuple(float(4**power) for power in range(13))


class Timing(NamedTuple):
    """A histogram of good fetches, and what of a `FetchStats` it holds."""

    name: str
    field: str
    buckets: tuple[float, ...]
    text: str


TIMINGS = (
    Timing("kvagent_fetch_seconds", "seconds", SECONDS, "seconds from fetch() to the verdict"),
    Timing(
        "kvagent_fetch_wait_seconds",
        "wait",
        SECONDS,
        "seconds of handshake and queue before the first post, at the slowest rank",
    ),
    Timing(
        "kvagent_fetch_post_seconds",
        "post",
        SECONDS,
        "seconds inside NIXL's post call, at the slowest rank",
    ),
    Timing(
        "kvagent_fetch_wire_seconds",
        "wire",
        SECONDS,
        "seconds from the first post to the last byte, at the slowest rank",
    ),
    Timing(
        "kvagent_fetch_completion_seconds",
        "validate",
        SECONDS,
        "seconds from the last rank's last byte to the producer's verdict",
    ),
    Timing("kvagent_fetch_bytes", "bytes", BYTES, "bytes of a fetch"),
    Timing("kvagent_fetch_descriptors", "descriptors", COUNT, "descriptors of a fetch"),
)


class Histograms:
    """Good fetches of the whole engine. The objects are in no registry until there is one."""

    def __init__(self) -> None:
        self.by_field = {
            timing.field: Histogram(
                timing.name,
                _help(f"Good fetches: {timing.text}", "engine"),
                buckets=timing.buckets,
                registry=None,
            )
            for timing in TIMINGS
        }

    def observe(self, end: FetchEnd) -> None:
        if end.stats is not None:
            for field, histogram in self.by_field.items():
                histogram.observe(getattr(end.stats, field))


def _help(text: str, scope: Scope) -> str:
    return f"{text[0].upper()}{text[1:]} ({SCOPES[scope]})"


class _Scrape:
    """Makes the figures, on the agent's loop. One that fails leaves out itself alone."""

    def __init__(self, status: Callable[[], Status], failed: Callable[[], None]) -> None:
        self._status = status
        self._failed = failed

    def collect(self) -> Iterator[Metric]:
        status = self._status()
        for figure in FIGURES:
            try:
                yield _family(figure, figure.values(status))
            except Exception:
                self._failed()
                log.exception("metric %s", figure.name)


def _family(figure: Figure, values: Values) -> Metric:
    kind = GaugeMetricFamily if figure.kind == "gauge" else CounterMetricFamily
    family = kind(figure.name, _help(figure.text, figure.scope), labels=figure.labels)
    for labels, value in values.items():
        family.add_metric(labels, float(value))
    return family


def make_registry(
    histograms: Histograms, status: Callable[[], Status], failed: Callable[[], None]
) -> CollectorRegistry:
    """All metrics of one agent. `failed` is called when one cannot be made."""
    registry = CollectorRegistry(auto_describe=False)
    for histogram in histograms.by_field.values():
        registry.register(histogram)
    registry.register(_Scrape(status, failed))
    ProcessCollector(registry=registry)
    return registry


def metrics_markdown() -> str:
    """The README's table."""
    lines = ["| metric | labels | scope | meaning |", "|---|---|---|---|"]
    for figure in FIGURES:
        name = f"{figure.name}_total" if figure.kind == "counter" else figure.name
        labels = ", ".join(f"`{label}`" for label in figure.labels)
        lines.append(f"| `{name}` | {labels} | {figure.scope} | {figure.text} |")
    lines += [
        f"| `{timing.name}` (histogram) | | engine | good fetches: {timing.text} |"
        for timing in TIMINGS
    ]
    return "\n".join(lines)
