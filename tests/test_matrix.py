"""Bytes are equal over real NIXL between processes: TP x TP x KV heads x layouts.

Query heads do not appear: MHA and GQA differ only in how many of them share a KV head.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.harness import (
    BLOCKS_FIRST_HND,
    BLOCKS_FIRST_NHD,
    HND,
    NHD,
    Engine,
    Sidecar,
    check,
    random_fill,
    start,
)

SIZES = (1, 2, 4)


@pytest.fixture(scope="module")
def sidecars(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Sidecar]]:
    made = start(tmp_path_factory.mktemp("matrix"), [f"s{i}" for i in range(8)])
    yield made
    for sidecar in made:
        sidecar.close()


def shares(consumer: Engine, tokens: int) -> int:
    """Bytes that all ranks of the consumer read: replicas each read their own copy."""
    ranks = len(consumer.caches)
    held = sum(
        max(1, (r + 1) * consumer.heads // ranks - r * consumer.heads // ranks)
        for r in range(ranks)
    )
    return tokens * held * consumer.spec.head_size * 4 * 2 * len(consumer.caches[0])


@pytest.mark.parametrize("axes", [(HND, HND), (NHD, NHD)], ids=["HND", "NHD"])
@pytest.mark.parametrize("heads", [1, 2, 4, 8])
@pytest.mark.parametrize("consumer_tp", SIZES)
@pytest.mark.parametrize("producer_tp", SIZES)
def test_tp_heads_layout(
    sidecars: list[Sidecar],
    producer_tp: int,
    consumer_tp: int,
    heads: int,
    axes: tuple[tuple[str, ...], tuple[str, ...]],
) -> None:
    name = f"{producer_tp}-{consumer_tp}-{heads}"
    with (
        Engine(
            sidecars[:producer_tp], f"p{name}", heads=heads, axes=axes[0], fill=random_fill(heads)
        ) as producer,
        Engine(sidecars[4 : 4 + consumer_tp], f"d{name}", heads=heads, axes=axes[1]) as consumer,
    ):
        stats = check(producer, consumer, "whole", 0, 16)
        check(producer, consumer, "partial", 5, 18)
        assert stats["bytes"] == shares(consumer, 16)


@pytest.mark.parametrize(
    "axes",
    [(NHD, HND), (HND, NHD), (BLOCKS_FIRST_NHD, HND), (NHD, BLOCKS_FIRST_HND)],
    ids=["NHD-HND", "HND-NHD", "blocks-first-HND", "NHD-blocks-first"],
)
def test_unequal_layouts(
    sidecars: list[Sidecar], axes: tuple[tuple[str, ...], tuple[str, ...]]
) -> None:
    with (
        Engine(sidecars[:2], "p-axes", axes=axes[0], fill=random_fill(1)) as producer,
        Engine(sidecars[4:5], "d-axes", axes=axes[1]) as consumer,
    ):
        check(producer, consumer, "whole", 0, 16)
        check(producer, consumer, "partial", 3, 9)
