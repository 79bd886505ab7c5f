"""`kvagent chaos` against processes that do nothing but live."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvagent.chaos.drill import Drill
from kvagent.chaos.schedule import Action, Strike
from kvagent.chaos.target import Gone, Process, Target, find_all, parse_targets
from kvagent.cli import app
from kvagent.errors import ConfigError

LONG = 30.0
"""Seconds; a bound against hangs."""
LISTENER = """
import os, socket, sys, time
path = sys.argv[1]
with socket.socket(socket.AF_UNIX) as listener:
    if os.path.exists(path):
        os.unlink(path)
    listener.bind(path)
    listener.listen()
    while True:
        listener.accept()
"""


def wait_for(true: Callable[[], object], what: str) -> None:
    until = time.monotonic() + LONG
    while not true():
        assert time.monotonic() < until, what
        time.sleep(0.005)


def state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


class Supervised:
    """A process that listens on a socket, started again whenever it ends."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)
        self.pids: list[int] = []
        self.away = False
        """Set: it is not started again."""
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        wait_for(self.listens, "nobody listens")

    def _run(self) -> None:
        while not self._ending.is_set() and not self.away:
            command = [sys.executable, "-S", "-c", LISTENER, self.path]
            self._process = subprocess.Popen(command)
            self.pids.append(self._process.pid)
            self._process.wait()

    def listens(self) -> bool:
        try:
            Target("x", path=self.path).find()
        except Gone:
            return False
        return True

    def close(self) -> None:
        self._ending.set()
        self._process.kill()
        self._thread.join(LONG)


@pytest.fixture
def supervised(tmp_path: Path) -> Iterator[Supervised]:
    made = Supervised(tmp_path / "a.sock")
    yield made
    made.close()


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(["sleep", "1000"])
    yield process
    process.kill()
    process.wait()


def drill(targets: list[str], *strikes: tuple[float, str, Action]) -> Drill:
    lines: list[str] = []
    made = Drill(parse_targets(targets), [Strike(*each) for each in strikes], lines.append)
    made.run()
    print("\n".join(lines))
    return made


def chaos(*options: object) -> tuple[int, str]:
    found = CliRunner().invoke(app, ["chaos", *map(str, options)])
    if isinstance(found.exception, ConfigError):
        return 2, str(found.exception)
    return found.exit_code, found.stdout


# ---------------------------------------------------------------- hits


def test_kill_by_pid(sleeper: subprocess.Popen[bytes]) -> None:
    target = f"a={sleeper.pid}"
    done = drill([target], (0.0, "a", Action.KILL), (0.05, "a", Action.STOP))
    assert sleeper.wait(LONG) == -signal.SIGKILL
    assert [entry.pid for entry in done.happened] == [sleeper.pid, 0]
    assert f"pid {sleeper.pid} is gone" in done.happened[1].missed
    assert (done.tallies["a"].killed, done.tallies["a"].missed) == (1, 1)


def test_a_killed_target_is_found_again_by_its_socket(supervised: Supervised) -> None:
    done = drill([f"a={supervised.path}"], (0.0, "a", Action.KILL), (3.0, "a", Action.KILL))
    tally = done.tallies["a"]
    assert (tally.killed, tally.missed) == (2, 0)
    assert [entry.pid for entry in done.happened] == supervised.pids[:2]
    assert len(tally.returns) == 1  # the drill did not wait for the second
    assert 0 < tally.returns[0] < 3.0


def test_a_target_that_is_away_is_missed(supervised: Supervised) -> None:
    supervised.away = True
    done = drill([f"a={supervised.path}"], (0.0, "a", Action.KILL), (1.0, "a", Action.KILL))
    tally = done.tallies["a"]
    assert (tally.killed, tally.missed, tally.returns) == (1, 1, [])
    assert "nobody listens" in done.happened[1].missed


