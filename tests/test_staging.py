"""The staging buffer over real NIXL between processes: bytes are equal with it and without."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.harness import (
    BLOCKS_FIRST_NHD,
    HND,
    NHD,
    Engine,
    Sidecar,
    check,
    random_fill,
    start,
)

SHAPE = {"heads": 8, "head_size": 16, "block_size": 8, "layers": 4, "num_blocks": 33}
TOKENS = 120


@pytest.fixture(scope="module")
def producers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Sidecar]]:
    yield from running(tmp_path_factory.mktemp("producers"), 4)


@pytest.fixture(scope="module", params=["staged", "off"])
def consumers(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, list[Sidecar]]]:
    size = {"staged": 600_000, "off": 0}[request.param]  # a few blocks at a time
    folder = tmp_path_factory.mktemp("consumers")
    settings = folder / "settings.toml"
    settings.write_text(f"staging_bytes = {size}\n")
    for sidecars in running(folder, 4, "--config", str(settings)):
        yield request.param, sidecars


def running(folder: Path, count: int, *options: str) -> Iterator[list[Sidecar]]:
    made = start(folder, [f"s{i}" for i in range(count)], *options)
    yield made
    for sidecar in made:
        sidecar.close()


@pytest.mark.parametrize(
    ("here", "there"),
    [
        ((4, NHD, 8), (2, HND, 8)),
        ((2, HND, 8), (4, NHD, 8)),
        ((1, BLOCKS_FIRST_NHD, 8), (3, HND, 8)),
        ((2, NHD, 8), (1, HND, 12)),
        ((1, NHD, 16), (4, NHD, 4)),
    ],
    ids=["NHD-HND", "HND-NHD", "blocks-first", "blocks-12", "some-of-the-heads"],
)
def test_equal_bytes(
    producers: list[Sidecar],
    consumers: tuple[str, list[Sidecar]],
    here: tuple[int, tuple[str, ...], int],
    there: tuple[int, tuple[str, ...], int],
) -> None:
    buffer, sidecars = consumers

    def engine(machines: list[Sidecar], name: str, side: Any, **more: Any) -> Engine:
        tp, axes, block_size = side
        shape = {**SHAPE, "block_size": block_size}
        return Engine(machines[:tp], name, axes=axes, **shape, **more)

    with (
        engine(producers, "prefill", here, fill=random_fill(1)) as producer,
        engine(sidecars, "decode", there) as consumer,
    ):
        stats = check(producer, consumer, "whole", 0, TOKENS)
        check(producer, consumer, "partial", 5, TOKENS - 3)
        check(producer, consumer, "one token", 50, 51)
        wanted = TOKENS * 8 * 16 * 4 * 2 * 4
        assert stats["bytes"] == wanted
        assert stats["descriptors"] > 0
        assert stats["staged"] >= wanted if buffer == "staged" else stats["staged"] == 0
