"""A plan report as SVG: the ranks of both engines, and who reads what from whom.

Producer ranks stand on the left, each with a colour; consumer ranks on the right. The small map in
a box is the whole model's cache: layers downwards, heads to the right, and within the heads of a
rank its token shard when the context is split. Filled is what the rank holds, on the right in the
colours of where it comes from. A link is as wide as its bytes. The file needs nothing beside it.
"""

from __future__ import annotations

import colorsys
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from kvagent.planner.canvas import INK, Canvas
from kvagent.planner.maps import Area, Maps
from kvagent.planner.report import Place, PlanReport, Rank, Read, Side
from kvagent.planner.words import head_words, layer_words, size_words, span_words

__all__ = ["plan_svg"]

MARGIN = 28
TOP = 112
"""Where the boxes begin, below the title and the names of the engines."""
BOX_WIDTH, BOX_HEIGHT = 330, 66
BOX_GAP, STAGE_GAP = 12, 14
MAP_WIDTH, MAP_HEIGHT = 72, 50
STRIPE = 7
LINKS_WIDTH = 360
WIDTH = 2 * (MARGIN + BOX_WIDTH) + LINKS_WIDTH
LEGEND_HEIGHT = 132
MAX_LINK, MIN_LINK = 40, 1.5
"""Width of all links of the busiest rank together, and of the thinnest link."""
MAX_WORDS = 35
"""Characters in a line of a box."""

MUTED, FRAME, EMPTY, PAPER, IDLE = "#57606a", "#c4cad1", "#eceff2", "#ffffff", "#a8b0b9"

Colours = dict[Place, str]


BOLD = 'font-weight="bold"'
END = 'text-anchor="end"'


def plan_svg(report: PlanReport) -> str:
    """The drawing of a pair that works; `report.works` is true."""
    colours = _colours(report)
    left, right = _heights(report.producer), _heights(report.consumer)
    height = max(left, right)
    tops = {
        **{("producer", place): y for place, y in _tops(report.producer, height - left).items()},
        **{("consumer", place): y for place, y in _tops(report.consumer, height - right).items()},
    }
    canvas = Canvas()
    total = TOP + height + LEGEND_HEIGHT
    canvas.rect(0, 0, WIDTH, total, PAPER)
    _draw_title(canvas, report)
    scale = _draw_links(canvas, report, tops, colours)
    maps = Maps(report)
    for rank in report.producer.ranks:
        reads = [read for read in report.reads if read.producer == rank.place]
        box = _Box(MARGIN, tops["producer", rank.place], rank, reads, producer=True)
        _draw_box(canvas, box, [(colours[rank.place], area) for area in maps.held(rank)])
        canvas.rect(MARGIN + BOX_WIDTH - STRIPE, box.y, STRIPE, BOX_HEIGHT, colours[rank.place])
    for rank in report.consumer.ranks:
        reads = [read for read in report.reads if read.consumer == rank.place]
        x = MARGIN + BOX_WIDTH + LINKS_WIDTH
        box = _Box(x, tops["consumer", rank.place], rank, reads, producer=False)
        _draw_box(
            canvas, box, [(colours[place], area) for place, area in maps.received(rank, reads)]
        )
    _draw_legend(canvas, report, TOP + height + 30, scale)
    return canvas.svg(WIDTH, total)


# ---------------------------------------------------------------- places and colours


def _heights(side: Side) -> float:
    return len(side.ranks) * (BOX_HEIGHT + BOX_GAP) - BOX_GAP + (side.pp_size - 1) * STAGE_GAP


def _tops(side: Side, spare: float) -> dict[Place, float]:
    """The upper edge of each rank's box; `spare` height is spread around the boxes."""
    share = spare / len(side.ranks)
    y = TOP + share / 2
    tops = {}
    stage = 0
    for rank in side.ranks:
        y += STAGE_GAP * (rank.place.pp_rank - stage)
        stage = rank.place.pp_rank
        tops[rank.place] = y
        y += BOX_HEIGHT + BOX_GAP + share
    return tops


