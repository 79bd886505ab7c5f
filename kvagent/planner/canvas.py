"""The few SVG elements that a drawing needs. Knows nothing of what is drawn."""

from __future__ import annotations

from xml.sax.saxutils import escape

__all__ = ["INK", "Canvas"]

INK = "#1b1f24"


class Canvas:
    """SVG elements in the order of drawing."""

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
        self, x: float, y: float, words: str, *, size: int = 12, fill: str = INK, style: str = ""
    ) -> None:
        shown = escape("".join(char if char.isprintable() else "?" for char in words))
        self.elements.append(
            f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" fill="{fill}"'
            f"{' ' if style else ''}{style}>{shown}</text>"
        )

    def link(
        self, start: tuple[float, float], end: tuple[float, float], width: float, colour: str
    ) -> None:
        bend = (end[0] - start[0]) / 2
        self.elements.append(
            f'<path d="M{start[0]:.1f} {start[1]:.1f}C{start[0] + bend:.1f} {start[1]:.1f} '
            f'{end[0] - bend:.1f} {end[1]:.1f} {end[0]:.1f} {end[1]:.1f}" fill="none" '
            f'stroke="{colour}" stroke-opacity="0.7" stroke-width="{width:.2f}"/>'
        )

    def svg(self, width: float, height: float) -> str:
        return "\n".join(
            (
                f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" '
                f'height="{height:.0f}" viewBox="0 0 {width:.0f} {height:.0f}" '
                'font-family="system-ui, DejaVu Sans, Helvetica, Arial, sans-serif">',
                *self.elements,
                "</svg>\n",
            )
        )
