"""What is shown with real vLLM servers: the same text, and what transfers cost the engine's steps.

A case returns what it measured; `ok` says whether what must hold did. Prompts are token ids, and
no two begin alike, so that what is cached from one case does not serve another.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import statistics
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

from tests.vllm_pairs import Pair
from tests.vllm_servers import ROOT, Answer, Http, Prompt, Server, together, wait_for

ANSWER = 24
"""Tokens of each answer that is compared."""
ROUNDING = 1e-3
"""Two tokens whose log probabilities are this close change places with the composition of the
batch: sums are taken in another order."""
SIDES = ("worker", "scheduler")
"""Of a connector; see tests/vllm_probe.py."""

OTHERS = "other work, of the machine"

Result = dict[str, Any]


class Prompts:
    """Pieces of the project's README, each with a first token of its own."""

    def __init__(self, server: Http) -> None:
        body = {"model": "model", "prompt": (ROOT / "README.md").read_text()}
        self._tokens: list[int] = server.client.post("/tokenize", json=body).json()["tokens"]
        self._taken = 0

    def take(self, length: int) -> list[int]:
        self._taken += 1
        start = self._taken * 97 % (len(self._tokens) - length)
        return [1000 + self._taken, *self._tokens[start : start + length - 1]]

    def spread(self, count: int, shortest: int, longest: int) -> list[list[int]]:
        step = (longest - shortest) / max(1, count - 1)
        return [self.take(round(shortest + i * step)) for i in range(count)]


def answers(server: Http, prompts: Sequence[Prompt], length: int = ANSWER) -> list[Answer]:
    """Of all at the same time."""
    return together([lambda p=p: server.answer(p, length) for p in prompts])


def compared(got: Sequence[Answer], expected: Sequence[Answer]) -> Result:
    """How many answers are those of vLLM alone: token by token, or but for rounding."""
    pairs = list(zip(got, expected, strict=True))
    equal = sum(want.agrees(have) for have, want in pairs)
    near = sum(want.agrees(have, ROUNDING) for have, want in pairs)
    errors = sorted({have.error for have, _ in pairs if have.error})
    return {
        "prompts": len(pairs),
        "equal": equal,
        **({"equal but for rounding": near - equal} if near > equal else {}),
        **({"errors": ", ".join(errors)} if errors else {}),
        "right": near == len(pairs),
    }


# ---------------------------------------------------------------- the same text


def same_text(pair: Pair, prompts: Sequence[Prompt], expected: Sequence[Answer]) -> Result:
    """All prompts at once, through the proxy; and what vLLM's log and metrics say of it."""
    before, begin = pair.fetches(), time.monotonic()
    got = answers(pair.proxy, prompts)
    seconds = time.monotonic() - begin
    moved = pair.fetches() - before
    line = wait_for("the log line of the transfers", lambda: _transfer_line(pair))
    result = compared(got, expected)
    return {
        "ok": result["right"] and moved == len(prompts),
        **result,
        "transfers": int(moved),
        "failed": int(pair.failures()),
        "seconds": round(seconds, 1),
        "log line": line,
    }


def _transfer_line(pair: Pair) -> str:
    lines = pair.decode.process.log.read_text().splitlines()
    mark = "KV Transfer metrics: "
    return next((line.split(mark)[1][:200] for line in reversed(lines) if mark in line), "")


# ---------------------------------------------------------------- steps while transfers come in


def steps(pair: Pair, pulled: Prompt, long_one: Prompt, pulls: int = 20) -> Result:
    """One decode runs while a prompt that is computed already is pulled again and again, which
    takes a decode server without prefix caching. The first time is before it, so that the servers
    know each other. The thread that decodes has its core to itself, as where such servers are run
    in earnest. Milliseconds between its tokens, and microseconds that the connector took of each
    step."""
    first, *tickets = [pair.prefill.ticket(pulled) for _ in range(pulls + 1)]
    pair.decode.complete(pulled, 2, kv_transfer_params=first)
    times: list[float] = []
    stop = threading.Event()

    def stream() -> None:
        for moment in pair.decode.token_times(long_one, 3000):
            times.append(moment)
            if stop.is_set():
                return

    _leave_core_to(pair.decode)
    others = OtherWork()
    with contextlib.suppress(TimeoutError):  # then the result shows it
        wait_for("a machine without other work", lambda: others.share(2.0) < 0.05, 60)
    thread = threading.Thread(target=stream)
    thread.start()
    wait_for("the long decode", lambda: len(times) > 60)
    logs = [Path(f"{pair.step_log('decode')}.{side}") for side in SIDES]
    before, moved = [len(_lines(log)) for log in logs], pair.fetches()
    others.start()
    begin = time.perf_counter()
    for ticket in tickets:
        pair.decode.complete(pulled, 2, kv_transfer_params=ticket)
        time.sleep(0.3)
    end = time.perf_counter()
    other_work = others.stop()
    noted = [_lines(log)[skip:] for log, skip in zip(logs, before, strict=True)]
    moved = pair.fetches() - moved
    stop.set()
    thread.join()
    gaps = [(b - a) * 1e3 for a, b in itertools.pairwise(times) if a >= begin and b <= end]
    quiet = [(b - a) * 1e3 for a, b in itertools.pairwise(times[20:61])]
    return {
        "ok": moved == len(tickets),
        "transfers": int(moved),
        OTHERS: round(other_work, 3),
        "no transfers: gap_ms": {"p50": round(statistics.median(quiet), 1)},
        **_spreads(series := {"gap_ms": gaps, **_step_series(noted)}),
        "series": list(series.items()),
    }


