"""The sidecar's log: one line per record, as text or as JSON, and no floods.

What a peer says may be in a record: control characters are written as escapes, so that nobody
forges a line. Records of an event (`event`) carry their fields, which JSON keeps apart.
"""

from __future__ import annotations

import json
import logging
import re
import sys
import time
from collections import OrderedDict
from collections.abc import Callable
from datetime import datetime, timezone

from kvagent.visible.events import FetchEnd

__all__ = ["FloodFilter", "JsonFormatter", "TextFormatter", "configure", "event", "log_end"]

log = logging.getLogger("kvagent.fetch")

BURST = 20
PERIOD = 10.0
MAX_KINDS = 1024
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")


def configure(level: str, log_format: str) -> None:
    """Sends all of this process's records to standard error."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if log_format == "json" else TextFormatter())
    handler.addFilter(FloodFilter())
    logging.basicConfig(level=level.upper(), handlers=[handler])


def event(logger: logging.Logger, level: int, name: str, **fields: object) -> None:
    """`name` and `field=value` for each field, in one line that is never left out."""
    if not logger.isEnabledFor(level):
        return
    words = " ".join(f"{key}={_word(value)}" for key, value in fields.items())
    logger.log(level, "%s: %s", name, words, extra={"event": name, "fields": fields})


def log_end(end: FetchEnd) -> None:
    """One line for a fetch that failed; at `debug` also for a good one."""
    fields: dict[str, object] = {
        "request": end.request_id,
        "transfer": end.transfer_id,
        "fetch": end.fetch_id,
        "peer": end.peer,
        "address": end.address,
        "tokens": end.num_tokens,
        "bytes": end.nbytes,
        "seconds": round(end.seconds, 6),
    }
    if not end.cause:
        event(log, logging.DEBUG, "fetch done", **fields)
        return
    fields |= {"wanted": end.wanted, "cause": end.name, "stage": end.stage}
    if end.rank is not None:
        fields["rank"] = end.rank
    event(log, logging.WARNING, "fetch failed", **fields, root=end.cause)


def _word(value: object) -> str:
    text = str(value)
    quoted = not text or any(char in ' "=' or not char.isprintable() for char in text)
    return json.dumps(text) if quoted else text


class TextFormatter(logging.Formatter):
    """For people: time, level, logger, message."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802
        return _CONTROL.sub(_escape, super().formatMessage(record))


class JsonFormatter(logging.Formatter):
    """For machines: one JSON object, and an event's fields as its own."""

    def format(self, record: logging.LogRecord) -> str:
        when = datetime.fromtimestamp(record.created, timezone.utc)
        line: dict[str, object] = {
            "time": when.isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": getattr(record, "event", None) or record.getMessage(),
        }
        for key, value in getattr(record, "fields", {}).items():
            line.setdefault(key, value)
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def _escape(found: re.Match[str]) -> str:
    return found[0].encode("unicode_escape").decode()


class FloodFilter(logging.Filter):
    """Lets `BURST` records of a kind through in `PERIOD` seconds. The next one that gets through
    says how many did not. A kind is a line of code; events are exempt."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        self._kinds: OrderedDict[tuple[str, int], _Kind] = OrderedDict()

    def filter(self, record: logging.LogRecord) -> bool:
        if hasattr(record, "event"):
            return True
        now = self._clock()
        key = (record.pathname, record.lineno)
        kind = self._kinds.pop(key, None) or _Kind(now)
        self._kinds[key] = kind
        if len(self._kinds) > MAX_KINDS:
            self._kinds.popitem(last=False)
        if now - kind.since >= PERIOD:
            if kind.left_out:
                record.msg = f"{record.getMessage()} [{kind.left_out} more like it were left out]"
                record.args = ()
            kind.since, kind.passed, kind.left_out = now, 0, 0
        if kind.passed >= BURST:
            kind.left_out += 1
            return False
        kind.passed += 1
        return True


class _Kind:
    __slots__ = ("left_out", "passed", "since")

    def __init__(self, now: float) -> None:
        self.since, self.passed, self.left_out = now, 0, 0
