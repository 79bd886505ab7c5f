"""Any process of either side is restarted, on the same ports and sockets, under load and idle: the
others keep running, and serve again. Prints how long it took."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from rich.console import Console
from rich.table import Table

from kvagent.soak.faults import Fault, Faults
from kvagent.soak.messages import Check
from kvagent.soak.report import fault_rows
from kvagent.soak.shapes import HND, NHD, Shape
from kvagent.soak.traffic import Traffic
from kvagent.soak.world import World

KINDS = ("SIGKILL worker", "SIGKILL scheduler", "SIGKILL leader", "SIGKILL follower")
BOUND = 60.0
"""Against hangs; what is seen is a few seconds."""


class Pair:
    """A producer and a consumer of two ranks each."""

    def __init__(self, folder: Path, tcp: bool) -> None:
        shapes = [Shape("p", 2, 8, NHD, tcp), Shape("c", 2, 16, HND, tcp)]
        self.world = World(folder, shapes, 1)
        self.producer, self.consumer = self.world.engines.values()
        self.traffic = Traffic(self.world, [self.producer], [self.consumer], 1, most=6)
        self.traffic.running = False
        self.faults = Faults(self.world, self.traffic, 1)
        self.faults.running = False

    def until(self, done: Callable[[], bool], what: str) -> None:
        until = time.monotonic() + BOUND
        while not done():
            assert time.monotonic() < until, f"{what}; logs in {self.world.folder}"
            for engine, event in self.world.tick(0.01):
                self.traffic.heard(engine, event)
            self.traffic.tick()
            self.faults.tick()
            assert self.traffic.wrong == []
            assert self.world.deaths == []

    def fetch(self) -> bool:
        """One request that nothing disturbs: whether it was good."""
        good = sum(self.traffic.good.values())
        self.traffic.begin(self.producer, self.consumer, "plain")
        self.until(lambda: not self.traffic, "a request does not end")
        return sum(self.traffic.good.values()) > good

    def restart(self, kind: str, side: str) -> Fault:
        """Kills one process; checks afterwards that no other one is new."""
        engine = self.world.engines[side]
        before = self.world.pids()
        fault = self.faults.inject(kind, engine)
        assert fault is not None
        fault.kind = f"{side}: {kind}"
        self.until(lambda: not engine.up, "nothing died")
        self.until(lambda: engine.up, "not started again")
        after = self.world.pids()
        changed = [name for name, pid in before.items() if after[name] != pid]
        assert len(changed) == 1
        assert changed[0].startswith(f"{side} ")
        return fault

    def end(self) -> None:
        """Nothing is left over."""
        self.traffic.running = False
        self.until(lambda: not self.traffic, "requests are stuck")
        for engine in self.world.engines.values():
            engine.say(Check())
        self.until(lambda: len(self.traffic.checked) == 2, "no answer")
        assert self.traffic.checked == {"p": 0, "c": 0}
        assert self.traffic.wrong == []

    def show(self, title: str) -> None:
        table = Table("Restarted", "Count", "Median s", "Worst s", title=title)
        for row in fault_rows(self.faults.done):
            table.add_row(*(str(row[key]) for key in ("fault", "count", "median_s", "worst_s")))
        Console(width=100).print(table)


@pytest.fixture
def pair(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Pair]:
    pair = Pair(tmp_path, tcp=request.param == "tcp")
    with pair.world:
        pair.world.wait_up()
        yield pair


def rounds(short: int, long: int, *transports: str) -> pytest.MarkDecorator:
    """The short form for CI over the named transports, the long one over both."""
    slow = [pytest.mark.slow, pytest.mark.timeout(3600)]
    cases = [pytest.param(name, short, marks=pytest.mark.timeout(300)) for name in transports]
    cases += [pytest.param(name, long, marks=slow) for name in ("shm", "tcp")]
    return pytest.mark.parametrize(("pair", "count"), cases, indirect=["pair"])


@rounds(1, 5, "tcp")
def test_under_load(pair: Pair, count: int) -> None:
    pair.traffic.running = True
    pair.until(lambda: sum(pair.traffic.good.values()) >= 5, "no traffic")
    for _ in range(count):
        for kind in KINDS:
            for side in ("p", "c"):
                fault = pair.restart(kind, side)
                pair.until(lambda f=fault: f.recovered is not None, "not served again")  # type: ignore[misc]
    pair.end()
    pair.show("Under load: seconds until served again")
    assert len(pair.faults.done) == count * 2 * len(KINDS)


@rounds(1, 5, "shm")
def test_idle(pair: Pair, count: int) -> None:
    assert pair.fetch()
    for _ in range(count):
        for kind in KINDS:
            for side in ("p", "c"):
                fault = pair.restart(kind, side)
                pair.until(lambda f=fault: f.back is not None, "not up")  # type: ignore[misc]
                # A follower's news take up to a second to get to its leader: a ticket that is made
                # before that is refused.
                until = time.monotonic() + BOUND
                while not pair.fetch():
                    assert time.monotonic() < until, f"{fault.kind}: {pair.traffic.failed}"
    pair.end()
    pair.show("Idle: seconds until served again")
