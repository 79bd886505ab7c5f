"""OpenTelemetry spans of fetches, which join the trace that the ticket names.

A span is made when its fetch has ended, with the times that were measured, so there is none to look
after meanwhile. Where the process has not loaded OpenTelemetry nothing happens, and nothing is
imported. `start` loads and sets it up for a sidecar whose environment says where spans go;
embedded, the engine's own set-up is used.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Mapping
from typing import Any

from kvagent.visible.events import FetchEnd

__all__ = ["start", "trace_end"]

log = logging.getLogger("kvagent.visible")

ENDPOINTS = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")


def start(environ: Mapping[str, str]) -> None:
    """Sends spans where OpenTelemetry's own variables say; does nothing when they say nothing."""
    if not any(environ.get(name) for name in ENDPOINTS):
        return
    try:
        from opentelemetry import trace
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        log.warning("no spans, for want of a package (pip install 'kvagent[otel]'): %s", error)
        return
    name = {"service.name": environ.get("OTEL_SERVICE_NAME", "kvagent")}
    provider = TracerProvider(resource=Resource.create(name))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    trace.set_tracer_provider(provider)


def trace_end(end: FetchEnd) -> None:
    """One span for the fetch, and below it one for each of its phases."""
    trace: Any = sys.modules.get("opentelemetry.trace")
    if trace is None:
        return
    ended = time.time_ns()
    began = ended - _nanoseconds(end.seconds)
    tracer = trace.get_tracer("kvagent")
    attributes = {
        "kvagent.request_id": end.request_id,
        "kvagent.transfer_id": end.transfer_id,
        "kvagent.peer": end.peer,
        "kvagent.tokens": end.num_tokens,
        "kvagent.bytes": end.nbytes,
        "kvagent.cause": end.name,
        "server.address": end.address,
    }
    span = tracer.start_span(
        "kvagent.fetch",
        context=_parent(trace, end.traceparent),
        kind=trace.SpanKind.CLIENT,
        start_time=began,
        attributes=attributes,
    )
    if end.cause:
        span.set_status(trace.Status(trace.StatusCode.ERROR, end.cause))
    if end.stats is not None:
        inside = trace.set_span_in_context(span)
        at = began
        for phase in ("wait", "wire", "validate"):
            length = _nanoseconds(getattr(end.stats, phase))
            if phase == "validate":
                at = ended - length
            child = tracer.start_span(f"kvagent.{phase}", context=inside, start_time=at)
            at += length
            child.end(at)
    span.end(ended)


def _nanoseconds(seconds: float) -> int:
    return int(seconds * 1e9)


def _parent(trace: Any, traceparent: str) -> Any:
    """A context with the remote span of a `traceparent` that was checked; an empty one without."""
    from opentelemetry.context import Context

    if not traceparent:
        return Context()
    _, trace_id, span_id, flags = traceparent.split("-")
    remote = trace.SpanContext(
        trace_id=int(trace_id, 16),
        span_id=int(span_id, 16),
        is_remote=True,
        trace_flags=trace.TraceFlags(int(flags, 16)),
    )
    return trace.set_span_in_context(trace.NonRecordingSpan(remote), Context())
