"""The blocks of one engine: whoever owns none of them may write none of them.

A block that nobody owns is filled with a stamp, a value of its own that is new each time it comes
back. It is looked at when the block is taken the next time: a transfer that writes into a block
which was reported free has then overwritten it. Blocks are overwritten the moment they come back,
so that whoever still reads them reads something else.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import count

import numpy as np
import numpy.typing as npt

from kvagent.soak.shapes import LAYERS, RankMemory, Shape, Spans, pattern


class Pool:
    def __init__(self, shape: Shape, ranks: Sequence[RankMemory], seed: int) -> None:
        self._shape = shape
        self._ranks = ranks
        self._random = random.Random(seed)
        self._next = count(self._random.randrange(1 << 30) | 1, 2)
        self._stamps = np.zeros(shape.num_blocks, np.uint32)
        self._free: list[int] = []
        self.give(list(range(shape.num_blocks)))

    def __len__(self) -> int:
        return len(self._free)

    def take(self, number: int) -> tuple[list[int], int]:
        """Blocks, the last that came back or any, and how many bytes of them are not what was
        left there. No blocks when there are not enough."""
        if number > len(self._free):
            return [], 0
        if self._random.random() < 0.5:
            self._random.shuffle(self._free)
        taken = [self._free.pop() for _ in range(number)]
        return taken, self.written(taken)

    def give(self, blocks: Sequence[int]) -> None:
        """They are nobody's from now on."""
        self._stamps[list(blocks)] = [next(self._next) & 0xFFFFFFFF for _ in blocks]
        stamps = self._stamps[list(blocks)][None, None, :, None, None]
        for rank in self._ranks:
            for layer in rank.layers:
                layer[:, :, list(blocks)] = stamps
        self._free += blocks

    def written(self, blocks: Sequence[int]) -> int:
        """Bytes of stamped blocks that are not the stamp."""
        stamps = self._stamps[list(blocks)][None, None, :, None, None]
        layers = (layer for rank in self._ranks for layer in rank.layers)
        return sum(4 * int((layer[:, :, list(blocks)] != stamps).sum()) for layer in layers)

    def written_free(self) -> int:
        return self.written(self._free)

    def fill(self, blocks: Sequence[int], spans: Spans, first: int) -> None:
        """The pattern of tokens from `first` on, to the end of the last block."""
        size = self._shape.block_size
        for number, rank in enumerate(self._ranks):
            heads = self._shape.heads(number)
            for i in range(LAYERS):
                values = pattern(spans, i, heads, first, first + len(blocks) * size)
                layer = rank.layers[i]
                layer[:, :, list(blocks)] = values.reshape(2, len(heads), -1, size, layer.shape[-1])

    def wrong(
        self, blocks: Sequence[int], spans: Spans | None, start: int, tokens: int
    ) -> tuple[int, int]:
        """(wrong, compared) bytes of blocks that were taken and fetched into.

        Tokens `start` to `tokens` are to be the pattern, all others the stamps. Without `spans`
        (the fetch failed) only those others are looked at.
        """
        size = self._shape.block_size
        wrong = compared = 0
        for number, rank in enumerate(self._ranks):
            heads = self._shape.heads(number)
            for i in range(LAYERS):
                got = rank.layers[i][:, :, list(blocks)]
                flat = got.reshape(2, len(heads), len(blocks) * size, -1)
                bad = flat != np.repeat(self._stamps[list(blocks)], size)[None, None, :, None]
                span = (slice(None), slice(None), slice(start, tokens))
                bad[span] = False
                if spans is not None:
                    want = pattern(spans, i, heads, start, tokens)
                    bad[span] = flat[span] != want
                    compared += want.nbytes
                wrong += 4 * _count(bad)
        return wrong, compared


def _count(bad: npt.NDArray[np.bool_]) -> int:
    return int(np.count_nonzero(bad))
