"""A producer's sidecar that is stopped in the middle of a read over TCP: the fetch fails by its
deadline, a fence ends its reads, others go on, and nothing is written late."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.harness import start
from tests.test_deaths import Consumer, Producer

DEADLINE, FENCE = 4.0, 1.0


@pytest.mark.timeout(240)
def test_a_stopped_sidecar(tmp_path: Path) -> None:
    config = tmp_path / "kvagent.toml"
    config.write_text(
        f"fetch_timeout = {DEADLINE}\nfence_seconds = {FENCE}\nlease_seconds = 600.0\n"
    )
    options = ("--config", str(config))
    prefill, other, decode = start(
        tmp_path, ["prefill", "other", "decode"], *options, env={"UCX_TLS": "tcp"}
    )
    first, second = Producer(prefill, "prefill", 1), Producer(other, "other", 2)
    consumer = Consumer(decode)
    try:
        consumer.fetch("hangs", first.ticket)
        time.sleep(0.05)
        prefill.stop()
        reason = consumer.end("hangs", 10 * DEADLINE)
        # All of it may have been there already; then it could not be validated.
        assert reason is not None
        assert reason.split(":")[0] in ("timed_out", "peer_gone")
        for cache in consumer.caches.values():
            cache.fill_(5.0)  # the blocks are the engine's again
        prefill.resume()
        time.sleep(1.0)
        assert all(bool((cache == 5.0).all()) for cache in consumer.caches.values())
        consumer.fetch("good", second.ticket)
        assert consumer.end("good", 30) is None
        assert consumer.holds(2)
    finally:
        consumer.close()
        first.kill()
        second.kill()
        for sidecar in (prefill, other, decode):
            sidecar.close()
