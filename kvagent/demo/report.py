"""What the demo found out, as rows, as a table and as JSON. Pure: no processes, no network."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from kvagent.core.specs import itemsize, rank_heads
from kvagent.demo.config import ModelConfig

__all__ = ["Answer", "Report", "Row", "compare", "kv_bytes", "table"]


class Answer(msgspec.Struct, kw_only=True):
    """What a server said to one prompt. `prefill` is the proxy's note of how the prefill went,
    "ok" or why there was none; empty for an engine without a proxy."""

    text: str = ""
    token_ids: list[int] = []
    prompt_tokens: int = 0
    prefill: str = ""
    prefill_ms: float | None = None
    kv_transfer: dict[str, Any] = {}
    error: str = ""


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One request. `prefill_ms` is what the proxy waited for the prefill engine, its queue
    included; `transfer_ms` is from the first read that was posted to the last byte, `fetch_ms`
    the whole fetch with handshake, claim and validation. GB are 1e9 bytes."""

    prompt_tokens: int
    output_tokens: int
    prefill_ms: float | None
    transfer_bytes: int
    expected_bytes: int
    transfer_ms: float | None
    transfer_gb_per_s: float | None
    fetch_ms: float | None
    decode_tokens_per_s: float | None
    match: bool
    problem: str
    text: str


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """The object that `--json` prints. `tokens_match` says that all answers are the reference's;
    `ok` also that each prompt's KV came over the wire, to the byte."""

    ok: bool
    tokens_match: bool
    prefill_tp: int
    decode_tp: int
    requests: list[Row]
    error: str = ""

    @classmethod
    def of(cls, rows: list[Row], prefill_tp: int, decode_tp: int, error: str = "") -> Report:
        """`error`: why there are no rows."""
        return cls(
            ok=bool(rows) and not error and not any(row.problem for row in rows),
            tokens_match=bool(rows) and all(row.match for row in rows),
            prefill_tp=prefill_tp,
            decode_tp=decode_tp,
            requests=rows,
            error=error,
        )


def kv_bytes(config: ModelConfig, dtype: str, tp: int, tokens: int) -> int:
    """Bytes that an engine of `tp` ranks fetches for `tokens` tokens.

    For each token and layer a key and a value of `head_size` elements per KV head. Every rank
    reads the heads that it holds; with more ranks than KV heads some hold the same head, and each
    reads a copy of its own.
    """
    spans = (rank_heads(rank, tp, config.num_kv_heads) for rank in range(tp))
    heads = sum(stop - start for start, stop in spans)
    return tokens * config.num_layers * 2 * heads * config.head_size * itemsize(dtype)


def compare(served: Answer, alone: Answer, expected_bytes: int) -> Row:
    """`served` came through the proxy from two engines, `alone` from one without a sidecar.

    `expected_bytes`: the KV of the whole prompt. The decode engine fetches all of it, the last
    token's too, which it computes again for the logits.
    """
    transfer = served.kv_transfer
    moved, wire, whole = (transfer.get(key) for key in ("bytes", "wire", "seconds"))
    match = not (served.error or alone.error) and served.token_ids == alone.token_ids
    return Row(
        prompt_tokens=served.prompt_tokens,
        output_tokens=len(served.token_ids),
        prefill_ms=served.prefill_ms,
        transfer_bytes=moved or 0,
        expected_bytes=expected_bytes,
        transfer_ms=wire * 1e3 if wire is not None else None,
        transfer_gb_per_s=moved / wire / 1e9 if moved and wire else None,
        fetch_ms=whole * 1e3 if whole is not None else None,
        decode_tokens_per_s=transfer.get("decode_tokens_per_s"),
        match=match,
        problem=_problem(served, alone, moved or 0, expected_bytes),
        text=served.text,
    )


def _problem(served: Answer, alone: Answer, moved: int, expected: int) -> str:
    """Why this request did not do what the demo is to show; empty when it did."""
    if served.error:
        return f"no answer: {served.error}"
    if alone.error:
        return f"no answer from the engine alone: {alone.error}"
    if served.prefill != "ok":
        return f"no remote prefill: {served.prefill or 'the proxy did not say'}"
    if "failed" in served.kv_transfer:
        return f"not transferred: {served.kv_transfer['failed']}"
    if moved != expected:
        return f"{moved} bytes transferred, the model's shape says {expected}"
    if served.token_ids != alone.token_ids:
        pairs = zip(served.token_ids, alone.token_ids, strict=False)
        at = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
        return "tokens differ " + ("in number" if at is None else f"from output token {at} on")
    return ""


def table(rows: Sequence[Row]) -> Table:
    """For people; what went wrong stands in the place of the text."""
    shown = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for heading in ("prompt\ntokens", "prefill\nms", "transfer\nMB", "\nms", "\nGB/s"):
        shown.add_column(heading, justify="right", no_wrap=True)
    shown.add_column("decode\ntokens/s", justify="right", no_wrap=True)
    shown.add_column("same as\nalone", justify="center", no_wrap=True)
    shown.add_column("\ntext")
    for row in rows:
        shown.add_row(
            str(row.prompt_tokens),
            _number(row.prefill_ms, 0),
            f"{row.transfer_bytes / 1e6:.2f}",
            _number(row.transfer_ms, 1),
            _number(row.transfer_gb_per_s, 2),
            _number(row.decode_tokens_per_s, 1),
            Text("yes", "green") if row.match else Text("NO", "bold red"),
            # On one line; the column as such may shrink, so it is this cell that does not wrap.
            Text(
                _one_line(row.problem or row.text),
                "red" if row.problem else "",
                no_wrap=True,
                overflow="ellipsis",
            ),
        )
    return shown


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"
