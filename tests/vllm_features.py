"""Prefix hits, preemption, chunks, aborts, unequal TP, and the routers that vLLM's users have.

What vLLM alone answers is asked of the prefill server, without a ticket.
"""

from __future__ import annotations

import functools
import uuid
from typing import Any

from tests.vllm_cases import Prompts, Result, answers, compared
from tests.vllm_pairs import KVAgentPair, Pair
from tests.vllm_servers import REMOTE_DECODE, Http, Prompt, wait_for

BLOCK = 128
"""Tokens of a block of vLLM's CPU backend."""
PREFILL_OPTIONS = ["--max-model-len", "2048", "--max-num-batched-tokens", "512"]
"""A prompt of 1,900 tokens takes four steps."""
DECODE_OPTIONS = ["--max-model-len", "2048", "--num-gpu-blocks-override", "20"]
"""Room for one such prompt, or for four of 450 tokens and not much of their answers."""


def chunked(pair: Pair, prompts: Prompts) -> Result:
    """Prompts that the prefill server computes in several steps, at once."""
    asked = prompts.spread(3, 600, 1900)
    expected = answers(pair.prefill, asked)
    before = pair.fetches()
    result = compared(answers(pair.proxy, asked), expected)
    moved = int(pair.fetches() - before)
    return {"ok": result["right"] and moved == len(asked), **result, "transfers": moved}


def prefix_hits(pair: KVAgentPair, prompts: Prompts) -> Result:
    """A prompt, one that begins with its first four blocks, and one that ends with the first token
    after them. Nothing, a part, and all that is worth a transfer is cached on the decode side."""
    first = prompts.take(6 * BLOCK)
    partial = [*first[: 4 * BLOCK], *prompts.take(300)]
    full = first[: 4 * BLOCK + 1]
    results: dict[str, Any] = {}
    ok = True
    per_block = 0.0
    for name, prompt, blocks in (("none", first, 6), ("partial", partial, 3), ("full", full, 0)):
        before, unneeded = _moved_bytes(pair), _not_needed(pair)
        right = _asked(pair, prompt)
        moved = _moved_bytes(pair) - before
        per_block = per_block or moved / blocks
        released = int(_not_needed(pair) - unneeded)
        ok &= right and moved == blocks * per_block and released == (name == "full")
        results[f"{name} cached"] = f"{moved / per_block:g} blocks read" + (
            ", the ticket released" if released else ""
        )
    return {"ok": ok, **results}


def preemption(pair: Pair, prompts: Prompts) -> Result:
    """More is decoded at once than the decode server has blocks for: vLLM drops a request's blocks
    and starts it again. Its ticket is used up by then."""
    asked = prompts.spread(4, 420, 450)
    length = 220
    expected = answers(pair.prefill, asked, length)
    before = pair.decode.metric("vllm:num_preemptions_total")
    moved = pair.fetches()
    result = compared(answers(pair.proxy, asked, length), expected)
    preempted = int(pair.decode.metric("vllm:num_preemptions_total") - before)
    moved = int(pair.fetches() - moved)
    return {
        "ok": result["right"] and preempted > 0 and moved == len(asked),
        **result,
        "preempted": preempted,
        "transfers": moved,
    }


def aborts(pair: KVAgentPair, prompts: Prompts) -> Result:
    """Clients go away: in the prefill, with a ticket in hand, and while the prompt is fetched. Then
    both servers must have all their blocks, which a prompt that needs most of them shows."""
    running = lambda: pair.prefill.metric("vllm:num_requests_running")  # noqa: E731
    for _ in range(3):
        pair.prefill.leave(prompts.take(1900), until=running, kv_transfer_params=REMOTE_DECODE)
        wait_for("the abort", lambda: not running())

    for _ in range(2):
        pair.prefill.ticket(prompts.take(500))
    fetching = functools.partial(pair.sidecar_metric, "decode", "kvagent_fetches")
    failed = pair.failures()
    for _ in range(3):
        prompt = prompts.take(800)
        ticket = pair.prefill.ticket(prompt)
        pair.sidecars["prefill-0"].stop()
        pair.decode.leave(prompt, until=fetching, kv_transfer_params=ticket)
        wait_for("the abort", lambda: not fetching() or fetching(state="draining"))
        pair.sidecars["prefill-0"].resume()
        wait_for("the end of the fetch", lambda: not fetching())
    failed = int(pair.failures() - failed)

    leases = functools.partial(pair.sidecar_metric, "prefill", "kvagent_leases")
    wait_for(
        "the end of all leases",
        lambda: not leases(state="offered") and not leases(state="claimed"),
        pair.lease_seconds + 20,
    )
    right = _asked(pair, prompts.take(1900))
    return {
        "ok": right and failed == 0,
        "left in the prefill": 3,
        "left with a ticket": 2,
        "left while it was fetched": 3,
        "counted as failed": failed,
        "a full cache's prompt after it": right,
    }


def unequal_tp(pair: Pair, prompts: Prompts) -> Result:
    asked = prompts.spread(3, 100, 400)
    expected = answers(pair.prefill, asked)
    before = pair.fetches()
    result = compared(answers(pair.proxy, asked), expected)
    moved = int(pair.fetches() - before)
    return {"ok": result["right"] and moved == len(asked), **result, "transfers": moved}


# ---------------------------------------------------------------- routers


def routed(pair: Pair, router: Http, prompts: Prompts) -> Result:
    """Through another router than ours, at once."""
    asked = prompts.spread(4, 100, 700)
    expected = answers(pair.prefill, asked)
    before = pair.fetches()
    result = compared(answers(router, asked), expected)
    moved = int(pair.fetches() - before)
    return {"ok": result["right"] and moved == len(asked), **result, "transfers": moved}


class ToyProxy(Http):
    """The requests that `toy_proxy_server.py` of vLLM's tests makes: the client's body with all six
    keys of `kv_transfer_params` to the prefill server, and with what that answered to the decode
    server, both under one `X-Request-Id`."""

    def __init__(self, prefill: Http, decode: Http) -> None:
        super().__init__(decode.port)
        self._prefill, self._decode = prefill, decode

    def complete(self, prompt: Prompt, max_tokens: int, **fields: Any) -> dict[str, Any]:
        headers = {"X-Request-Id": str(uuid.uuid4())}
        empty = dict.fromkeys(
            ("remote_engine_id", "remote_block_ids", "remote_host", "remote_port")
        )
        first = self._prefill.complete(
            prompt, 1, headers=headers, kv_transfer_params={**REMOTE_DECODE, **empty}, **fields
        )
        ticket = first["kv_transfer_params"]
        return self._decode.complete(
            prompt, max_tokens, headers=headers, kv_transfer_params=ticket, **fields
        )


# ---------------------------------------------------------------- inside


def _asked(pair: Pair, prompt: Prompt) -> bool:
    """Whether the answer through the proxy is that of vLLM alone."""
    return bool(compared(answers(pair.proxy, [prompt]), answers(pair.prefill, [prompt]))["right"])


def _moved_bytes(pair: Pair) -> float:
    return pair.decode.metric("vllm:kvagent_fetch_bytes_sum")


def _not_needed(pair: Pair) -> float:
    return pair.decode.metric("vllm:kvagent_tickets_not_needed_total")