def _colours(report: PlanReport) -> Colours:
    """The hue tells the tensor-parallel rank, the lightness the pipeline stage; ranks that nobody
    reads are grey."""
    side = report.producer
    colours = {rank.place: IDLE for rank in side.ranks}
    for rank in side.ranks:
        place = rank.place
        if not any(read.producer == place for read in report.reads):
            continue
        hue = (0.58 + place.tp_rank / side.tp_size) % 1
        lightness = 0.42 + 0.24 * (place.pp_rank / max(side.pp_size - 1, 1))
        # Yellow and green look lighter than blue at equal lightness.
        lightness -= 0.08 * (0.1 < hue < 0.55)
        channels = colorsys.hls_to_rgb(hue, lightness, 0.58 - 0.1 * (lightness > 0.5))
        colours[place] = "#" + "".join(f"{round(255 * channel):02x}" for channel in channels)
    return colours


# ---------------------------------------------------------------- drawing


class _Box(NamedTuple):
    x: float
    y: float
    rank: Rank
    reads: Sequence[Read]
    producer: bool

    def lines(self) -> list[str]:
        """The words under the rank's name."""
        heads = head_words(piece for piece in self.rank.pieces if piece.num_heads > 1)
        shards = [f"token shard {shard.rank} of {shard.size}" for shard in self.rank.tokens]
        return [
            layer_words(self.rank.layers, brief=True),
            ", ".join([heads or "all heads", *shards]),
        ]

    def traffic(self) -> str:
        if not self.reads:
            return "not read" if self.producer else "reads nothing"
        nbytes = size_words(sum(read.nbytes for read in self.reads))
        return f"{'serves' if self.producer else 'reads'} {nbytes}"


def _draw_title(canvas: Canvas, report: PlanReport) -> None:
    producer, consumer = report.producer, report.consumer
    canvas.text(
        MARGIN, 40, f"{producer.engine} \N{RIGHTWARDS ARROW} {consumer.engine}", size=22, style=BOLD
    )
    tokens = (
        f"tokens {span_words(report.start_token, report.num_tokens)}"
        if report.start_token < report.num_tokens
        else "no tokens"
    )
    words = f"One request, {tokens}: {size_words(report.nbytes)}."
    canvas.text(MARGIN, 62, words, size=14, fill=MUTED)
    for x, name, side in (
        (MARGIN, "Producer", producer),
        (MARGIN + BOX_WIDTH + LINKS_WIDTH, "Consumer", consumer),
    ):
        words = f"{name} {_short(side.engine)}: tp {side.tp_size}, pp {side.pp_size}"
        canvas.text(x, TOP - 14, words, size=14, style=BOLD)


def _draw_box(canvas: Canvas, box: _Box, filled: Iterable[tuple[str, Area]]) -> None:
    canvas.rect(box.x, box.y, BOX_WIDTH, BOX_HEIGHT, PAPER, FRAME)
    # The maps stand on the side of the links.
    inset = BOX_WIDTH - STRIPE - 9 - MAP_WIDTH if box.producer else 9
    map_x, map_y = box.x + inset, box.y + (BOX_HEIGHT - MAP_HEIGHT) / 2
    _draw_map(canvas, map_x, map_y, filled)
    x = box.x + 12 if box.producer else map_x + MAP_WIDTH + 12
    end = map_x - 10 if box.producer else box.x + BOX_WIDTH - 10
    canvas.text(x, box.y + 20, str(box.rank.place), size=13, style=BOLD)
    canvas.text(end, box.y + 20, box.traffic(), fill=MUTED, style=END)
    for number, words in enumerate(box.lines()):
        canvas.text(x, box.y + 39 + 17 * number, _short(words), fill=INK)


