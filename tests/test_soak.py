"""The soak in its short form, its long form (slow), and that it sees what it is there to see."""

from __future__ import annotations

import random
from collections.abc import Iterator

import numpy as np
import pytest

from kvagent.memory.host import HostMemory
from kvagent.soak.pool import Pool
from kvagent.soak.report import show
from kvagent.soak.run import Soak
from kvagent.soak.shapes import (
    CONSUMERS,
    HEADS,
    LAYERS,
    PRODUCERS,
    RankMemory,
    Shape,
    pattern,
)

SHAPES = [*PRODUCERS, *CONSUMERS]
SPANS = [(11, 16), (22, 70)]


@pytest.mark.parametrize(
    ("minutes", "transport", "seed"),
    [
        pytest.param(0.3, "both", 1, marks=pytest.mark.timeout(240)),
        pytest.param(10, "both", 2, marks=[pytest.mark.slow, pytest.mark.timeout(1200)]),
    ],
)
def test_nothing_lost_nothing_wrong_nothing_stuck(
    minutes: float, transport: str, seed: int
) -> None:
    result = Soak(seed, minutes, transport).run()  # type: ignore[arg-type]
    show(result)
    assert result["problems"] == []
    assert result["ok"]
    assert result["faults"]
    assert len(result["pairs"]) == 9
    assert result["compared_bytes"] > 0


class Ranks:
    """The caches of one engine, in this process."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self.memory = [HostMemory(shape.rank_bytes) for _ in range(shape.tp)]
        self.ranks = [RankMemory(shape, f"/proc/self/fd/{m.fd}") for m in self.memory]
        self.pool = Pool(shape, self.ranks, 1)

    def fetched(self, blocks: list[int], start: int, tokens: int) -> None:
        """What a transfer of `SPANS` would leave there, written value by value."""
        for token in range(start, tokens):
            block, slot = divmod(token, self.shape.block_size)
            for number, rank in enumerate(self.ranks):
                for i, layer in enumerate(rank.layers):
                    values = pattern(SPANS, i, self.shape.heads(number), token, token + 1)
                    layer[:, :, blocks[block], slot] = values[:, :, 0]


@pytest.fixture(params=SHAPES, ids=lambda shape: shape.name)
def engine(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    ranks = Ranks(request.param)
    yield ranks
    ranks.ranks.clear()
    for memory in ranks.memory:
        memory.close()


def test_every_value_of_the_pattern_is_another() -> None:
    values = [pattern([(seed, 900)], i, range(HEADS), 0, 900) for seed in (1, 2) for i in range(3)]
    everything = np.concatenate([value.ravel() for value in values])
    # 32 bits: of a few million values, some hundreds are the same by chance.
    assert len(np.unique(everything)) > 0.999 * len(everything)


def test_a_fetch_is_good_only_with_every_byte(engine: Ranks) -> None:
    pool, (start, tokens) = engine.pool, (5, 70)
    blocks, written = pool.take(-(-tokens // engine.shape.block_size) + 1)
    assert written == 0
    assert pool.wrong(blocks, None, start, tokens) == (0, 0)
    engine.fetched(blocks, start, tokens)
    wrong, compared = pool.wrong(blocks, SPANS, start, tokens)
    assert (wrong, compared) == (0, (tokens - start) * LAYERS * 2 * HEADS * 32 * 4)

    choose = random.Random(1)
    size = engine.shape.block_size
    for token in (0, start - 1, start, 15, 16, tokens - 1, tokens, len(blocks) * size - 1):
        layer = choose.choice(choose.choice(engine.ranks).layers)
        head = choose.randrange(layer.shape[1])
        place = (choose.randrange(2), head, blocks[token // size], token % size, 7)
        before = layer[place]
        layer[place] ^= 1 << choose.randrange(32)
        assert pool.wrong(blocks, SPANS, start, tokens)[0] == 4
        # Of a fetch that failed, only what lies around it says anything.
        assert pool.wrong(blocks, None, start, tokens)[0] == (0 if start <= token < tokens else 4)
        layer[place] = before
    assert pool.wrong(blocks, [(33, 70)], start, tokens)[0] > 0


def test_who_writes_into_a_free_block_is_seen(engine: Ranks) -> None:
    pool = engine.pool
    blocks, _ = pool.take(3)
    pool.fill(blocks, SPANS, 0)
    engine.fetched(blocks, 0, 2)  # `fill` writes what a producer offers: the same
    pool.give(blocks)
    assert pool.written_free() == 0
    engine.ranks[-1].layers[0][1, 0, blocks[1], 0, 7] += 1
    assert pool.written_free() == 4
    taken, written = pool.take(engine.shape.num_blocks)
    assert (len(taken), written) == (engine.shape.num_blocks, 4)
    assert pool.take(1) == ([], 0)


def test_a_producer_offers_what_a_consumer_expects(engine: Ranks) -> None:
    pool, tokens = engine.pool, SPANS[-1][1]
    blocks, _ = pool.take(-(-tokens // engine.shape.block_size))
    pool.fill(blocks, SPANS, 0)
    wrong, compared = pool.wrong(blocks, SPANS, 0, tokens)
    beyond = (len(blocks) * engine.shape.block_size - tokens) * LAYERS * 2 * HEADS * 32 * 4
    assert wrong == beyond  # filled too, and no stamp
    assert compared > 0
