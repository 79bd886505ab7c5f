"""Cancels at random moments, on either side: no block and no message is left behind, every request
ends once on each side, and those that were not cancelled have right bytes."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

import pytest

from kvagent.agent.peers import PeerBook
from kvagent.visible.status import status
from tests.drills import Request, Status, Traffic
from tests.faults import TRANSPORTS, Watched, watched
from tests.harness import NHD, Engine
from tests.loopback import LoopbackSidecar, Stage

AFTER = (0.0, 0.001, 0.004, 0.016, 0.03, 0.06, 0.1)
"""Seconds between a request and its cancel, at most; which one is drawn first, so that every order
of magnitude has its share."""
SOON = (0.0, 0.0005, 0.001, 0.002, 0.004, 0.008, 0.016)
"""The same for processes, where nothing makes reads take longer."""
OPEN = 24
"""Requests at a time."""

Look = Callable[[str], str]


def cancels(
    producer: Engine,
    consumer: Engine,
    statuses: Sequence[Status],
    count: int,
    seed: int,
    look: Look = lambda _: "open",
    disturb: Callable[[int], None] = lambda _: None,
    after: Sequence[float] = SOON,
) -> Counter[str]:
    """`count` requests that are cancelled, among others that are not. `look` says in which state a
    request is; `disturb` is called before each; `after` as `AFTER`. Returns causes and states."""
    rng = random.Random(seed)
    traffic = Traffic(producer, consumer, seed)
    seen: Counter[str] = Counter()
    waiting: list[Request] = []
    survivors: set[str] = set()

    def cancel_due() -> None:
        now = time.monotonic()
        for request in [r for r in waiting if now >= r.moments[0][0]]:
            _, engine = request.moments.pop(0)
            state = "over" if request.name in traffic.ends else look(request.name)
            seen[f"{engine.engine_id} while {state}"] += 1
            engine.client.cancel(request.name)
            if not request.moments:
                waiting.remove(request)

    done = number = 0
    while done < count or waiting:
        cancel_due()
        traffic.poll()
        if done >= count or len(traffic.requests) >= OPEN or not traffic.room:
            time.sleep(0.0002)
            continue
        number += 1
        name = f"r{number}"
        disturb(number)
        if rng.random() < 0.2:
            survivors.add(name)
            traffic.start(name, rng.choice((0, 5)))
            continue
        done += 1
        request = traffic.offer(name, start=rng.choice((0, 5)))
        sides = rng.choice(([producer], [consumer], [producer, consumer], [consumer] * 2))
        if rng.random() < 0.1:  # before the fetch that it cancels has arrived anywhere
            rng.choice((producer, consumer)).client.cancel(name)
        traffic.fetch(request)
        now = time.monotonic()
        moments = [now + rng.uniform(0, rng.choice(after)) for _ in sides]
        request.moments = sorted(zip(moments, sides, strict=True), key=lambda moment: moment[0])
        waiting.append(request)
    traffic.finish(statuses)
    assert not {name: traffic.ends[name] for name in survivors if traffic.ends[name]}
    causes = Counter(cause.split(":")[0] or "good" for cause in traffic.ends.values())
    assert causes.keys() <= {"good", "cancelled", "released"}, traffic.ends
    assert causes["cancelled"] > count / 10
    ended = [status()["leases_ended"] for status in statuses]
    print(f"{done} cancelled of {number}: {dict(causes)}; {dict(sorted(seen.items()))}; {ended[0]}")
    return causes + seen


def forget(book: PeerBook) -> None:
    for session in book.sessions():
        book.forget(session)


def loopback(count: int, seed: int) -> Counter[str]:
    stage = Stage()
    ranks = [LoopbackSidecar(stage) for _ in range(4)]
    engines = [
        Engine(ranks[:2], "prefill", num_blocks=128),  # type: ignore[arg-type]
        Engine(ranks[2:], "decode", num_blocks=128, axes=NHD),  # type: ignore[arg-type]
    ]
    lender, borrower = ranks[0].agent.leader, ranks[2].agent.leader
    rng = random.Random(seed)

    def look(name: str) -> str:
        record = borrower.fetches.of_request(name)
        return record.state.value if record is not None else "not here"

    def disturb(number: int) -> None:
        """Reads take longer or shorter, and now and then the engines have yet to meet."""
        for rank in ranks[:2]:
            rank.fabric.faults.delay = rng.choice((0.0, 0.001, 0.005))
        if number % 2 == 0:  # a fetch from one that is known connects at once
            for rank in ranks[2:]:
                stage.call(lambda book=rank.agent.rank.peers: forget(book))  # type: ignore[misc]

    try:
        found = cancels(
            *engines,
            [lambda one=one: stage.call(lambda: status(one.agent)) for one in ranks],  # type: ignore[misc]
            count,
            seed,
            look,
            disturb,
            AFTER,
        )
        assert not lender.lender._parked
        assert not borrower.borrower._running
        assert borrower.borrower._aggregator is not None
        assert not borrower.borrower._aggregator.num_counting
        return found
    finally:
        for engine in engines:
            engine.close()
        for rank in ranks:
            rank.close()
        stage.close()


SLOW = pytest.mark.slow


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=SLOW) for seed in range(1, 6))])
def test_a_thousand_cancels(seed: int) -> None:
    found = loopback(1000, seed)
    for state in ("connecting", "reading"):
        for side in ("prefill", "decode"):
            assert found[f"{side} while {state}"]


@pytest.fixture(scope="module", params=TRANSPORTS)
def sidecars(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[list[Watched]]:
    """Of a producer, and of a consumer of two ranks; real ones."""
    folder = tmp_path_factory.mktemp(request.param)
    with watched(folder, ["prefill", "decode-0", "decode-1"], request.param) as made:
        yield made


@pytest.mark.timeout(600)  # of which most is for three sidecars to start, on a busy machine
@pytest.mark.parametrize("count", [100, pytest.param(1000, marks=SLOW)])
def test_cancels_of_processes(sidecars: list[Watched], count: int) -> None:
    spec = {"block_size": 16, "head_size": 64, "num_blocks": 128}
    with (
        Engine(sidecars[:1], "prefill", **spec) as producer,  # type: ignore[arg-type]
        Engine(sidecars[1:], "decode", axes=NHD, **spec) as consumer,  # type: ignore[arg-type]
    ):
        cancels(producer, consumer, [one.status for one in sidecars], count, count)