class OtherWork:
    """What the machine does besides: the share of its processors that is used by processes which
    this one did not start. Figures from a machine that is shared say little."""

    def share(self, seconds: float) -> float:
        self.start()
        time.sleep(seconds)
        return self.stop()

    def start(self) -> None:
        self._before = self._used()

    def stop(self) -> float:
        total, busy, ours = (b - a for a, b in zip(self._before, self._used(), strict=True))
        return max(0.0, busy - ours) / total

    def _used(self) -> tuple[float, float, float]:
        """Seconds: all, not idle, ours."""
        times = psutil.cpu_times()
        ours = 0.0
        here = psutil.Process()
        for process in (here, *here.children(recursive=True)):
            with contextlib.suppress(psutil.NoSuchProcess):
                ours += sum(process.cpu_times()[:2])
        total = sum(times)
        return total, total - times.idle - times.iowait, ours


def _leave_core_to(server: Server) -> None:
    """Moves all that we have started to core 0, but for the main thread of a server's worker."""
    (worker,) = (
        process
        for process in psutil.Process(server.process.pid).children(recursive=True)
        if process.name() == "VLLM::Worker"
    )
    here = psutil.Process()
    for process in (here, *here.children(recursive=True)):
        for thread in process.threads():
            if thread.id != worker.pid:
                with contextlib.suppress(ProcessLookupError):
                    os.sched_setaffinity(thread.id, {0})


def _step_series(noted: Sequence[Sequence[tuple[float, float]]]) -> dict[str, list[float]]:
    """Of each step: by the clock, and of processor time."""
    return {
        f"{side}{unit}": [line[column] for line in lines]
        for side, lines in zip(SIDES, noted, strict=True)
        for column, unit in enumerate(("_us", "_cpu_us"))
    }


def _spreads(series: dict[str, list[float]]) -> Result:
    return {name: _spread(values) for name, values in series.items()}


def _lines(log: Path) -> list[tuple[float, float]]:
    lines = [line.split() for line in log.read_text().splitlines()]
    return [(float(clock), float(cpu)) for clock, cpu in lines]


def _spread(values: Sequence[float]) -> dict[str, float]:
    ordered = sorted(values)
    at = {"p50": 0.5, "p99": 0.99, "max": 1.0}
    return {
        name: round(ordered[min(len(ordered) - 1, int(part * len(ordered)))], 1)
        for name, part in at.items()
    } | {"count": len(ordered)}


def joined(results: Sequence[Result]) -> Result:
    """Several runs of `steps` as one; those in which the machine did something else too, or that
    failed, are left out."""
    good = [result for result in results if result.get(OTHERS, 1.0) <= 0.05]
    if not good:
        return {"ok": False, "runs left out": len(results)}
    series: dict[str, list[float]] = {}
    for result in good:
        for name, values in result["series"]:
            series.setdefault(name, []).extend(values)
    return {
        "ok": all(result["ok"] for result in good),
        "runs": len(good),
        "runs left out": len(results) - len(good),
        "transfers": sum(result["transfers"] for result in good),
        "p99 of each run: gap_ms": ", ".join(str(result["gap_ms"]["p99"]) for result in good),
        **_spreads(series),
    }


def verdict(ours: Result, theirs: Result) -> Result:
    """What the connector promises of a step: a tenth of the time, and a shorter p99 gap."""
    gap, worker = (
        [result[name]["p99"] for result in (ours, theirs)] for name in ("gap_ms", "worker_us")
    )
    return {
        "ok": gap[0] < gap[1] and worker[0] <= worker[1] / 10,
        "p99 gap, of theirs": round(gap[0] / gap[1], 3),
        "p99 time in a step, of theirs": round(worker[0] / worker[1], 4),
    }
