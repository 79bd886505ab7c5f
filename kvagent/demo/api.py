"""The bodies of OpenAI's completions API, as far as this engine speaks it.

Beyond OpenAI, as in vLLM: `kv_transfer_params` both ways, `return_token_ids`, `ignore_eos`. Ours:
`kv_transfer` in the answer, what was moved and how long things took. Fields that are not known are
ignored; known ones that cannot be honoured are refused.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import msgspec

from kvagent.demo.request import Output, Sampling

__all__ = ["CompletionBody", "answer", "decode_body", "error", "models", "sse"]


class CompletionBody(msgspec.Struct, kw_only=True):
    """`POST /v1/completions`. `prompt` is a text, or one list of token ids."""

    prompt: str | list[int]
    model: str | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stream: bool = False
    n: int | None = None
    top_p: float | None = None
    ignore_eos: bool = False
    return_token_ids: bool = False
    kv_transfer_params: dict[str, Any] | None = None

    def sampling(self) -> Sampling:
        """Temperature is 0 unless given: this engine is for comparing tokens."""
        stop = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return Sampling(
            max_tokens=16 if self.max_tokens is None else self.max_tokens,
            temperature=self.temperature or 0.0,
            seed=self.seed,
            stop=tuple(stop),
            ignore_eos=self.ignore_eos,
        )


def decode_body(data: bytes) -> CompletionBody:
    """Raises ValueError, with a message for the client."""
    try:
        body = msgspec.json.decode(data, type=CompletionBody)
    except msgspec.DecodeError as problem:
        raise ValueError(str(problem)) from None
    if body.n not in (None, 1):
        raise ValueError("n: this engine gives one answer at a time")
    if body.top_p not in (None, 1):
        raise ValueError("top_p: this engine samples by temperature only")
    return body


def answer(
    request_id: str,
    model: str,
    body: CompletionBody,
    outputs: Sequence[Output],
    usage: tuple[int, int],
) -> dict[str, Any]:
    """A whole answer, or a piece of a stream. What holds for the whole answer comes with the
    `finish_reason`; `usage` is the numbers of prompt and of completion tokens."""
    last = outputs[-1]
    choice: dict[str, Any] = {
        "index": 0,
        "text": "".join(output.text for output in outputs),
        "logprobs": None,
        "finish_reason": last.finish_reason,
    }
    if body.return_token_ids:
        choice["token_ids"] = [token for output in outputs for token in output.token_ids]
    result: dict[str, Any] = {
        "id": request_id,
        "object": "text_completion",
        "created": int(time.time()),
        "model": model,
        "choices": [choice],
    }
    if last.finish_reason is not None:
        result["usage"] = {
            "prompt_tokens": usage[0],
            "completion_tokens": usage[1],
            "total_tokens": sum(usage),
        }
        result["kv_transfer_params"] = last.kv_transfer_params
        result["kv_transfer"] = last.kv_transfer
    return result


def sse(data: object) -> bytes:
    """One server-sent event."""
    text = data.encode() if isinstance(data, str) else msgspec.json.encode(data)
    return b"data: " + text + b"\n\n"


def models(name: str) -> dict[str, Any]:
    """`GET /v1/models`."""
    return {"object": "list", "data": [{"id": name, "object": "model", "owned_by": "kvagent"}]}


def error(status: int, message: str) -> dict[str, Any]:
    """OpenAI's error object."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    return {"error": {"message": message, "type": kind, "param": None, "code": status}}
