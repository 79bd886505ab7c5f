"""Runs a part of the doctor in a process of its own, which may crash or hang.

UCX writes its log to standard output. The child's last line is its result as JSON; what is before
it is UCX's.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import msgspec

__all__ = ["Outcome", "run_child", "ucx_warnings"]

T = TypeVar("T")

CHILD_SECONDS = 120.0
_WARNING = re.compile(r"UCX +(?:WARN|ERROR|FATAL) +(.*)")


@dataclass(frozen=True)
class Outcome(Generic[T]):
    """`value`, or why there is none."""

    value: T | None
    error: str
    log: str


def run_child(
    module: str,
    arguments: Sequence[str],
    kind: type[T],
    environ: Mapping[str, str],
    timeout: float = CHILD_SECONDS,
) -> Outcome[T]:
    """`python -m kvagent.doctor.MODULE`; `environ` on top of our own environment."""
    try:
        process = subprocess.Popen(
            [sys.executable, "-m", f"kvagent.doctor.{module}", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            env={**os.environ, **environ},
            start_new_session=True,
        )
    except OSError as error:
        return Outcome(None, f"it did not start: {error}", "")
    try:
        out, err = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # and what it started
        out, err = process.communicate()
        return Outcome(None, f"no answer within {timeout:g} s", out + err)
    except BaseException:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        raise
    log, _, last = out.rstrip("\n").rpartition("\n")
    try:
        return Outcome(msgspec.json.decode(last, type=kind), "", log)
    except (msgspec.DecodeError, msgspec.ValidationError):
        return Outcome(None, _end(process.returncode, err), out + err)


def _end(status: int, err: str) -> str:
    words = err.strip().rpartition("\n")[2]
    if status < 0:
        return f"it was killed by {signal.Signals(-status).name}"
    return f"it ended with {status}: {words}" if words else f"it ended with {status}"


def ucx_warnings(log: str) -> tuple[str, ...]:
    """What UCX complains of in its log, each once."""
    return tuple(dict.fromkeys(match.strip() for match in _WARNING.findall(log)))
