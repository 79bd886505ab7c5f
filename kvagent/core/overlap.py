"""Whether boxes of strided memory share a byte. Knows nothing of layers or tokens.

Two boxes whose bounding intervals are apart are disjoint. Boxes whose intervals interleave (layers
of one cross-layer tensor, K and V of a blocks-first one) are disjoint when they repeat with the
same outermost stride and what remains of them is disjoint within one period. Anything else is
called an overlap: the test never misses one, and refuses only interleavings that no tensor has.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

__all__ = ["Box", "find_overlap"]


class Box(NamedTuple):
    """Elements of `unit` bytes at `start` plus every combination of steps along `axes`
    (stride, extent). Each stride is at least the span of all smaller ones. `owner` names it."""

    start: int
    axes: tuple[tuple[int, int], ...]
    unit: int
    owner: int

    @property
    def end(self) -> int:
        return self.start + self.unit + sum((extent - 1) * stride for stride, extent in self.axes)


def find_overlap(boxes: Iterable[Box]) -> tuple[int, int] | None:
    """The owners of two boxes that may share a byte, or None when all are disjoint."""
    cluster: list[Box] = []
    end = 0
    for box in sorted(boxes):
        if cluster and box.start >= end:
            found = _within(cluster)
            if found:
                return found
            cluster = []
        end = max(end, box.end) if cluster else box.end
        cluster.append(box)
    return _within(cluster)


def _within(cluster: list[Box]) -> tuple[int, int] | None:
    if len(cluster) < 2:
        return None
    outer = [max(box.axes, default=(0, 0)) for box in cluster]
    period = outer[0][0]
    for box, (stride, _) in zip(cluster, outer, strict=True):
        if stride != period or stride == 0:
            return cluster[0].owner, box.owner if box is not cluster[0] else cluster[1].owner
    base = cluster[0].start
    folded: list[Box] = []
    for box, axis in zip(cluster, outer, strict=True):
        rest = tuple(other for other in box.axes if other != axis)
        inner = Box((box.start - base) % period, rest, box.unit, box.owner)
        folded.append(inner)
        if inner.end > period:
            folded.append(inner._replace(start=inner.start - period))
    return find_overlap(folded)
