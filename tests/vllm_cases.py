"""What is compared and shown with real vLLM servers: one function for each case.

A case returns what it measured; `ok` says whether what must hold did. Prompts are token ids, and
no two begin alike: what is cached from one case must not serve another.
"""

from __future__ import annotations

import itertools
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tests.vllm_servers import (
    ROOT,
    Http,
    KVAgentPair,
    NixlPair,
    Pair,
    Prompt,
    together,
    wait_for,
)

ANSWER = 24
"""Tokens of each answer that is compared."""
FETCHES = {
    "KVAgent": "vllm:kvagent_fetch_seconds_count",
    "Nixl": "vllm:nixl_xfer_time_seconds_count",
}
FAILURES = {
    "KVAgent": "vllm:kvagent_failed_transfers_total",
    "Nixl": "vllm:nixl_num_failed_transfers_total",
}
SIDES = ("worker", "scheduler")
"""Of a connector; see tests/vllm_probe.py."""
SLOW = {"piece_bytes": 4096, "inflight_bytes": 4096}
"""Settings of a sidecar that reads a prompt in a second, not in milliseconds."""
SHORT_LEASE = 5

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


def name_of(pair: Pair) -> str:
    return "Nixl" if isinstance(pair, NixlPair) else "KVAgent"


def answers(server: Http, prompts: Sequence[Prompt]) -> list[str]:
    """Of all at the same time."""
    return together([lambda p=p: server.text(p, ANSWER) for p in prompts])


def fetches(pair: Pair) -> float:
    return pair.decode.metric(FETCHES[name_of(pair)])


def failures(pair: Pair, **labels: str) -> float:
    return pair.decode.metric(FAILURES[name_of(pair)], **labels)


# ---------------------------------------------------------------- the same text


def same_text(pair: Pair, prompts: Sequence[Prompt], expected: Sequence[str]) -> Result:
    """All prompts at once, through the proxy."""
    before, begin = fetches(pair), time.monotonic()
    texts = answers(pair.proxy, prompts)
    seconds = time.monotonic() - begin
    equal = sum(text == want for text, want in zip(texts, expected, strict=True))
    moved = fetches(pair) - before
    return {
        "ok": equal == moved == len(prompts),
        "prompts": len(prompts),
        "equal": equal,
        "transfers": int(moved),
        "failed": int(failures(pair)),
        "seconds": round(seconds, 1),
    }


def embedded(pair: KVAgentPair, prompt: Prompt, expected: str) -> Result:
    """The prefill server runs the agent in its worker; the decode server has its sidecar."""
    pair.embed_prefill()
    before = fetches(pair)
    ticket = pair.prefill.ticket(prompt)
    right = pair.decode.text(prompt, ANSWER, kv_transfer_params=ticket) == expected
    moved = fetches(pair) - before
    return {"ok": right and moved == 1, "right text": right, "transfers": int(moved)}


# ---------------------------------------------------------------- steps while transfers come in


def steps(pair: Pair, prompts: Sequence[Prompt], long_one: Prompt) -> Result:
    """One decode runs while the prompts, which are computed already, are pulled one by one.
    Milliseconds between its tokens, and microseconds that the connector took of each step."""
    tickets = [pair.prefill.ticket(prompt) for prompt in prompts]
    times: list[float] = []
    stop = threading.Event()

    def stream() -> None:
        for moment in pair.decode.token_times(long_one, 3000):
            times.append(moment)
            if stop.is_set():
                return

    thread = threading.Thread(target=stream)
    thread.start()
    wait_for("the long decode", lambda: len(times) > 40)
    logs = [Path(f"{pair.step_log('decode')}.{side}") for side in SIDES]
    before, moved = [len(_lines(log)) for log in logs], fetches(pair)
    begin = time.perf_counter()
    for prompt, ticket in zip(prompts, tickets, strict=True):
        pair.decode.text(prompt, 2, kv_transfer_params=ticket)
        time.sleep(0.2)
    end = time.perf_counter()
    noted = [_lines(log)[skip:] for log, skip in zip(logs, before, strict=True)]
    moved = fetches(pair) - moved
    stop.set()
    thread.join()
    gaps = [(b - a) * 1e3 for a, b in itertools.pairwise(times) if a >= begin and b <= end]
    quiet = [(b - a) * 1e3 for a, b in itertools.pairwise(times[10:41])]
    return {
        "ok": moved == len(prompts),
        "transfers": int(moved),
        "quiet_gap_ms": {"p50": round(statistics.median(quiet), 1)},
        "gap_ms": _spread(gaps),
        **_step_spreads(series := _step_series(noted)),
        "gaps": gaps,
        **series,
    }


def _step_series(noted: Sequence[Sequence[tuple[float, float]]]) -> dict[str, list[float]]:
    """Microseconds of each step: by the clock, and of processor time."""
    return {
        f"{side}{unit}": [line[column] for line in lines]
        for side, lines in zip(SIDES, noted, strict=True)
        for column, unit in enumerate(("", "_cpu"))
    }


