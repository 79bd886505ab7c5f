"""The consumer is killed, sleeps, or is slow: the producer's blocks come back in time, and no
sooner than they may."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.faults import (
    BIG,
    SMALL,
    TRANSPORTS,
    Landing,
    cause,
    engine,
    offer,
    watched,
)
from tests.harness import random_fill

LEASE = 2.0
IN_TIME = LEASE + LEASE / 3
"""A lease, and the interval at which it is renewed."""


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("engine_too", [False, True], ids=["its sidecar", "sidecar and engine"])
def test_it_is_killed(tmp_path: Path, transport: str, engine_too: bool) -> None:
    names = ["prefill", "decode", "other"]
    with (
        watched(tmp_path, names, transport, lease_seconds=LEASE) as (prefill, decode, other),
        engine([prefill], "prefill", BIG, random_fill(1)) as producer,
    ):
        command = [sys.executable, "-m", "tests.faults", decode.socket, "decode", str(BIG)]
        pipe = subprocess.PIPE
        with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as process:
            assert process.stdin is not None
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            process.stdin.write(json.dumps(offer(producer, "request", range(BIG))) + "\n")
            process.stdin.flush()
            assert process.stdout.readline() == "reading\n"
            began = time.monotonic()
            decode.kill()
            if engine_too:
                process.kill()
            else:  # it is told, and ends
                assert process.stdout.readline().startswith("agent_lost")
        ended = prefill.status()["leases_ended"]
        assert "completed" not in ended, "the read had ended"
        producer.sent("request")
        seconds = time.monotonic() - began
        print(f"\n{transport}: the blocks are back {seconds:.3f} s after the kill")
        assert seconds < IN_TIME + 1.0
        assert prefill.status()["leases_ended"] == {"expired": 1}
        prefill.until_idle()

        # The survivor serves others.
        with engine([other], "other", SMALL) as survivor:
            landing = Landing(survivor, range(SMALL))
            ticket = offer(producer, "good", range(SMALL))
            survivor.client.fetch("good", ticket, list(landing.blocks))
            assert survivor.received("good") is None
            assert landing.equals(producer, range(SMALL))
