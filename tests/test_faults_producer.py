"""The producer's engine, or its sidecar, is killed in the middle of a read."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

from tests.faults import (
    BIG,
    GONE,
    MINE,
    SMALL,
    TRANSPORTS,
    Landing,
    Watched,
    cause,
    engine,
    offer,
    watched,
)
from tests.harness import random_fill
from tests.producer import pattern

pytestmark = pytest.mark.timeout(300)  # busy machines start processes slowly

NOTICED = 2.0
"""Seconds within which the death of a producer's sidecar fails the fetches from it."""


@pytest.fixture(scope="module", params=TRANSPORTS)
def transport(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def sidecars(transport: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Watched]]:
    folder = tmp_path_factory.mktemp(transport)
    with watched(folder, ["prefill", "decode"], transport, lease_seconds=600) as made:
        yield made


def test_its_engine_is_killed(sidecars: list[Watched]) -> None:
    """The cache is the sidecar's: the fetch is good."""
    prefill, decode = sidecars
    command = [sys.executable, "-m", "tests.producer", prefill.socket, "prefill", str(BIG), "1"]
    with ExitStack() as ends:
        process = ends.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE))
        ends.callback(process.kill)
        consumer = ends.enter_context(engine([decode], "decode", BIG))
        assert process.stdout is not None
        ticket = json.loads(process.stdout.readline())
        landing = Landing(consumer, range(BIG))
        consumer.client.fetch("good", ticket, list(landing.blocks))
        landing.until(0.05)
        decode.stop()  # or the read might end before the process does
        process.kill()
        process.wait()
        assert landing.share() < 1, "the read had ended"
        decode.resume()
        assert consumer.received("good") is None
        for i, cache in enumerate(consumer.caches[0].values()):
            want = pattern(1, i, cache.shape)
            assert torch.equal(cache.view(torch.int32), want.view(torch.int32))
    for sidecar in sidecars:
        sidecar.until_idle()


def test_its_sidecar_is_killed(tmp_path: Path, transport: str, sidecars: list[Watched]) -> None:
    other, decode = sidecars
    with (
        engine([other], "other", SMALL, random_fill(2)) as bystander,
        engine([decode], "decode", BIG + SMALL) as consumer,
    ):
        landing = Landing(consumer, range(BIG))
        with (
            watched(tmp_path, ["doomed"], transport, lease_seconds=600) as (doomed,),
            engine([doomed], "doomed", BIG, random_fill(1)) as producer,
        ):
            ticket = offer(producer, "killed", range(BIG))
            consumer.client.fetch("killed", ticket, list(landing.blocks))
            landing.until(0.05)
            began = time.monotonic()
            doomed.kill()
            assert landing.share() < 1, "the read had ended"
            reason = consumer.received("killed")
            seconds = time.monotonic() - began
        landing.write(MINE)
        print(f"\n{transport}: failed {seconds:.3f} s after the kill: {reason}")
        assert cause(reason) in GONE, reason
        assert consumer.seen[-1].invalid_block_ids == set(landing.blocks)
        assert seconds < NOTICED

        # The survivor reads from others, and from the successor of the one that died.
        with (
            watched(tmp_path, ["doomed"], transport, lease_seconds=600) as successors,
            engine(successors, "doomed", SMALL, random_fill(3)) as successor,
        ):
            for source in (bystander, successor):
                aside = Landing(consumer, range(BIG, BIG + SMALL))
                ticket = offer(source, "good", range(SMALL))
                consumer.client.fetch("good", ticket, list(aside.blocks))
                assert consumer.received("good") is None
                assert aside.equals(source, range(SMALL))
        assert landing.keeps(MINE)
        decode.until_idle()
