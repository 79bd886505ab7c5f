"""The producer's engine, or its sidecar, is killed in the middle of a read."""

from __future__ import annotations

import json
import subprocess
import sys
import time
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

NOTICED = 2.0
"""Seconds within which the death of a producer's sidecar fails the fetches from it."""


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_its_sidecar_is_killed(tmp_path: Path, transport: str) -> None:
    names = ["prefill", "other", "decode"]
    with watched(tmp_path, names, transport, lease_seconds=600) as (prefill, other, decode):
        producer = engine([prefill], "prefill", BIG, random_fill(1))
        second = engine([other], "other", SMALL, random_fill(2))
        consumer = engine([decode], "decode", BIG + SMALL)
        landing = Landing(consumer, range(BIG))
        ticket = offer(producer, "killed", range(BIG))
        consumer.client.fetch("killed", ticket, list(landing.blocks))
        landing.until(0.05)
        began = time.monotonic()
        prefill.kill()
        assert landing.share() < 1, "the read had ended"
        reason = consumer.received("killed")
        seconds = time.monotonic() - began
        landing.write(MINE)
        print(f"\n{transport}: failed {seconds:.3f} s after the kill: {reason}")
        assert cause(reason) in GONE, reason
        assert consumer.seen[-1].invalid_block_ids == set(landing.blocks)
        assert seconds < NOTICED

        # The survivor reads from others, and from the successor of the one that died.
        again = Watched(tmp_path, "prefill", transport, lease_seconds=600)
        try:
            successor = engine([again], "prefill", SMALL, random_fill(3))
            for source in (second, successor):
                aside = Landing(consumer, range(BIG, BIG + SMALL))
                ticket = offer(source, "good", range(SMALL))
                consumer.client.fetch("good", ticket, list(aside.blocks))
                assert consumer.received("good") is None
                assert aside.equals(source, range(SMALL))
            assert landing.keeps(MINE)
            decode.until_idle()
            for each in (producer, second, successor, consumer):
                each.close()
        finally:
            again.kill()


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_its_engine_is_killed(tmp_path: Path, transport: str) -> None:
    """The cache is the sidecar's: the fetch is good."""
    with watched(tmp_path, ["prefill", "decode"], transport, lease_seconds=600) as sidecars:
        prefill, decode = sidecars
        command = [sys.executable, "-m", "tests.producer", prefill.socket, "prefill"]
        with (
            subprocess.Popen([*command, str(BIG), "1"], stdout=subprocess.PIPE) as process,
            engine([decode], "decode", BIG) as consumer,
        ):
            assert process.stdout is not None
            ticket = json.loads(process.stdout.readline())
            landing = Landing(consumer, range(BIG))
            consumer.client.fetch("good", ticket, list(landing.blocks))
            landing.until(0.05)
            process.kill()
            process.wait()
            assert landing.share() < 1, "the read had ended"
            assert consumer.received("good") is None
            for i, cache in enumerate(consumer.caches[0].values()):
                want = pattern(1, i, cache.shape)
                assert torch.equal(cache.view(torch.int32), want.view(torch.int32))
        for sidecar in sidecars:
            sidecar.until_idle()
