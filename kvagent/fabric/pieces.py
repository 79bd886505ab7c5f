"""A read cut into pieces: what is handed to the transport at once.

Pieces bound how long a cancelled read goes on, and let reads take turns. Pure; both fabrics use it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvagent.errors import BlockRangeError, GeometryError
from kvagent.fabric.base import IndexArray, RowArray, Selection

__all__ = ["NO_EXTRA", "Piece", "Rows", "joined", "split"]


class Rows:
    """One side's prepared rows, N x 5 (address, length, device, stride, count), as one numbered
    sequence of descriptors: first those of row 0, then those of row 1, ..."""

    def __init__(self, rows: RowArray) -> None:
        if rows.ndim != 2 or rows.shape[1] != 5 or rows.dtype != np.uint64 or not len(rows):
            raise GeometryError("prepared rows must be a non-empty N x 5 array of uint64")
        self.array = np.ascontiguousarray(rows)
        self.ends = np.cumsum(self.array[:, 4].astype(np.int64))
        self.count = int(self.ends[-1])
        self.device = int(self.array[0, 2])
        if (self.array[:, 2] != self.device).any():
            raise GeometryError("prepared rows must be of one device")
        lengths = self.array[:, 1]
        self.uniform = int(lengths[0]) if (lengths == lengths[0]).all() else None

    def check(self, index: IndexArray, side: str) -> None:
        if int(index.view(np.uint32).max()) >= self.count:  # negative ones are large, too
            low, high = int(index.min()), int(index.max())
            raise BlockRangeError(
                f"{side} descriptor {low if low < 0 else high} of {self.count} prepared ones"
            )

    def row_of(self, index: IndexArray) -> npt.NDArray[np.int64]:
        row: npt.NDArray[np.int64] = np.searchsorted(self.ends, index, side="right")
        return row

    def lengths(self, index: IndexArray) -> npt.NDArray[np.int64]:
        """Bytes of each descriptor."""
        if self.uniform is not None:
            return np.full(len(index), self.uniform, np.int64)
        lengths: npt.NDArray[np.int64] = self.array[self.row_of(index), 1].astype(np.int64)
        return lengths

    def addresses(self, index: IndexArray) -> npt.NDArray[np.int64]:
        rows = self.row_of(index)
        first = self.ends[rows] - self.array[rows, 4].astype(np.int64)
        step = self.array[rows, 3].astype(np.int64)
        base = self.array[rows, 0].astype(np.int64)
        address: npt.NDArray[np.int64] = base + (index - first) * step
        return address


class Piece(NamedTuple):
    """Index arrays, or (when `extra` has rows) addresses; never both."""

    nbytes: int
    local_index: IndexArray
    remote_index: IndexArray
    extra: RowArray


_NO_INDEX = np.empty(0, np.int32)
NO_EXTRA = np.empty((0, 3), np.uint64)


def joined(pieces: Sequence[Piece]) -> Piece:
    """One of several that are given by index arrays of the same lists."""
    return Piece(
        sum(piece.nbytes for piece in pieces),
        np.concatenate([piece.local_index for piece in pieces]),
        np.concatenate([piece.remote_index for piece in pieces]),
        NO_EXTRA,
    )


def split(local: Rows, remote: Rows, selection: Selection, piece_bytes: int) -> list[Piece]:
    """Pieces of about `piece_bytes`, in order; a descriptor is never cut.

    Raises `BlockRangeError` for an index that was not prepared and `GeometryError` when the two
    sides do not fit together.
    """
    li = np.ascontiguousarray(selection.local_index, np.int32)
    ri = np.ascontiguousarray(selection.remote_index, np.int32)
    extra = np.ascontiguousarray(selection.extra, np.uint64).reshape(-1, 3)
    if len(li) != len(ri):
        raise GeometryError(f"{len(li)} local and {len(ri)} remote descriptors")
    pieces = []
    if len(li):
        local.check(li, "local")
        remote.check(ri, "remote")
        each = local.uniform
        if each is not None and each == remote.uniform and len(li) * each <= piece_bytes:
            pieces.append(Piece(len(li) * each, li, ri, NO_EXTRA))
            li = ri = _NO_INDEX
    if len(li):
        lengths = local.lengths(li)
        if (lengths != remote.lengths(ri)).any():
            raise GeometryError("local and remote descriptors differ in length")
        pieces += [
            Piece(nbytes, li[a:b], ri[a:b], NO_EXTRA)
            for a, b, nbytes in _cuts(lengths, piece_bytes)
        ]
    if len(extra):
        pieces += [
            Piece(nbytes, _NO_INDEX, _NO_INDEX, extra[a:b])
            for a, b, nbytes in _cuts(extra[:, 2].astype(np.int64), piece_bytes)
        ]
    return pieces


def _cuts(lengths: npt.NDArray[np.int64], piece_bytes: int) -> Iterator[tuple[int, int, int]]:
    """(start, end, bytes): a cut wherever a descriptor begins in another `piece_bytes` stretch."""
    ends = np.cumsum(lengths)
    stretch = (ends - lengths) // piece_bytes
    bounds = [0, *(np.flatnonzero(np.diff(stretch)) + 1).tolist(), len(lengths)]
    for a, b in pairwise(bounds):
        yield a, b, int(ends[b - 1] - ends[a] + lengths[a])
