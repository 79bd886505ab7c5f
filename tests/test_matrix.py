"""Bytes are equal over real NIXL between processes: TP x TP x KV heads x layouts.

Query heads do not appear: MHA and GQA differ only in how many of them share a KV head.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.harness import (
    BLOCKS_FIRST_HND,
    BLOCKS_FIRST_NHD,
    HND,
    NHD,
    Engine,
    Sidecar,
    random_fill,
    start,
)

GUARD = -7.0
SIZES = (1, 2, 4)


@pytest.fixture(scope="module")
def sidecars(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Sidecar]]:
    made = start(tmp_path_factory.mktemp("matrix"), [f"s{i}" for i in range(8)])
    yield made
    for sidecar in made:
        sidecar.close()


def check(producer: Engine, consumer: Engine, name: str, start_token: int, tokens: int) -> None:
    """One transfer into scattered blocks; every byte is compared, those around it as well."""
    size = producer.spec.block_size
    count = -(-tokens // size)
    remote = [(5 * i + 3) % 32 for i in range(count)]
    local = [(7 * i + 2) % 32 for i in range(count)]
    for caches in consumer.caches:
        for cache in caches.values():
            cache.fill_(GUARD)
    ticket = producer.client.offer(name, remote, tokens)
    consumer.client.fetch(name, ticket, local, start_token)
    assert consumer.received(name) is None
    producer.sent(name)
    others = [block for block in range(32) if block not in local]
    for layer in producer.caches[0]:
        for head in range(producer.heads):
            want = producer.tokens(layer, remote, head)[:, start_token:tokens]
            got = consumer.tokens(layer, local, head)
            assert torch.equal(got[:, start_token:tokens], want)
            assert (got[:, :start_token] == GUARD).all()
            assert (got[:, tokens:] == GUARD).all()
        for caches in consumer.caches:
            block_axis = consumer.axes.index("block")
            untouched = caches[layer].index_select(block_axis, torch.tensor(others))
            assert (untouched == GUARD).all()


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
        check(producer, consumer, "whole", 0, 16)
        check(producer, consumer, "partial", 5, 18)
        stats = consumer.seen[0].kv_connector_stats["fetches"]["whole"]
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
