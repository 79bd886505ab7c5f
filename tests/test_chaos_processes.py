"""The same as `test_chaos`, in small, with sidecars in processes of their own and real NIXL."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path

import pytest

from tests.drills import Traffic
from tests.faults import TRANSPORTS, watched
from tests.harness import NHD, Engine

CHAOS = (
    "{{ drop = 0.05, duplicate = 0.05, delay = 0.1, reorder = 0.1, delay_seconds = 0.3, "
    "seed = {} }}"
)
SETTINGS = {"lease_seconds": 5.0, "fetch_timeout": 15.0, "call_timeout": 3.0}
pytestmark = pytest.mark.timeout(600)
"""Most of it is for four sidecars to start, on a busy machine."""
SPEC = {"block_size": 16, "head_size": 64, "num_blocks": 64}


def storm(folder: Path, transport: str, seed: int, requests: int) -> None:
    """All sidecars have a `[chaos]` section; every request ends once, good ones are right."""
    names = ["prefill-0", "prefill-1", "decode-0", "decode-1"]
    rng = random.Random(seed)
    with watched(folder, names, transport, chaos=CHAOS.format(seed), **SETTINGS) as sidecars:  # type: ignore[arg-type]
        with (
            Engine(sidecars[:2], "prefill", **SPEC) as producer,  # type: ignore[arg-type]
            Engine(sidecars[2:], "decode", axes=NHD, **SPEC) as consumer,  # type: ignore[arg-type]
        ):
            traffic = Traffic(producer, consumer, seed)
            for number in range(requests):
                traffic.until(lambda: traffic.room)
                name, what = f"r{number}", rng.random()
                if what < 0.1:
                    consumer.client.release(traffic.offer(name, fetched=False).ticket)
                    continue
                traffic.start(name, rng.choice((0, 5)))
                if what < 0.2:
                    rng.choice((producer, consumer)).client.cancel(name)
                traffic.poll()
            statuses = [one.status for one in sidecars]
            traffic.finish(statuses)
            faults: Counter[str] = Counter()
            for status in statuses:
                faults.update(status()["chaos"])
        causes = Counter(cause.split(":")[0] or "good" for cause in traffic.ends.values())
        print(f"{transport}, seed {seed}: {dict(causes)}; {dict(faults)}")
        assert all(faults[fault] for fault in ("drop", "duplicate", "delay", "reorder"))
        assert causes["good"] > requests / 4
        assert not {"internal", "reset"} & set(causes)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_storm(tmp_path: Path, transport: str) -> None:
    storm(tmp_path, transport, 1, 60)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2, 7))
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_long_storm(tmp_path: Path, transport: str, seed: int) -> None:
    storm(tmp_path, transport, seed, 500)
