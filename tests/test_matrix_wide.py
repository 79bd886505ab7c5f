"""The wide matrix over real NIXL: sizes that do not divide, replicas, MLA, unequal block sizes.

CI runs a slice that touches every value; `-m slow` runs all of it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest

from kvagent import FullAttentionSpec, MLASpec
from tests.harness import HND, NHD, Engine, Sidecar, check, random_fill, start

SIZES = (1, 2, 3, 4, 8)
BLOCK_SIZES = (8, 16, 48, 64, 128)
LAYOUTS = {"NHD": NHD, "HND": HND}

pytestmark = pytest.mark.timeout(900)


def parts(cases: list[tuple[object, ...]], every: int) -> list[object]:
    """All cases; those that CI leaves out are marked slow."""
    return [
        pytest.param(*case, marks=[] if i % every == 0 else [pytest.mark.slow])
        for i, case in enumerate(cases)
    ]


@pytest.fixture(scope="module")
def sidecars(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Sidecar]]:
    made = start(tmp_path_factory.mktemp("wide"), [f"s{i}" for i in range(16)])
    yield made
    for sidecar in made:
        sidecar.close()


@pytest.mark.parametrize(
    ("producer_tp", "consumer_tp", "heads"),
    parts(list(itertools.product(SIZES, SIZES, SIZES)), every=13),
)
def test_heads(sidecars: list[Sidecar], producer_tp: int, consumer_tp: int, heads: int) -> None:
    """MHA, GQA and MQA: all that the cache knows of them is its number of KV heads."""
    with (
        Engine(sidecars[:producer_tp], "p", heads=heads, fill=random_fill(heads)) as producer,
        Engine(sidecars[8 : 8 + consumer_tp], "d", heads=heads) as consumer,
    ):
        check(producer, consumer, "whole", 0, 16)
        check(producer, consumer, "partial", 5, 18)


@pytest.mark.parametrize(
    ("producer_tp", "consumer_tp"), parts(list(itertools.product(SIZES, SIZES)), every=6)
)
def test_mla(sidecars: list[Sidecar], producer_tp: int, consumer_tp: int) -> None:
    """Every rank holds the same latents; each consumer rank reads them once, from one replica."""
    spec = MLASpec(block_size=4, head_size=24, dtype="float32")
    seed = 7

    def same(tensor: object) -> object:
        return random_fill(seed)(tensor)  # type: ignore[arg-type]

    with (
        Engine(sidecars[:producer_tp], "p", spec=spec, fill=same) as producer,
        Engine(sidecars[8 : 8 + consumer_tp], "d", spec=spec) as consumer,
    ):
        stats = check(producer, consumer, "whole", 0, 16)
        assert stats["bytes"] == 16 * 24 * 4 * len(consumer.caches[0]) * consumer_tp
        check(producer, consumer, "partial", 5, 18)


@pytest.mark.parametrize(
    ("producer_block", "consumer_block", "producer_axes", "consumer_axes"),
    parts(
        list(itertools.product(BLOCK_SIZES, BLOCK_SIZES, LAYOUTS, LAYOUTS)),
        every=9,
    ),
)
def test_block_sizes(
    sidecars: list[Sidecar],
    producer_block: int,
    consumer_block: int,
    producer_axes: str,
    consumer_axes: str,
) -> None:
    def spec(block_size: int, layout: str) -> FullAttentionSpec:
        return FullAttentionSpec(
            block_size=block_size,
            num_kv_heads=2,
            head_size=8,
            dtype="float32",
            axes=LAYOUTS[layout],
        )

    with (
        Engine(
            sidecars[:1],
            "p",
            spec=spec(producer_block, producer_axes),
            num_blocks=211,
            fill=random_fill(3),
        ) as producer,
        Engine(
            sidecars[8:9],
            "d",
            spec=spec(consumer_block, consumer_axes),
            num_blocks=211,
        ) as consumer,
    ):
        check(producer, consumer, "whole", 0, 384)
        check(producer, consumer, "partial", 61, 333)
