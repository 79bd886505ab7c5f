"""W3C trace context, as far as a ticket carries it.

Costs nothing where OpenTelemetry is not in use: it is asked only when this process has loaded it.
"""

from __future__ import annotations

import re
import sys
from typing import Any

__all__ = ["checked", "current_traceparent"]

_FORM = re.compile(r"00-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}")


def current_traceparent() -> str:
    """Of the span that the calling thread is in; empty when there is none."""
    trace = sys.modules.get("opentelemetry.trace")
    if trace is None:
        return ""
    try:
        context: Any = trace.get_current_span().get_span_context()
        if not context.is_valid:
            return ""
        return f"00-{context.trace_id:032x}-{context.span_id:016x}-{int(context.trace_flags):02x}"
    except Exception:  # no trace is worth a transfer
        return ""


def checked(value: object) -> str:
    """A traceparent that came from outside, or nothing: a bad one is no reason to refuse."""
    return value if isinstance(value, str) and _FORM.fullmatch(value) else ""
