"""What came out: the demo's report, and what the cut link did. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec
from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from kvagent.demo.report import Answer, Report, Row, compare

__all__ = ["Hardship", "Moment", "Outage", "TwoNodes", "hardship", "outage_table"]


class Hardship(msgspec.Struct, frozen=True, kw_only=True):
    """A request of the outage. `kv`: how the decode engine came by the prompt's cache in the end.
    `why` is the cause when it was recomputed; `seconds` is from the request to the end of its
    answer. `problem` is empty when the text is that of an engine alone.
    """

    prompt_tokens: int
    kv: Literal["fetched", "recomputed", "none"]
    why: str
    transfer_bytes: int
    fetch_ms: float | None
    seconds: float
    match: bool
    problem: str


class Moment(msgspec.Struct, frozen=True, kw_only=True):
    """The transfers that the decode node's sidecar had under way: how many, and their bytes."""

    transfers: int
    arrived_bytes: int
    wanted_bytes: int


class Outage(msgspec.Struct, frozen=True, kw_only=True):
    """The link between the nodes, limited to `rate_mbit_per_s`, was down for `cut_seconds`.
    `stalled_bytes` is what arrived meanwhile: what was in the sidecar's socket already. `requests`
    are those that were sent for it, also in tries in which no transfer was seen under way. After it
    one more prompt was sent: `after`."""

    ok: bool
    rate_mbit_per_s: float
    cut_seconds: float
    at_cut: Moment
    stalled_bytes: int
    fetched: int
    recomputed: int
    requests: list[Hardship]
    after: Hardship


class TwoNodes(Report, frozen=True, kw_only=True):
    """What `scripts/two_nodes --json` prints: the demo's object, and the figures of the two nodes.

    `transport` is what the decode node's sidecar says that carried the bytes. `link_bytes` went to
    it over the link during the demo's requests, headers included. `apart`: neither engine reaches
    the other one, nor the other node's sidecar."""

    transport: str = ""
    link_bytes: int = 0
    apart: bool = False
    outage: Outage | None = None


def hardship(served: Answer, alone: Answer, expected_bytes: int, seconds: float) -> Hardship:
    row: Row = compare(served, alone, expected_bytes)
    failed = served.kv_transfer.get("failed", "")
    recomputed = bool(failed) or served.prefill != "ok"
    return Hardship(
        prompt_tokens=row.prompt_tokens,
        kv="recomputed" if recomputed else "fetched" if row.transfer_bytes else "none",
        why=failed or ("" if served.prefill == "ok" else f"no remote prefill: {served.prefill}"),
        transfer_bytes=row.transfer_bytes,
        fetch_ms=row.fetch_ms,
        seconds=seconds,
        match=row.match,
        # That it was not fetched is no problem here, as long as the answer is right.
        problem="" if row.match and (recomputed or not row.problem) else row.problem,
    )


def outage_table(outage: Outage) -> Table:
    shown = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for heading in ("prompt\ntokens", "cache\n", "transfer\nMB", "fetch\ns", "answer\ns"):
        shown.add_column(heading, justify="right", no_wrap=True)
    shown.add_column("same as\nalone", justify="center")
    shown.add_column("\nwhy")
    rows: Sequence[Hardship] = [*outage.requests, outage.after]
    for row in rows:
        shown.add_row(
            str(row.prompt_tokens),
            row.kv,
            f"{row.transfer_bytes / 1e6:.2f}",
            "-" if row.fetch_ms is None else f"{row.fetch_ms / 1e3:.1f}",
            f"{row.seconds:.1f}",
            Text("yes", "green") if row.match else Text("NO", "bold red"),
            row.problem or row.why or ("after it" if row is outage.after else ""),
        )
    return shown
