"""A completion request, and the two bodies that are made of it.

Only the fields that decide something are decoded. All others are carried as the bytes which the
client sent, so a long list of token ids costs a scan and nothing is rewritten on the way. Whether
the values make sense is for the engines to say.

The client's own `kv_transfer_params` are dropped: a ticket names memory on other machines, and
only a prefill server of ours may say which.
"""

from __future__ import annotations

import msgspec
from msgspec import Raw

Fields = dict[str, Raw]
Ticket = dict[str, Raw]  # kv_transfer_params as the prefill server returned them

_fields = msgspec.json.Decoder(Fields)
_encode = msgspec.json.encode

# The keys that vLLM's routers send: "keep the blocks, somebody will fetch them".
_DO_REMOTE_DECODE = Raw(
    _encode(
        {
            "do_remote_decode": True,
            "do_remote_prefill": False,
            "remote_engine_id": None,
            "remote_block_ids": None,
            "remote_host": None,
            "remote_port": None,
        }
    )
)
_ONE = Raw(b"1")
_FALSE = Raw(b"false")


class _PrefillAnswer(msgspec.Struct):
    kv_transfer_params: Ticket | None = None


_prefill_answer = msgspec.json.Decoder(_PrefillAnswer)


class CompletionRequest:
    """The body of `POST /v1/completions` or `/v1/chat/completions`."""

    def __init__(self, body: bytes) -> None:
        """Raises ValueError, with a message for the client, unless `body` is a JSON object."""
        try:
            self._fields = _fields.decode(body)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise ValueError(f"the body is not a JSON object: {error}") from None
        self._fields.pop("kv_transfer_params", None)

    @property
    def is_batch(self) -> bool:
        """Whether it asks for several sequences; one ticket serves exactly one."""
        if any(_integer(self._fields.get(key)) > 1 for key in ("n", "best_of")):
            return True
        prompt = bytes(self._fields.get("prompt", b""))
        if not prompt.startswith(b"["):
            return False
        prompts = msgspec.json.decode(prompt, type=list[Raw])
        # A list of integers is one prompt, given as token ids.
        return len(prompts) > 1 and bytes(prompts[0])[:1] in (b'"', b"[")

    def prefill_body(self) -> bytes:
        """The request for the prefill server: compute the prompt, one token, no stream."""
        fields = dict(self._fields)
        fields.pop("stream_options", None)
        fields.pop("min_tokens", None)
        fields["stream"] = _FALSE
        fields["max_tokens"] = _ONE
        if "max_completion_tokens" in fields:
            fields["max_completion_tokens"] = _ONE
        fields["kv_transfer_params"] = _DO_REMOTE_DECODE
        return _encode(fields)

    def decode_body(self, ticket: Ticket | None) -> bytes:
        """The request for the decode server; without a ticket it computes the prompt itself."""
        if ticket is None:
            return _encode(self._fields)
        return _encode({**self._fields, "kv_transfer_params": ticket})


def read_ticket(body: bytes) -> Ticket | None:
    """The ticket in a prefill server's answer, None if it gave none; ValueError if malformed."""
    try:
        return _prefill_answer.decode(body).kv_transfer_params or None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"the answer is not a completion: {error}") from None


def _integer(value: Raw | None) -> int:
    """The integer in `value`; 0 for anything else, which the engine will refuse itself."""
    try:
        return msgspec.json.decode(value, type=int) if value is not None else 0
    except msgspec.DecodeError:
        return 0
