"""Words for sizes, layers and heads, short enough for a table and for a drawing."""

from __future__ import annotations

from collections.abc import Iterable

from kvagent.planner.describe import split_name
from kvagent.planner.report import Piece
from kvagent.planner.runs import Runs

__all__ = ["head_words", "layer_words", "run_words", "size_words", "span_words"]


def size_words(nbytes: int) -> str:
    """1536 -> "1.5 KiB"; bytes are exact, other units have one decimal when it says anything."""
    if nbytes < 1024:
        return f"{nbytes} B"
    units = ("KiB", "MiB", "GiB", "TiB", "PiB", "EiB")
    size, unit = nbytes / 1024, 0
    while size >= 1023.95:
        size, unit = size / 1024, unit + 1
    return f"{size:.1f}".removesuffix(".0") + f" {units[unit]}"


def span_words(start: int, stop: int) -> str:
    """The numbers of `[start, stop)`: "3-7", or "3" alone."""
    return f"{start}-{stop - 1}" if stop - start > 1 else str(start)


def layer_words(layers: Iterable[str], *, brief: bool = False) -> str:
    """Names that differ in their last number are written once: "model.layers.0-15,20".

    brief: of a name only the word before the number: "layers 0-15,20".
    """
    series: dict[tuple[str, str], list[int]] = {}
    words: list[str] = []
    for layer in layers:
        before, number, after = split_name(layer)
        if number is None:
            words.append(layer)
            continue
        if brief:
            before, after = f"{before.rstrip('._').rpartition('.')[2]} ", ""
        series.setdefault((before, after), []).append(number)
    return ", ".join(
        [
            f"{before}{_numbers(numbers)}{after}".strip()
            for (before, after), numbers in series.items()
        ]
        + words
    )


def _numbers(found: Iterable[int]) -> str:
    numbers = sorted(set(found))
    step = numbers[1] - numbers[0] if len(numbers) > 1 else 0
    if len(numbers) > 2 and step > 1 and numbers == list(range(numbers[0], numbers[-1] + 1, step)):
        return f"{numbers[0]}-{numbers[-1]}/{step}"
    spans: list[list[int]] = []
    for number in numbers:
        if spans and spans[-1][1] == number:
            spans[-1][1] += 1
        else:
            spans.append([number, number + 1])
    return ",".join(span_words(*span) for span in spans)


def head_words(pieces: Iterable[Piece]) -> str:
    """The heads of pieces, each range once: "heads 0-3 of 8"; "all" for what is not divided."""
    ranges = dict.fromkeys((*piece.heads, piece.num_heads) for piece in pieces)
    divided = [found for found in ranges if found[2] > 1]
    words = [f"{span_words(h0, h1)} of {total}" for h0, h1, total in divided]
    if not words:
        return "all" if ranges else ""
    single = all(h1 - h0 == 1 for h0, h1, _ in divided)
    return f"{'head' if single else 'heads'} {', '.join(words)}"


def run_words(runs: Runs) -> str:
    """ "96 of 4 KiB", or with the shortest and the longest: "98 of 256 B to 4 KiB"."""
    if not runs.descriptors:
        return "none"
    shortest, longest = size_words(runs.shortest), size_words(runs.longest)
    span = shortest if shortest == longest else f"{shortest} to {longest}"
    return f"{runs.descriptors} of {span}"