def test_stop_and_continue(sleeper: subprocess.Popen[bytes]) -> None:
    seen: list[str] = []

    def watch() -> None:
        until = time.monotonic() + LONG
        while "T" not in seen and time.monotonic() < until:
            seen.append(state(sleeper.pid))
            time.sleep(0.005)

    watcher = threading.Thread(target=watch)
    watcher.start()
    done = drill([f"a={sleeper.pid}"], (0.0, "a", Action.STOP), (0.5, "a", Action.CONTINUE))
    watcher.join(LONG)
    assert "T" in seen
    wait_for(lambda: state(sleeper.pid) == "S", "it was not continued")
    assert done.tallies["a"].stopped == 1


def test_a_stop_without_its_continue_is_ended_anyway(sleeper: subprocess.Popen[bytes]) -> None:
    drill([f"a={sleeper.pid}"], (0.0, "a", Action.STOP))
    wait_for(lambda: state(sleeper.pid) == "S", "it was not continued")


def test_a_drill_that_fails_continues_what_it_stopped(sleeper: subprocess.Popen[bytes]) -> None:
    def say(line: str) -> None:
        if "SIGSTOP" in line:
            raise BrokenPipeError

    strikes = [Strike(0.0, "a", Action.STOP), Strike(60.0, "a", Action.CONTINUE)]
    with pytest.raises(BrokenPipeError):
        Drill(parse_targets([f"a={sleeper.pid}"]), strikes, say).run()
    wait_for(lambda: state(sleeper.pid) == "S", "it was not continued")


@pytest.mark.parametrize("number", ["SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT", "SIGTSTP"])
def test_an_interrupted_drill(sleeper: subprocess.Popen[bytes], number: str) -> None:
    """What it stopped is continued, and the table is printed."""
    command = [sys.executable, "-m", "kvagent", "chaos", "--target", f"a={sleeper.pid}"]
    options = ["--every", "0.1", "--kill", "0", "--stop-seconds", "600", "--json"]
    # Whoever runs the tests may ignore it (nohup, a shell's background), and that is inherited.
    before = signal.signal(signal.Signals[number], signal.SIG_DFL)
    with subprocess.Popen([*command, *options], stdout=-1, stderr=-1, text=True) as process:
        signal.signal(signal.Signals[number], before)
        try:
            wait_for(lambda: state(sleeper.pid) == "T", "it was not stopped")
            process.send_signal(signal.Signals[number])
            out, err = process.communicate(timeout=LONG)
        finally:
            process.kill()
    assert process.returncode == 128 + signal.Signals[number]
    assert state(sleeper.pid) == "S"
    report = json.loads(out)
    assert report["interrupted"]
    assert report["targets"] == [
        {"name": "a", "killed": 0, "stopped": 1, "missed": 0, "returns": []}
    ]
    assert "continued" in err


