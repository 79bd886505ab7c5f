"""Wrong frames on the unix socket of a real sidecar, and what works afterwards."""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvagent import ModelInfo, WorkerInfo
from kvagent.wire import local
from kvagent.wire.messages import MAX_LOCAL_BYTES, Attach, Cancel, Join, Offer
from tests.fuzz import BLOCKS, LONG, Fuzz, Health, local_messages, until
from tests.harness import Engine, Sidecar, check, random_fill, start

pytest.importorskip("nixl")

CONVERSATION = 40
"""Frames of one connection, unless it ends before."""


@pytest.fixture(scope="module")
def sidecars(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Sidecar]]:
    made = start(tmp_path_factory.mktemp("fuzz"), ["fuzzed", "other"])
    yield made
    for sidecar in made:
        sidecar.close()


class Speaker:
    """A process of the same user that does not keep to the protocol."""

    def __init__(self, sidecar: Sidecar) -> None:
        self._socket = local.connect(sidecar.socket, LONG)
        self.open = True

    def say(self, data: bytes) -> None:
        try:
            self._socket.sendall(data)
            self.listen(0.0)
        except (BrokenPipeError, ConnectionResetError):
            self.open = False

    def listen(self, timeout: float) -> None:
        """Takes what there is, so that nothing is kept for us."""
        self._socket.settimeout(timeout)
        try:
            while self.open:
                self.open = bool(self._socket.recv(1 << 16))
        except (BlockingIOError, TimeoutError):
            pass
        except ConnectionResetError:
            self.open = False
        finally:
            self._socket.settimeout(LONG)

    def hang_up(self) -> None:
        """Afterwards all that was said has been looked at: the sidecar hangs up too."""
        try:
            self._socket.shutdown(socket.SHUT_WR)
        except OSError:
            self.open = False
        self.listen(LONG)
        assert not self.open, "the sidecar does not hang up"
        self._socket.close()


def frame(fuzz: Fuzz) -> bytes:
    """Mostly a good length, and a message that is wrong in some way."""
    payload = fuzz.message()
    length = len(payload)
    if fuzz.random.random() < 0.02:
        length = fuzz.random.choice(
            (0, length + 1, MAX_LOCAL_BYTES, MAX_LOCAL_BYTES + 1, 2**32 - 1)
        )
    return struct.pack("<I", length) + payload


def throw(sidecar: Sidecar, fuzz: Fuzz, count: int) -> None:
    said = 0
    while said < count:
        speaker = Speaker(sidecar)
        if fuzz.random.random() < 0.5:
            speaker.say(local.frame(Attach()))  # as a scheduler it may say more
        for _ in range(CONVERSATION):
            if not speaker.open:
                break
            speaker.say(frame(fuzz))
            said += 1
        speaker.hang_up()


def works(sidecars: list[Sidecar], name: str) -> None:
    """Both engines come up, and a transfer each way."""
    with (
        Engine(sidecars[:1], f"prefill-{name}", fill=random_fill(1)) as producer,
        Engine(sidecars[1:], f"decode-{name}", fill=random_fill(2)) as consumer,
    ):
        check(producer, consumer, f"{name}-there", 0, 37)
        check(consumer, producer, f"{name}-back", 0, 20)


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    "count",
    [10_000, pytest.param(100_000, marks=[pytest.mark.slow, pytest.mark.timeout(3000)])],
)
def test_frames_that_are_wrong(sidecars: list[Sidecar], count: int) -> None:
    works(sidecars, f"before-{count}")
    fuzz = Fuzz(5, local_messages())
    throw(sidecars[0], fuzz, max(2000, count // 10))
    health = Health(sidecars[0])
    descriptors = Path(f"/proc/{sidecars[0].process.pid}/fd")
    before = len(os.listdir(descriptors))
    throw(sidecars[0], fuzz, count)
    health.check(log=(256 << 10) + count * 10)  # a line for each fetch that was asked for
    until(lambda: len(os.listdir(descriptors)) < before + 20, "descriptors are left over")
    works(sidecars, f"after-{count}")


@pytest.mark.timeout(300)
def test_one_that_is_refused_again_and_again(sidecars: list[Sidecar]) -> None:
    """Its connection ends; it can neither flood the log nor fill the memory."""
    works(sidecars, "first")
    health = Health(sidecars[0])
    nowhere = WorkerInfo(
        engine_id="e", tp_rank=1, tp_size=2, model=ModelInfo(name="m", num_layers=1)
    )
    for message in (Cancel(request_id="r"), Join(info=nowhere)):
        speaker = Speaker(sidecars[0])
        data = local.frame(message) * 50
        for _ in range(4000):
            if not speaker.open:
                break
            speaker.say(data)
        assert not speaker.open
        speaker.hang_up()
    health.check(log=64 << 10)
    works(sidecars, "last")


@pytest.mark.timeout(300)
def test_a_scheduler_faster_than_its_sidecar(sidecars: list[Sidecar]) -> None:
    """It is made to wait; the sidecar does not keep what it has not looked at."""
    works(sidecars, "slow")
    health = Health(sidecars[0])
    speaker = Speaker(sidecars[0])
    speaker.say(local.frame(Attach()))
    offer = Offer(
        request_id="r", transfer_id="t", token=bytes(16), blocks=BLOCKS * 2000, num_tokens=8
    )
    data = local.frame(offer) * 20
    for _ in range(200):
        speaker.say(data)
    speaker.hang_up()
    health.check()
    works(sidecars, "again")
