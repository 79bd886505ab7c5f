"""What happens to requests when servers and sidecars die, and when leases lapse."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

from tests.vllm_cases import ANSWER, Result, answers, compared
from tests.vllm_pairs import KVAgentPair, Pair
from tests.vllm_servers import Answer, Prompt, together, wait_for

SLOW = {"piece_bytes": 4096, "inflight_bytes": 4096}
"""Settings of a sidecar that reads a prompt in a second, not in milliseconds."""

Asked = tuple[Prompt, Answer]
"""A prompt, and what vLLM alone answers."""


# ---------------------------------------------------------------- deaths


def killed_prefill(pair: Pair, several: Sequence[Asked], fresh: Asked) -> Result:
    """The prefill server dies when it has computed all prompts and the first are being read. It
    starts again, and the decode server, which did not, is to read from it."""
    if isinstance(pair, KVAgentPair):
        slow_down(pair)
    moved_one(pair)  # the servers know each other by now
    prompts, expected = zip(*several, strict=True)
    tickets = [pair.prefill.ticket(prompt) for prompt in prompts]
    failed = pair.failures()
    got: list[Answer] = []
    thread = threading.Thread(
        target=lambda: got.extend(
            together(
                [
                    lambda p=p, t=t: pair.decode.answer(p, ANSWER, kv_transfer_params=t)
                    for p, t in zip(prompts, tickets, strict=True)
                ]
            )
        )
    )
    thread.start()
    if isinstance(pair, KVAgentPair):
        wait_for_read(pair)
    else:
        time.sleep(0.05)
    pair.prefill.process.kill()
    thread.join()
    result = {**compared(got, expected), "failed transfers": int(pair.failures() - failed)}
    pair.prefill = pair.prefill.restarted().wait()
    return _after_death(pair, result, fresh)


def killed_sidecar(pair: KVAgentPair, side: str, several: Sequence[Asked], fresh: Asked) -> Result:
    """A sidecar dies while it reads, or is read from; requests come through the proxy."""
    slow_down(pair)
    prompts, expected = zip(*several, strict=True)
    failed = pair.failures()
    got: list[Answer] = []
    thread = threading.Thread(target=lambda: got.extend(answers(pair.proxy, prompts)))
    thread.start()
    wait_for_read(pair)
    pair.kill_sidecar(side)
    thread.join()
    result = {**compared(got, expected), "failed transfers": int(pair.failures() - failed)}
    pair.start_sidecar(side)
    pair.wait_ready(side)
    wait_for("a transfer", lambda: moved_one(pair))
    return _after_death(pair, result, fresh)


def _after_death(pair: Pair, result: Result, fresh: Asked) -> Result:
    alive = pair.decode.healthy() and pair.decode.process.running()
    before = pair.fetches()
    ticket = pair.prefill.ticket(fresh[0])
    right = fresh[1].agrees(pair.decode.answer(fresh[0], ANSWER, kv_transfer_params=ticket))
    again = right and pair.fetches() == before + 1
    return {
        "ok": result["right"] and alive and again,
        **result,
        "decode server alive": alive,
        "transfers again": again,
    }


def slow_down(pair: KVAgentPair) -> None:
    pair.start_sidecar("decode", **SLOW)
    pair.wait_ready("decode")
    wait_for("a transfer", lambda: moved_one(pair))


def wait_for_read(pair: KVAgentPair) -> None:
    reading = lambda: pair.sidecar_metric("decode", "kvagent_fetches", state="reading")  # noqa: E731
    wait_for("a read", reading, 120)


_probe = iter(range(20000, 40000))


def moved_one(pair: Pair) -> bool:
    """Whether a short prompt is moved: whatever was restarted has been found again."""
    prompt = [next(_probe)] * 40
    before = pair.fetches()
    pair.proxy.complete(prompt, 1)
    return pair.fetches() > before


# ---------------------------------------------------------------- leases


def expired(pair: Pair, asked: Asked, others: Sequence[Prompt], lease: float) -> Result:
    """A ticket that is used when its lease has lapsed and its blocks hold something else. By the
    failure policy `recompute` the answer is right, by `fail` it is an error."""
    prompt, expected = asked
    ticket = pair.prefill.ticket(prompt)
    time.sleep(lease + 2)
    for other in others:
        pair.prefill.complete(other, 1)
    good, bad = pair.fetches(), pair.failures()
    answer = pair.decode.answer(prompt, ANSWER, kv_transfer_params=ticket)
    moved, failed = int(pair.fetches() - good), int(pair.failures() - bad)
    result = compared([answer], [expected])
    served = result["right"] if pair.failure_policy == "recompute" else answer.error == "status 500"
    return {
        "ok": served and (moved, failed) == (0, 1) and pair.decode.healthy(),
        "answer": answer.error or ("right" if result["right"] else "wrong text"),
        "counted good": moved,
        "counted failed": failed,
    }


def queued(pair: Pair, asked: Asked, busy: Sequence[Prompt], lease: float) -> Result:
    """A request with a ticket waits in the decode server's queue for more than two leases. The
    requests before it are then aborted, as by clients that went away."""
    prompt, expected = asked
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
    good, bad = pair.fetches(), pair.failures()
    got: list[Answer] = []
    ask: Callable[[], None] = lambda: got.append(  # noqa: E731
        pair.decode.answer(prompt, ANSWER, kv_transfer_params=ticket)
    )
    waiter = threading.Thread(target=ask)
    waiter.start()
    time.sleep(2 * lease + 1)
    waited = not got and pair.fetches() == good
    leave.set()
    for thread in (*stayers, waiter):
        thread.join()
    result = compared(got, [expected])
    moved, failed = int(pair.fetches() - good), int(pair.failures() - bad)
    return {
        "ok": waited and result["right"] and (moved, failed) == (1, 0),
        "waited": waited,
        "right text": result["right"],
        "counted good": moved,
        "counted failed": failed,
    }