def test_signals_that_are_ignored_stay_so(sleeper: subprocess.Popen[bytes]) -> None:
    """A drill under nohup outlives its terminal."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        done = Drill(
            parse_targets([f"a={sleeper.pid}"]),
            [Strike(0.0, "a", Action.STOP), Strike(0.3, "a", Action.CONTINUE)],
            lambda _: os.kill(os.getpid(), signal.SIGHUP),
        )
        done.run()
    finally:
        signal.signal(signal.SIGHUP, before)
    assert not done.interrupted
    assert len(done.happened) == 2


# ---------------------------------------------------------------- never hit


def test_a_number_that_was_given_to_another_process(sleeper: subprocess.Popen[bytes]) -> None:
    now = Process.of(sleeper.pid)
    former = Process(now.pid, now.started - 1)
    with pytest.raises(Gone, match="another process by now"):
        former.send(signal.SIGKILL)
    with pytest.raises(Gone, match="another process by now"):
        Target("a", fixed=former).find()
    with pytest.raises(ConfigError, match="another process by now"):
        find_all([Target("a", fixed=former)])
    assert sleeper.poll() is None
    now.send(0)


def test_a_process_that_has_ended() -> None:
    process = subprocess.Popen(["true"])
    wait_for(lambda: state(process.pid) == "Z", "it did not end")
    with pytest.raises(Gone):  # nobody has asked yet how it ended
        Process.of(process.pid)
    process.wait()
    with pytest.raises(Gone):
        Process.of(process.pid)


def test_another_users_process(
    sleeper: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError

    monkeypatch.setattr(signal, "pidfd_send_signal", refuse)
    with pytest.raises(ConfigError, match="may not signal"):
        find_all(parse_targets([f"a={sleeper.pid}"]))


@pytest.mark.parametrize(
    ("targets", "text"),
    [
        (["a=1"], "pid 1"),
        (["a=0"], "cannot be seen"),
        ([f"a={os.getpid()}"], "this drill itself"),
        (["a=4194304000"], "is gone"),
        (["a"], "NAME=SOCKET or NAME=PID"),
        (["=12"], "NAME=SOCKET or NAME=PID"),
        (["a="], "NAME=SOCKET or NAME=PID"),
        (["a=/nobody.sock", "a=/nobody.sock"], "two targets"),
        (["a=/nobody.sock"], "nobody listens on /nobody.sock"),
        (["a=/etc"], "nobody listens|not a socket"),
        (["a=/" + "x" * 200], "not a socket"),
    ],
)
def test_refused(targets: list[str], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        find_all(parse_targets(targets))


def test_a_socket_of_the_drill_itself(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "own.sock"))
        listener.listen()
        with pytest.raises(ConfigError, match="this drill itself"):
            find_all(parse_targets([f"a={tmp_path}/own.sock"]))


def test_one_process_under_two_names(supervised: Supervised) -> None:
    with pytest.raises(ConfigError, match=f"a and b are both pid {supervised.pids[-1]}"):
        find_all(parse_targets([f"a={supervised.path}", f"b={supervised.pids[-1]}"]))


# ---------------------------------------------------------------- the command


def test_no_target() -> None:
    assert chaos()[0] == 2


def test_dry_run(supervised: Supervised, sleeper: subprocess.Popen[bytes]) -> None:
    """The same as is done then, and nothing is done."""
    options = ["--target", f"a={supervised.path}", "--target", f"b={sleeper.pid}", "--every", 1]
    code, out = chaos(*options, "--dry-run", "--minutes", 1, "--seed", 7)
    assert code == 0
    lines = out.splitlines()
    assert len(lines) > 20
    code, out = chaos(*options, "--dry-run", "--minutes", 1, "--seed", 7, "--json")
    report = json.loads(out)
    assert report["plan"]["targets"] == ["a", "b"]
    assert [f"{s['at']:8.3f} s  {s['action']}  {s['target']}" for s in report["strikes"]] == lines
    assert sleeper.poll() is None
    assert state(sleeper.pid) == "S"


def test_a_dry_run_without_its_targets() -> None:
    """The schedule, and then what would end the drill."""
    nobody = ["--target", "a=/nobody.sock", "--every", 1, "--dry-run"]
    for more in ([], ["--json"]):
        command = [sys.executable, "-m", "kvagent", "chaos", *map(str, nobody), *more]
        done = subprocess.run(command, capture_output=True, text=True, timeout=LONG)
        assert done.returncode == 2
        assert done.stderr == "kvagent: chaos: target a: nobody listens on /nobody.sock\n"
        assert "SIGKILL" in done.stdout


def test_a_whole_drill(supervised: Supervised, sleeper: subprocess.Popen[bytes]) -> None:
    options = ["--target", f"a={supervised.path}", "--target", f"b={sleeper.pid}"]
    options += ["--minutes", "0.05", "--every", "0.3", "--stop-seconds", "0.2", "--seed", "3"]
    code, out = chaos(*options, "--kill", "0", "--json")
    assert code == 0
    report = json.loads(out)
    assert not report["interrupted"]
    _, planned = chaos(*options, "--kill", "0", "--json", "--dry-run")
    strikes = [(s["at"], s["target"], s["action"]) for s in json.loads(planned)["strikes"]]
    assert [(h["at"], h["target"], h["action"]) for h in report["happened"]] == strikes
    assert not any(entry["missed"] for entry in report["happened"])
    code, out = chaos(*options, "--kill", "0.5")
    assert code == 0
    assert f"a is pid {supervised.pids[0]}" in out
    assert "SIGKILL" in out
    assert "back after" in out
