"""What a rank holds or gets, as rectangles in a map of the whole model's cache.

The map has the layers downwards and the heads to the right; the token shards of a split context
stand side by side within the heads of a rank.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from kvagent.planner.report import Piece, Place, PlanReport, Rank, Read

__all__ = ["Area", "Maps"]


class Area(NamedTuple):
    """A rectangle of a map, in fractions of its width and height."""

    left: float
    right: float
    top: float
    bottom: float

    def part(self, number: int, count: int) -> Area:
        """One of `count` upright slices."""
        step = (self.right - self.left) / count
        return self._replace(left=self.left + number * step, right=self.left + (number + 1) * step)


class Maps:
    """Where pieces lie in the map. Of a layer's parts, those with the most heads are shown."""

    def __init__(self, report: PlanReport) -> None:
        ranks = (*report.consumer.ranks, *report.producer.ranks)
        pieces = [piece for rank in ranks for piece in rank.pieces]
        layers = dict.fromkeys(layer for rank in ranks for layer in rank.layers)
        self._places = {layer: number for number, layer in enumerate(layers)}
        self._heads: dict[str, int] = {}
        for piece in pieces:
            for layer in piece.layers:
                self._heads[layer] = max(self._heads.get(layer, 1), piece.num_heads)

    def held(self, rank: Rank) -> list[Area]:
        """What a rank holds."""
        return [
            self._shard(rank, area)
            for area in dict.fromkeys(a for piece in rank.pieces for a in self._areas(piece))
        ]

    def received(self, rank: Rank, reads: Iterable[Read]) -> list[tuple[Place, Area]]:
        """What a rank gets, by where from. Several sources of one area share it in slices."""
        sources: dict[Area, list[Place]] = {}
        for read in reads:
            for area in dict.fromkeys(a for piece in read.pieces for a in self._areas(piece)):
                sources.setdefault(area, []).append(read.producer)
        return [
            (place, self._shard(rank, area).part(number, len(places)))
            for area, places in sources.items()
            for number, place in enumerate(places)
        ]

    def _shard(self, rank: Rank, area: Area) -> Area:
        return area.part(rank.tokens[0].rank, rank.tokens[0].size) if rank.tokens else area

    def _areas(self, piece: Piece) -> list[Area]:
        spans: list[list[int]] = []
        for layer in sorted(piece.layers, key=self._places.__getitem__):
            place = self._places[layer]
            if self._heads[layer] != piece.num_heads:
                continue
            if spans and spans[-1][1] == place:
                spans[-1][1] += 1
            else:
                spans.append([place, place + 1])
        left, right = (head / piece.num_heads for head in piece.heads)
        number = len(self._places)
        return [Area(left, right, top / number, bottom / number) for top, bottom in spans]