def _step_spreads(series: dict[str, list[float]]) -> Result:
    return {f"{name}_us": _spread(values) for name, values in series.items()}


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
    """Several runs of `steps` as one; those that failed are left out."""
    results = [result for result in results if "gaps" in result]
    if not results:
        return {"ok": False}
    names = ["gaps", *(f"{side}{unit}" for side in SIDES for unit in ("", "_cpu"))]
    series = {name: [value for result in results for value in result[name]] for name in names}
    return {
        "ok": all(result["ok"] for result in results),
        "runs": len(results),
        "transfers": sum(result["transfers"] for result in results),
        "gap_ms": _spread(series.pop("gaps")),
        **_step_spreads(series),
    }


# ---------------------------------------------------------------- deaths


def killed(
    pair: KVAgentPair,
    prompts: Sequence[Prompt],
    expected: Sequence[str],
    fresh: tuple[Prompt, str],
    kill: Callable[[], None],
    heal: Callable[[], None],
) -> Result:
    """Kills something while a read is under way; then heals it and sends one request more."""
    pair.start_sidecar("decode", **SLOW)
    pair.wait_ready("decode")
    wait_for("a transfer", lambda: _transfers_again(pair))
    texts: list[str] = []
    failed_before = failures(pair)
    thread = threading.Thread(target=lambda: texts.extend(answers(pair.proxy, prompts)))
    thread.start()
    reading = lambda: pair.status["decode"].metric("kvagent_fetches", state="reading")  # noqa: E731
    wait_for("a read", reading, 120)
    kill()
    thread.join()
    equal = sum(text == want for text, want in zip(texts, expected, strict=True))
    alive = pair.decode.healthy() and pair.decode.process.running()
    failed = failures(pair) - failed_before
    heal()
    before = fetches(pair)
    ticket = pair.prefill.ticket(fresh[0])
    again = pair.decode.text(fresh[0], ANSWER, kv_transfer_params=ticket) == fresh[1]
    return {
        "ok": equal == len(prompts) and alive and again and fetches(pair) == before + 1,
        "prompts": len(prompts),
        "equal": equal,
        "failed transfers": int(failed),
        "decode server alive": alive,
        "transfers again": fetches(pair) == before + 1,
    }


_probe = iter(range(20000, 40000))


def _transfers_again(pair: KVAgentPair) -> bool:
    """Whether a short prompt is moved: sidecars that were restarted have found their engine."""
    prompt = [next(_probe)] * 40
    before = fetches(pair)
    pair.proxy.text(prompt, 1)
    return fetches(pair) > before


def killed_prefill(
    pair: KVAgentPair, prompts: Sequence[Prompt], expected: Sequence[str], fresh: tuple[Prompt, str]
) -> Result:
    def heal() -> None:
        pair.prefill = pair.prefill.restarted().wait()

    return killed(pair, prompts, expected, fresh, pair.prefill.process.kill, heal)


def killed_sidecar(
    pair: KVAgentPair,
    side: str,
    prompts: Sequence[Prompt],
    expected: Sequence[str],
    fresh: tuple[Prompt, str],
) -> Result:
    def heal() -> None:
        pair.start_sidecar(side)
        pair.wait_ready(side)
        wait_for("a transfer", lambda: _transfers_again(pair))

    return killed(pair, prompts, expected, fresh, lambda: pair.sidecars[side].kill(), heal)


# ---------------------------------------------------------------- leases


def expired(
    pair: Pair, prompt: Prompt, expected: str, others: Sequence[Prompt], lease: float
) -> Result:
    """A ticket that is used when its lease has lapsed and its blocks hold something else."""
    ticket = pair.prefill.ticket(prompt)
    time.sleep(lease + 2)
    for other in others:
        pair.prefill.text(other, 1)
    good, bad = fetches(pair), failures(pair)
    text = pair.decode.text(prompt, ANSWER, kv_transfer_params=ticket)
    result = {
        "right text": text == expected,
        "counted good": int(fetches(pair) - good),
        "counted failed": int(failures(pair) - bad),
    }
    return {"ok": result == {"right text": True, "counted good": 0, "counted failed": 1}, **result}


def queued(
    pair: Pair, prompt: Prompt, expected: str, busy: Sequence[Prompt], lease: float
) -> Result:
    """A request with a ticket waits in the decode server's queue for more than two leases. The
    requests before it are then aborted, as by clients that went away."""
    leave = threading.Event()

    def stay(long_one: Prompt) -> None:
        for _ in pair.decode.token_times(long_one, 3000):
            if leave.is_set():
                return

    stayers = [threading.Thread(target=stay, args=(one,)) for one in busy]
    for stayer in stayers:
        stayer.start()
    wait_for("a full server", lambda: pair.decode.metric("vllm:num_requests_running") == len(busy))
    ticket = pair.prefill.ticket(prompt)
    good, bad = fetches(pair), failures(pair)
    texts: list[str] = []
    waiter = threading.Thread(
        target=lambda: texts.append(
            pair.decode.text(prompt, ANSWER, kv_transfer_params=ticket),
        )
    )
    waiter.start()
    time.sleep(2 * lease + 1)
    waited = not texts and fetches(pair) == good
    leave.set()
    for thread in (*stayers, waiter):
        thread.join()
    result = {
        "right text": texts == [expected],
        "counted good": int(fetches(pair) - good),
        "counted failed": int(failures(pair) - bad),
    }
    good_result = {"right text": True, "counted good": 1, "counted failed": 0}
    return {"ok": waited and result == good_result, "waited": waited, **result}
