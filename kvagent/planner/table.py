"""A plan report as text for a terminal."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kvagent.planner.report import PlanReport, Side
from kvagent.planner.words import head_words, layer_words, run_words, size_words, span_words

__all__ = ["plan_text"]

HEADINGS = (
    "consumer rank",
    "reads from",
    "layers",
    "heads",
    "bytes",
    "runs, contiguous",
    "runs, fragmented",
    "staged",
)


def plan_text(report: PlanReport) -> str:
    """What `kvagent plan` prints; several lines, without a newline at the end."""
    lines = [
        f"{_side(report.producer)} -> {_side(report.consumer)}",
        f"one request, tokens {span_words(report.start_token, report.num_tokens)}"
        if report.start_token < report.num_tokens
        else "one request, no tokens",
    ]
    for side, layers in (
        (report.producer, report.only_producer),
        (report.consumer, report.only_consumer),
    ):
        if layers:
            lines.append(f"only {side.engine} has {layer_words(layers)}: left out")
    lines.append("")
    if report.refused:
        lines.append("refused, because the two caches do not mean the same:")
        lines += [f"  {refusal}" for refusal in report.refused]
    elif report.unsupported:
        lines += ["refused, because there is no plan:", f"  {report.unsupported}"]
    else:
        lines += _reads(report)
    return "\n".join(lines)


def _side(side: Side) -> str:
    return f"{side.engine} (tp {side.tp_size}, pp {side.pp_size})"


def _reads(report: PlanReport) -> list[str]:
    rows = []
    for rank in report.consumer.ranks:
        name = str(rank.place)
        reads = [read for read in report.reads if read.consumer == rank.place]
        for read in reads:
            layers = dict.fromkeys(layer for piece in read.pieces for layer in piece.layers)
            rows.append(
                (
                    name,
                    str(read.producer),
                    layer_words(layers),
                    head_words(read.pieces),
                    size_words(read.nbytes),
                    run_words(read.contiguous),
                    run_words(read.fragmented),
                    size_words(read.staged) if read.staged else "no",
                )
            )
            name = ""
        if not reads:
            rows.append((name, "nobody", "", "", "", "", "", ""))
    sources = {read.producer for read in report.reads}
    idle = [str(rank.place) for rank in report.producer.ranks if rank.place not in sources]
    lines = [
        *_aligned([HEADINGS, *rows]),
        "",
        f"{size_words(report.nbytes)} in all; pairs of ranks: {len(report.reads)}",
        "runs: descriptors after merging, and the bytes of each; contiguous: block tables that "
        "count up;",
        "fragmented: no two blocks are neighbours; staged: what is read in whole blocks and put in",
        "its place by the consumer's sidecar, since its runs are too short to be read one by one",
    ]
    if idle:
        lines.append(f"not read from: {'; '.join(idle)}")
    return lines


def _aligned(rows: Iterable[Sequence[str]]) -> list[str]:
    rows = list(rows)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
