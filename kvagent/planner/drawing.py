"""A plan report as SVG: the ranks of both engines, and who reads what from whom.

Producer ranks on the left have a colour each; consumer ranks on the right. The little map in a
box is the model's cache, layers downwards and heads (with split contexts: heads, and token shards
within them) to the right; filled is what the rank holds, on the right in the colours of where it
comes from. A link is as wide as the bytes it stands for. Only geometry and strings are made here.
"""

from __future__ import annotations

import colorsys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape, quoteattr

from kvagent.core.specs import TokenShard
from kvagent.planner.report import Piece, Place, PlanReport, Rank, Read, Side
from kvagent.planner.words import head_words, layer_words, size_words, span_words

__all__ = ["plan_svg"]

MARGIN = 24
HEAD = 92
"""Height above the boxes: title and the names of the engines."""
BOX_WIDTH, BOX_HEIGHT, BOX_GAP = 300, 64, 14
MAP_WIDTH, MAP_HEIGHT = 64, 48
LINK_SPACE = 380
WIDTH = 2 * (MARGIN + BOX_WIDTH) + LINK_SPACE
LEGEND = 104
MIN_LINK = 1.5
LINE = 17
TEXT_LIMIT = 34
"""Characters of a line in a box."""

INK, MUTED, FRAME, EMPTY, PAPER = "#1b1f24", "#5b6470", "#c4cad1", "#eef0f3", "#ffffff"
IDLE = "#a9b0b8"


@dataclass(frozen=True)
class _Area:
    """A rectangle of a map in fractions of its size."""

    left: float
    right: float
    top: float
    bottom: float


class _Canvas:
    """SVG elements as they come."""

    def __init__(self) -> None:
        self.elements: list[str] = []

    def rect(
        self, x: float, y: float, width: float, height: float, fill: str, stroke: str = "none"
    ) -> None:
        self.elements.append(
            f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" '
            f'fill="{fill}" stroke="{stroke}"/>'
        )

    def text(
        self, x: float, y: float, words: str, *, size: int = 12, fill: str = INK, bold: bool = False
    ) -> None:
        weight = ' font-weight="bold"' if bold else ""
        self.elements.append(
            f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" fill="{fill}"{weight}>'
            f"{escape(words)}</text>"
        )

    def link(self, start: tuple[float, float], end: tuple[float, float], width: float) -> str:
        bend = (end[0] - start[0]) * 0.45
        return (
            f'<path d="M {start[0]:.1f} {start[1]:.1f} C {start[0] + bend:.1f} {start[1]:.1f}, '
            f'{end[0] - bend:.1f} {end[1]:.1f}, {end[0]:.1f} {end[1]:.1f}" fill="none" '
            f'stroke-width="{width:.2f}"'
        )

    def ribbon(
        self,
        start: tuple[float, float],
        end: tuple[float, float],
        width: float,
        colour: str,
        hint: str,
    ) -> None:
        self.elements.append(
            f'{self.link(start, end, width)} stroke="{colour}" stroke-opacity="0.72">'
            f"<title>{escape(hint)}</title></path>"
        )
