"""The producer's side dies in the middle of a read."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.faults import BIG, GONE, MINE, SMALL, TRANSPORTS, Landing, Watched, cause
from tests.faults import engine, offer, watched
from tests.harness import random_fill

NOTICED = 2.0
"""Seconds within which the death of a producer's sidecar fails a fetch."""


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_its_processes_are_killed(tmp_path: Path, transport: str) -> None:
    names = ["prefill", "other", "decode"]
    with watched(tmp_path, names, transport, lease_seconds=600) as (prefill, other, decode):
        consumer = engine([decode], "decode", BIG)
        landing = Landing(consumer, range(BIG))
        second = engine([other], "other", SMALL, random_fill(2))

        # The sidecar: a failure at once.
        first = engine([prefill], "prefill", BIG, random_fill(1))
        ticket = offer(first, "killed", range(BIG))
        consumer.client.fetch("killed", ticket, list(range(BIG)))
        landing.until(0.05)
        prefill.kill()
        began = time.monotonic()
        assert landing.share() < 1, "the read had ended"
        reason = consumer.received("killed")
        seconds = time.monotonic() - began
        print(f"{transport}: {seconds:.3f} s until the failure was reported: {reason}")
        assert cause(reason) in GONE, reason
        assert seconds < NOTICED
        assert consumer.seen[-1].invalid_block_ids == set(range(BIG))
        landing.write(MINE)
