"""No child outlives the process that started it, however that one ends."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from kvagent.demo.processes import Children, until
from kvagent.errors import KVAgentError

SECONDS = 30.0
"""Bounds hangs only."""

SLEEP = [sys.executable, "-c", "import time; print('up', flush=True); time.sleep(600)"]
STUBBORN = [
    sys.executable,
    "-c",
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN);"
    "print('up', flush=True); time.sleep(600)",
]
WITH_CHILD = [
    sys.executable,
    "-c",
    "import subprocess, sys, time;"
    "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']);"
    "print(child.pid, flush=True); time.sleep(600)",
]
# As `kvagent demo` does it: starts two children, prints their numbers, waits.
PARENT = """
import asyncio, sys
from pathlib import Path
from kvagent.demo.processes import Children, exit_on_sigterm

with exit_on_sigterm(), Children(Path(sys.argv[1])) as children:
    code = "import time; time.sleep(600)"
    started = [children.start(name, [sys.executable, "-c", code]) for name in "ab"]
    print(*(child.process.pid for child in started), flush=True)
    asyncio.run(children.run(asyncio.sleep(600)))
"""


def eventually(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def alive(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def test_all_children_are_ended(tmp_path: Path) -> None:
    with Children(tmp_path) as children:
        started = [children.start(f"sleeper {number}", SLEEP) for number in range(3)]
        for child in started:
            eventually(child.output)
            assert child.status() is None
    assert not any(alive(child.process.pid) for child in started)
    assert (tmp_path / "sleeper-0.log").read_text() == "up\n"


def test_children_of_children_are_ended(tmp_path: Path) -> None:
    with Children(tmp_path) as children:
        child = children.start("parent", WITH_CHILD)
        eventually(child.output)
        grandchild = int(child.output())
        assert alive(grandchild)
    eventually(lambda: not alive(grandchild))


def test_what_a_dead_child_left_behind_is_ended(tmp_path: Path) -> None:
    with Children(tmp_path) as children:
        child = children.start("parent", WITH_CHILD)
        eventually(child.output)
        grandchild = int(child.output())
        os.kill(child.process.pid, signal.SIGKILL)
        eventually(lambda: child.status() == -signal.SIGKILL)
    eventually(lambda: not alive(grandchild))


def test_a_child_that_ignores_sigterm_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvagent.demo.processes._TERM_SECONDS", 0.1)
    with Children(tmp_path) as children:
        child = children.start("stubborn", STUBBORN)
        eventually(child.output)
    assert child.process.returncode == -signal.SIGKILL


def test_a_signal_while_ending_kills_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvagent.demo.processes._TERM_SECONDS", 10 * SECONDS)
    children = Children(tmp_path)
    child = children.start("stubborn", STUBBORN)
    eventually(child.output)
    before = signal.getsignal(signal.SIGALRM)
    signal.signal(signal.SIGALRM, lambda *_: os.kill(os.getpid(), signal.SIGINT))
    signal.setitimer(signal.ITIMER_REAL, 0.2)
    try:
        children.close()
    finally:
        signal.signal(signal.SIGALRM, before)
    assert child.process.returncode == -signal.SIGKILL
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_child_that_ends_early_is_reported_with_its_last_words(tmp_path: Path) -> None:
    code = "import sys; print('\\n'.join(map(str, range(100)))); sys.exit('no cache')"
    with Children(tmp_path) as children:
        children.start("engine", [sys.executable, "-c", code])
        with pytest.raises(KVAgentError, match=r"engine ended \(exit code 1\)") as raised:
            asyncio.run(children.run(asyncio.sleep(SECONDS)))
    assert "\n99\nno cache" in str(raised.value)
    assert "\n3\n" not in str(raised.value)


def test_a_command_that_does_not_exist_is_reported(tmp_path: Path) -> None:
    with Children(tmp_path) as children:
        children.start("engine", ["/nowhere/engine"])
        with pytest.raises(KVAgentError, match="No such file"):
            asyncio.run(children.run(asyncio.sleep(SECONDS)))


def test_work_is_run_to_its_end(tmp_path: Path) -> None:
    async def work() -> int:
        await asyncio.sleep(0)
        return 7

    with Children(tmp_path) as children:
        children.start("sleeper", SLEEP)
        assert asyncio.run(children.run(work())) == 7


def test_waiting_has_an_end() -> None:
    with pytest.raises(KVAgentError, match="the socket: not ready after 0"):
        asyncio.run(until(lambda: False, "the socket", 0.0))


@pytest.mark.parametrize(
    ("number", "status"),
    [
        (signal.SIGTERM, 128 + signal.SIGTERM),
        (signal.SIGHUP, 128 + signal.SIGHUP),
        (signal.SIGINT, -signal.SIGINT),
        (signal.SIGKILL, -signal.SIGKILL),
    ],
)
def test_children_go_with_their_parent(tmp_path: Path, number: int, status: int) -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, str(tmp_path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    with parent:
        assert parent.stdout is not None
        pids = [int(pid) for pid in parent.stdout.readline().split()]
        assert len(pids) == 2
        parent.send_signal(number)
        assert parent.wait(SECONDS) == status
    eventually(lambda: not any(map(alive, pids)))
