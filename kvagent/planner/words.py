"""Words for sizes, layers and heads, short enough for a table and for a drawing."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from kvagent.planner.report import Piece, Runs

__all__ = ["head_words", "layer_words", "piece_heads", "run_words", "size_words", "span_words"]


def size_words(nbytes: int) -> str:
    """1536 -> "1.5 KiB"; bytes are exact, other units have one decimal when it says anything."""
    if nbytes < 1024:
        return f"{nbytes} B"
    size, unit = float(nbytes), "B"
    for unit in ("KiB", "MiB", "GiB", "TiB"):
        size /= 1024
        if size < 1023.95:
            break
    return f"{size:.1f}".removesuffix(".0") + f" {unit}"


def span_words(start: int, stop: int) -> str:
    """The numbers of `[start, stop)`: "3-7", or "3" alone."""
    return f"{start}-{stop - 1}" if stop - start > 1 else str(start)


def layer_words(layers: Iterable[str]) -> str:
    """Names that differ in their last number are written once: "model.layers.0-15,20"."""
    series: dict[tuple[str, str], list[int]] = {}
    words: list[str] = []
    for layer in layers:
        found = re.fullmatch(r"(.*?)(\d+)(\D*)", layer, re.DOTALL)
        if found and str(int(found[2])) == found[2]:
            series.setdefault((found[1], found[3]), []).append(int(found[2]))
        else:
            words.append(layer)
    return ", ".join(
        [f"{before}{_numbers(sorted(numbers))}{after}" for (before, after), numbers in series.items()]
        + words
    )


def _numbers(numbers: Sequence[int]) -> str:
    step = numbers[1] - numbers[0] if len(numbers) > 1 else 0
    if len(numbers) > 2 and step > 1 and list(numbers) == list(
        range(numbers[0], numbers[-1] + 1, step)
    ):
        return f"{numbers[0]}-{numbers[-1]}/{step}"
    spans: list[list[int]] = []
    for number in numbers:
        if spans and spans[-1][1] == number:
            spans[-1][1] += 1
        else:
            spans.append([number, number + 1])
    return ",".join(span_words(*span) for span in spans)


def piece_heads(piece: Piece) -> str:
    """"0-3 of 8", or "all" for what has no heads to divide."""
    return f"{span_words(*piece.heads)} of {piece.num_heads}" if piece.num_heads > 1 else "all"


def head_words(pieces: Iterable[Piece]) -> str:
    """The heads of several pieces, each range once."""
    return ", ".join(dict.fromkeys(piece_heads(piece) for piece in pieces))


def run_words(runs: Runs) -> str:
    """"96 of 4 KiB", or with the shortest and the longest: "98 of 256 B to 4 KiB"."""
    if not runs.descriptors:
        return "none"
    shortest, longest = size_words(runs.shortest), size_words(runs.longest)
    span = shortest if shortest == longest else f"{shortest} to {longest}"
    return f"{runs.descriptors} of {span}"
