"""Keys at real sidecars: transfers, a rotation while they go on, and the doctor."""

from __future__ import annotations

import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from kvagent.doctor.peer import PeerRead
from kvagent.wire.keys import fingerprint, load_ring, make_keys
from tests.harness import Engine, Sidecar, check, random_fill

pytest.importorskip("nixl")
pytestmark = pytest.mark.timeout(300)

LONG = 60.0
"""A bound against hangs, never reached."""


class Keyed(Sidecar):
    """With a folder of keys of its own, a copy of the deployment's."""

    def __init__(self, folder: Path, name: str, keys: Path) -> None:
        self.keys = folder / f"{name}.keys"
        shutil.copytree(keys, self.keys)
        super().__init__(folder, name, "--keys", str(self.keys))

    def says(self, words: str) -> None:
        """Waits until its log does."""
        until(lambda: words in self.log.read_text(), f"{self.log.name}: {words!r}")

    def allow(self, public_file: Path) -> None:
        shutil.copy(public_file, self.keys / "allowed")

    def switch(self, own_file: Path) -> None:
        shutil.copy2(own_file, self.keys / "next")
        (self.keys / "next").replace(self.keys / "own.key_secret")


def until(done: Callable[[], object], what: str) -> None:
    end = time.monotonic() + LONG
    while not done():
        assert time.monotonic() < end, what
        time.sleep(0.02)


def test_a_rotation_while_transfers_go_on(tmp_path: Path) -> None:
    """Add the new key everywhere, switch each sidecar, remove the old one: nothing fails."""
    old_own, old_public = make_keys(str(tmp_path / "old"), "old")
    new_own, new_public = make_keys(str(tmp_path / "new"), "new")
    names = ("prefill-0", "prefill-1", "decode-0")
    sidecars = [Keyed(tmp_path, name, old_own.parent) for name in names]
    try:
        for sidecar in sidecars:
            sidecar.wait()
        with (
            Engine(sidecars[:2], "prefill", fill=random_fill(1)) as producer,
            Engine(sidecars[2:], "decode") as consumer,
        ):
            stop = threading.Event()
            failures: list[BaseException] = []
            good = 0

            def traffic() -> None:
                nonlocal good
                try:
                    while not stop.is_set():
                        check(producer, consumer, f"request-{good}", 0, 37)
                        good += 1
                except BaseException as error:
                    failures.append(error)

            def more() -> None:
                """Transfers still succeed."""
                enough = good + 3
                until(lambda: good >= enough or failures, "transfers stand still")
                assert not failures

            thread = threading.Thread(target=traffic)
            thread.start()
            try:
                more()
                new = fingerprint(load_ring(str(new_own.parent)).own.public)
                old = fingerprint(load_ring(str(old_own.parent)).own.public)
                for sidecar in sidecars:
                    sidecar.allow(new_public)
                for sidecar in sidecars:
                    sidecar.says(f", {new} added")
                more()
                for sidecar in sidecars:
                    sidecar.switch(new_own)
                    sidecar.says(", own is new")
                    more()
                for sidecar in sidecars:
                    (sidecar.keys / "allowed" / old_public.name).unlink()
                    sidecar.says(f", {old} removed")
                    more()
            finally:
                stop.set()
                thread.join(LONG)
            assert not failures
            asked(producer, old_own.parent, "none of the allowed keys")
            asked(producer, new_own.parent, "")
    finally:
        for sidecar in sidecars:
            sidecar.close()


def asked(engine: Engine, keys: Path, error: str) -> None:
    """What `kvagent doctor --peer` sees with these keys."""
    host, port = engine.workers[0].endpoint.split(":")
    done = subprocess.run(
        [sys.executable, "-m", "kvagent.doctor.peer", host, port, str(keys)],
        capture_output=True,
        text=True,
        timeout=LONG,
    )
    found = msgspec.json.decode(done.stdout.strip().rpartition("\n")[2], type=PeerRead)
    if error:
        assert found.presence is None
        assert error in found.error
    else:
        assert found.presence is not None
        assert found.presence.engine_id == "prefill"
        assert [rank.error for rank in found.ranks] == ["", ""]
