"""A client of the completions API that streams: one prompt in, one `Answer` out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import httpx
import msgspec

from kvagent.demo.report import Answer

__all__ = ["ask"]


async def ask(
    client: httpx.AsyncClient,
    url: str,
    prompt: str,
    max_tokens: int,
    on_tokens: Callable[[int], None],
) -> Answer:
    """Greedy. `on_tokens` is called with the number of tokens so far. A server that refuses,
    breaks off or cannot be reached is an answer too: its `error` says so."""
    answer = Answer()
    body = {
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": 0,
        "stream": True,
        "return_token_ids": True,
    }
    ended = False
    try:
        async with client.stream("POST", f"{url}/v1/completions", json=body) as response:
            if response.status_code != 200:
                text = (await response.aread()).decode(errors="replace")
                answer.error = f"HTTP {response.status_code}: {text}"
                return answer
            answer.prefill = response.headers.get("x-kvagent-prefill", "")
            waited = response.headers.get("x-kvagent-prefill-ms")
            answer.prefill_ms = float(waited) if waited else None
            async for line in response.aiter_lines():
                if line == "data: [DONE]":
                    ended = True
                elif line.startswith("data: "):
                    add_event(answer, msgspec.json.decode(line[len("data: ") :]))
                    on_tokens(len(answer.token_ids))
    except (httpx.HTTPError, msgspec.DecodeError) as error:
        answer.error = f"{type(error).__name__}: {error}"
    if not ended and not answer.error:
        answer.error = "the answer broke off"
    return answer


def add_event(answer: Answer, event: dict[str, Any]) -> None:
    """One event of the stream; the last one tells about the transfer."""
    if "error" in event:
        answer.error = str(event["error"].get("message", event["error"]))
        return
    choice = event["choices"][0]
    answer.text += choice["text"]
    answer.token_ids += choice.get("token_ids", ())
    answer.prompt_tokens = event.get("usage", {}).get("prompt_tokens", 0)
    answer.kv_transfer = event.get("kv_transfer") or {}