def _draw_map(canvas: Canvas, x: float, y: float, filled: Iterable[tuple[str, Area]]) -> None:
    canvas.rect(x, y, MAP_WIDTH, MAP_HEIGHT, EMPTY)
    for colour, area in filled:
        canvas.rect(
            x + area.left * MAP_WIDTH,
            y + area.top * MAP_HEIGHT,
            (area.right - area.left) * MAP_WIDTH,
            (area.bottom - area.top) * MAP_HEIGHT,
            colour,
        )
    canvas.rect(x, y, MAP_WIDTH, MAP_HEIGHT, "none", FRAME)


def _draw_links(
    canvas: Canvas,
    report: PlanReport,
    tops: dict[tuple[str, Place], float],
    colours: Colours,
) -> float:
    """Draws the links and returns the bytes of one pixel of width."""
    ends: dict[tuple[str, Place], int] = {}
    for read in report.reads:
        for end in (("producer", read.producer), ("consumer", read.consumer)):
            ends[end] = ends.get(end, 0) + read.nbytes
    scale = max(ends.values(), default=0) / MAX_LINK or 1.0
    widths = [max(read.nbytes / scale, MIN_LINK) for read in report.reads]
    ports = [
        _ports("producer", [read.producer for read in report.reads], widths, tops),
        _ports("consumer", [read.consumer for read in report.reads], widths, tops),
    ]
    left, right = MARGIN + BOX_WIDTH, MARGIN + BOX_WIDTH + LINKS_WIDTH
    for read, width, start, stop in zip(report.reads, widths, *ports, strict=True):
        canvas.link((left, start), (right, stop), width, colours[read.producer])
    return scale


def _ports(
    name: str,
    places: Sequence[Place],
    widths: Sequence[float],
    tops: dict[tuple[str, Place], float],
) -> list[float]:
    """The height at which each link meets its box: side by side, in the middle of the edge.

    Links come by consumer and then by producer, so those of one box do not cross near it.
    """
    used: dict[Place, float] = {}
    for place, width in zip(places, widths, strict=True):
        used[place] = used.get(place, 0.0) + width
    start = {place: tops[name, place] + (BOX_HEIGHT - total) / 2 for place, total in used.items()}
    heights = []
    for place, width in zip(places, widths, strict=True):
        heights.append(start[place] + width / 2)
        start[place] += width
    return heights


def _draw_legend(canvas: Canvas, report: PlanReport, y: float, scale: float) -> None:
    canvas.text(MARGIN, y, "Legend", size=14, style=BOLD)
    example = Area(0.25, 0.5, 0.0, 0.5)
    _draw_map(canvas, MARGIN, y + 14, [(MUTED, example)])
    x = MARGIN + MAP_WIDTH + 14
    for number, words in enumerate(
        (
            "Map: the model's cache, heads to the right, layers downwards.",
            "Filled: what a rank holds; at the consumer in the colours of the ranks it reads.",
            "Token shards of the same heads stand side by side.",
        )
    ):
        canvas.text(x, y + 27 + 17 * number, words, fill=MUTED)
    x = MARGIN + BOX_WIDTH + LINKS_WIDTH
    canvas.text(x, y, "Bytes read", size=14, style=BOLD)
    top = y + 14
    largest = max((read.nbytes for read in report.reads), default=0)
    for nbytes in (largest, largest // 4):
        width = max(nbytes / scale, MIN_LINK)
        middle = top + max(width, 14) / 2
        canvas.link((x, middle), (x + MAP_WIDTH, middle), width, MUTED)
        canvas.text(x + MAP_WIDTH + 14, middle + 4, size_words(nbytes), fill=MUTED)
        top = middle + max(width, 14) / 2 + 8
    one_sided = [
        f"Only {side.engine} has {layer_words(layers)}: left out."
        for side, layers in (
            (report.producer, report.only_producer),
            (report.consumer, report.only_consumer),
        )
        if layers
    ]
    canvas.text(MARGIN, y + 88, " ".join(one_sided), fill=MUTED)


def _short(words: str) -> str:
    """Long words without their end."""
    return words if len(words) <= MAX_WORDS else f"{words[: MAX_WORDS - 1]}\N{HORIZONTAL ELLIPSIS}"
