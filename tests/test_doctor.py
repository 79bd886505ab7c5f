"""What the doctor says about machines that this one is not."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterable
from typing import Any

import msgspec
import pytest

from kvagent.core.compare import EngineShape
from kvagent.core.specs import ModelInfo
from kvagent.doctor.doors import Door, check_doors
from kvagent.doctor.facts import (
    Distribution,
    Finding,
    HugePages,
    Machine,
    Severity,
    Torch,
    Transport,
    Ucx,
    worst,
)
from kvagent.doctor.host import INITIAL_IPC, INITIAL_PID, INITIAL_USER
from kvagent.doctor.keys import Ring
from kvagent.doctor.knock import Knock, Reach
from kvagent.doctor.peer import PeerRead, RankRead
from kvagent.doctor.reading import Reading, carriers
from kvagent.doctor.reads import VERSION, check_peer, check_self_read
from kvagent.doctor.selfread import SelfRead
from kvagent.doctor.show import check_machine, print_findings
from kvagent.doctor.ucx import parse_context
from kvagent.fabric.place import Place
from kvagent.wire.messages import Presence

PLACE = Place(boot_id="b1", pid_namespace=INITIAL_PID, user_namespace=INITIAL_USER, uid=1000)
SITE = "/venv/site-packages"
GOOD = Machine(
    python=(3, 12, 1),
    executable="/venv/bin/python",
    place=PLACE,
    ipc_namespace=INITIAL_IPC,
    container="",
    torch=Torch("2.9.0"),
    packages=tuple(Distribution(f"nixl{flavour}", "1.5.1", SITE) for flavour in ("", "-cu13")),
    nixl_config="",
    ucx_environ={},
    memlock=None,
    ipc_lock=False,
    shm_bytes=16 << 30,
    huge_pages=HugePages(total=1024, free=1024, shmem="never"),
    ptrace_scope=1,
    cma_error="",
    interfaces=("eth0", "lo"),
    rdma_devices=(),
    gpus=(),
)
SHM = tuple(Transport(name, "memory") for name in ("self", "sysv", "posix", "cma"))
TCP = (Transport("tcp", "eth0"), Transport("tcp", "lo"))
RDMA = (Transport("rc_mlx5", "mlx5_0:1"),)
CUDA = (Transport("cuda_copy", "cuda"), Transport("cuda_ipc", "cuda"))
UCX = Ucx(
    nixl=f"{SITE}/nixl_cu13/_bindings.so",
    version="1.23.0",
    libraries=(f"{SITE}/nixl_cu13.libs/libucp.so",),
    transports=(*SHM, *TCP),
)


def judge(
    machine: dict[str, Any], ucx: dict[str, Any], *, this_host_only: bool = False
) -> list[Finding]:
    """The good machine but for what is given."""
    return [
        *check_machine(
            msgspec.structs.replace(GOOD, **machine),
            msgspec.structs.replace(UCX, **ucx),
            this_host_only=this_host_only,
        )
    ]


def bad(findings: Iterable[Finding]) -> list[Finding]:
    found = [f for f in findings if f.severity in (Severity.WARNING, Severity.ERROR)]
    assert all(f.todo for f in found), "a finding says what to do"
    return found


def test_nothing_is_wrong_with_a_good_machine() -> None:
    findings = judge({}, {})
    assert worst(findings) == 0
    assert {f.check for f in findings} == {
        *("python", "torch", "nixl", "ucx", "transports", "cuda", "memlock", "shm"),
        *("huge pages", "isolation"),
    }


W, E = Severity.WARNING, Severity.ERROR
OTHER_UCX = "/opt/hpcx/lib/libucp.so.0"


@pytest.mark.parametrize(
    ("machine", "ucx", "check", "severity", "words"),
    [
        ({"python": (3, 9, 2)}, {}, "python", E, "3.9.2"),
        ({"python": (3, 14, 0)}, {}, "python", E, "3.14.0"),
        ({"torch": None}, {}, "torch", E, "cannot be imported"),
        ({"gpus": ("nvidia0",)}, {"transports": (*SHM, *TCP, *CUDA)}, "torch", W, "without CUDA"),
        (
            {"gpus": ("nvidia0",), "torch": Torch("2.9", "13.0", 0)},
            {"transports": (*SHM, *TCP, *CUDA)},
            "torch",
            W,
            "sees no GPU",
        ),
        ({"packages": ()}, {"error": "no", "nixl": ""}, "nixl", E, "not installed"),
        (
            {"packages": (*GOOD.packages, Distribution("nixl-cu12", "1.4.0", SITE))},
            {},
            "nixl",
            E,
            "several versions: nixl 1.5.1, nixl-cu13 1.5.1, nixl-cu12 1.4.0",
        ),
        (
            {"packages": (GOOD.packages[0], Distribution("nixl", "1.5.1", "/usr/lib/python3"))},
            {},
            "nixl",
            W,
            "nixl is installed 2 times: 1.5.1 in /venv",
        ),
        ({}, {"error": "NIXL cannot be loaded: x", "nixl": ""}, "nixl", E, "cannot be loaded"),
        ({"nixl_config": "/home/user/.nixl.cfg"}, {}, "nixl", W, "/home/user/.nixl.cfg"),
        ({}, {"error": "UCX does not start: x"}, "ucx", E, "does not start"),
        ({}, {"libraries": (UCX.libraries[0], OTHER_UCX)}, "ucx", E, OTHER_UCX),
        ({}, {"warnings": ("network device 'nix0' is not available",)}, "ucx", W, "nix0"),
        ({"ucx_environ": {"UCX_TCP_TX_SEG_SIZE": "256k"}}, {}, "ucx", W, "UCX_TCP_TX_SEG_SIZE"),
        ({}, {"transports": TCP}, "transports", W, "no cma"),
        ({}, {"transports": SHM}, "transports", E, "no way to another host"),
        ({}, {"transports": (*SHM, TCP[1])}, "transports", E, "eth0, lo"),
        ({"rdma_devices": ("mlx5_0",)}, {}, "transports", W, "mlx5_0"),
        (
            {"gpus": ("nvidia0",), "torch": Torch("2.9", "13.0", 1)},
            {},
            "cuda",
            E,
            "no cuda_copy and no cuda_ipc",
        ),
        (
            {"gpus": ("nvidia0",), "torch": Torch("2.9", "13.0", 1)},
            {"transports": (*SHM, *TCP, CUDA[0])},
            "cuda",
            E,
            "no cuda_ipc",
        ),
        ({"memlock": 65536}, {"transports": (*SHM, *RDMA)}, "memlock", E, "64 KiB"),
        ({"shm_bytes": 64 << 20}, {}, "shm", W, "64 MiB"),
        ({"shm_bytes": None}, {}, "shm", W, "no /dev/shm"),
        ({"huge_pages": HugePages(total=8, free=0, shmem="never")}, {}, "huge pages", W, "0 of 8"),
        ({"huge_pages": HugePages(total=0, free=0, shmem="")}, {}, "huge pages", W, "not there"),
        ({"cma_error": "Operation not permitted"}, {}, "isolation", W, "not permitted"),
        ({"ptrace_scope": 2}, {}, "isolation", W, "ptrace_scope is 2"),
        ({"ptrace_scope": 3}, {}, "isolation", W, "ptrace_scope is 3"),
    ],
)
def test_what_is_wrong(
    machine: dict[str, Any], ucx: dict[str, Any], check: str, severity: Severity, words: str
) -> None:
    (finding,) = bad(judge(machine, ucx))
    assert (finding.check, finding.severity) == (check, severity)
    assert words in finding.found
    assert worst([finding]) == (2 if severity is E else 1)


@pytest.mark.parametrize(
    ("machine", "ucx"),
    [
        ({"memlock": 65536}, {}),  # nothing pins
        ({"memlock": 65536, "ipc_lock": True}, {"transports": (*SHM, *RDMA)}),
        ({"huge_pages": HugePages(total=0, free=0, shmem="advise")}, {}),
        ({"rdma_devices": ("mlx5_0",)}, {"transports": (*SHM, *RDMA)}),
        ({"ucx_environ": {"UCX_TLS": "all"}}, {}),
        (
            {"gpus": ("nvidia0",), "torch": Torch("2.9", "13.0", 1)},
            {"transports": (*SHM, *TCP, *CUDA)},
        ),
    ],
)
def test_what_is_right(machine: dict[str, Any], ucx: dict[str, Any]) -> None:
    assert not bad(judge(machine, ucx))


def test_a_sidecar_for_this_host_needs_no_way_out() -> None:
    machine = {"rdma_devices": ("mlx5_0",)}
    ways = {"transports": (*SHM, TCP[1])}
    assert not bad(judge(machine, ways, this_host_only=True))


def test_a_container_of_its_own_is_explained() -> None:
    place = msgspec.structs.replace(PLACE, pid_namespace="pid:[4026532210]")
    findings = judge({"place": place, "container": "docker"}, {})
    assert not bad(findings)
    (finding,) = [f for f in findings if f.check == "isolation"]
    assert finding.severity is Severity.INFO
    assert "docker" in finding.found
    assert "PID" in finding.found
    assert "--pid=container" in finding.todo
    assert "shareProcessNamespace" in finding.todo


# ---------------------------------------------------------------- doors


def test_doors() -> None:
    doors = [
        Door(setting="bind", address="10.0.0.7:7100", dialled="10.0.0.7:7100"),
        Door(setting="http", address="127.0.0.1:80", taken="Address already in use"),
    ]
    port, advertised, http = check_doors(doors, this_host_only=False)
    assert (port.severity, advertised.severity, http.severity) == (Severity.OK, Severity.OK, E)
    assert "ss -ltnp" in http.todo
    assert "--http" in http.todo


def test_an_advertised_address_of_another_host() -> None:
    door = Door(
        setting="bind",
        address="0.0.0.0:0",
        any_port=True,
        dialled="10.0.0.8:4000",
        dial_error="Connection refused",
    )
    (finding,) = bad(check_doors([door], this_host_only=False))
    assert finding.check == "advertise"
    assert "10.0.0.8:4000 does not lead back here: Connection refused" in finding.found
    other = msgspec.structs.replace(door, taken="Cannot assign requested address", dialled="")
    (finding, *_) = bad(check_doors([other], this_host_only=False))
    assert "address of this host" in finding.todo


def test_a_door_with_our_own_sidecar_behind_it() -> None:
    door = Door(setting="bind", address="a:1", taken="x", sidecar="kvagent 1", dialled="a:1")
    assert not bad(check_doors([door], this_host_only=False))


# ---------------------------------------------------------------- reads

READING = Reading(nbytes=64 << 20, seconds=0.01, connect_seconds=0.02)
GOOD_READ = SelfRead(kind="ordinary", reading=READING, copy_seconds=0.005, pages="ordinary")


def test_a_self_read() -> None:
    (finding,) = check_self_read(GOOD_READ, "cma/memory")
    assert finding.severity is Severity.OK
    assert finding.found.startswith("64 MiB at 6.7 GB/s by cma/memory, first bytes after 20 ms")
    assert "13.4 GB/s" in finding.found


@pytest.mark.parametrize(
    ("changes", "transport", "severity"),
    [
        ({}, "tcp/lo", W),
        ({"copy_seconds": 0.001}, "", W),
        ({"reading": None, "error": "it was killed by SIGSEGV"}, "", E),
        ({"reading": None, "absent": "torch sees no GPU"}, "", Severity.INFO),
    ],
)
def test_self_reads_that_are_not_good(
    changes: dict[str, Any], transport: str, severity: Severity
) -> None:
    (finding,) = check_self_read(msgspec.structs.replace(GOOD_READ, **changes), transport)
    assert finding.severity is severity
    assert finding.todo or severity is Severity.INFO


SHAPE = EngineShape(model=ModelInfo(name="m"), kinds=())
PRESENCE = Presence(version=VERSION, place=PLACE, engine_id="prefill", shape=SHAPE)
RANK = RankRead(rank="tp 0, pp 0", fabric="r0", address="10.0.0.7:7100", reading=READING)
PEER = PeerRead(presence=PRESENCE, ranks=(RANK,))


def ask_peer(
    change: Callable[[PeerRead], PeerRead] = lambda peer: peer,
    transport: str = "cma/memory",
    *,
    ring: Ring | None = None,
    this_host_only: bool = False,
) -> list[Finding]:
    findings = check_peer(
        "10.0.0.7:7100",
        change(PEER),
        {"r0": transport},
        PLACE,
        ring=ring,
        this_host_only=this_host_only,
    )
    return [*findings]


def elsewhere(**changes: Any) -> Callable[[PeerRead], PeerRead]:
    place = msgspec.structs.replace(PLACE, **changes)
    presence = msgspec.structs.replace(PRESENCE, place=place)
    return lambda peer: msgspec.structs.replace(peer, presence=presence)


def test_a_peer_that_can_be_read() -> None:
    met, read = ask_peer()
    assert (met.severity, read.severity) == (Severity.OK, Severity.OK)
    assert "engine 'prefill', this host" in met.found
    assert "canary good, 64 MiB at 6.7 GB/s by cma/memory" in read.found
    other = msgspec.structs.replace(PRESENCE, version="0.0.9")
    met, _ = ask_peer(lambda peer: msgspec.structs.replace(peer, presence=other))
    assert met.found.startswith(f"kvagent 0.0.9 ({VERSION} here), engine")
    met, read = ask_peer(elsewhere(boot_id="b2", uid=7), "rc_mlx5/mlx5_0:1")
    assert (met.severity, read.severity) == (Severity.OK, Severity.OK)
    assert "another host" in met.found


@pytest.mark.parametrize(
    ("changes", "transport", "words"),
    [
        ({"uid": 1001}, "cma/memory", "uid 1001 there and 1000 here: UCX takes cma"),
        ({"user_namespace": "user:[7]"}, "cma/memory", "in other user namespaces"),
        ({"pid_namespace": "pid:[7]"}, "", "another PID namespace than here"),
        ({}, "tcp/eth0", "by tcp/eth0"),
    ],
)
def test_a_peer_on_this_host_that_cannot_be_shared_with(
    changes: dict[str, Any], transport: str, words: str
) -> None:
    (finding,) = bad(ask_peer(elsewhere(**changes), transport))
    assert finding.severity is W
    assert words in finding.found


def test_a_peer_that_a_sidecar_on_loopback_cannot_read() -> None:
    (finding,) = bad(ask_peer(elsewhere(boot_id="b2"), "tcp/eth0", this_host_only=True))
    assert "loopback alone" in finding.found


@pytest.mark.parametrize(
    ("peer", "severity", "words"),
    [
        (PeerRead(error="no answer within 120 s"), E, "no answer within 120 s"),
        (PeerRead(presence=PRESENCE, error="refused"), E, "refused"),
        (
            PeerRead(
                presence=msgspec.structs.replace(
                    PRESENCE, shape=None, rank=1, not_ready="rank 0 is elsewhere"
                )
            ),
            W,
            "rank 0 is elsewhere",
        ),
        (
            PeerRead(presence=Presence(version="0.1.0", place=PLACE, not_ready="no cache")),
            W,
            "no engine yet, this host; nothing to read: no cache",
        ),
    ],
)
def test_peers_that_cannot_be_read(peer: PeerRead, severity: Severity, words: str) -> None:
    (finding,) = bad(ask_peer(lambda _: peer))
    assert finding.severity is severity
    assert words in finding.found


def test_a_peer_that_is_no_address_is_refused_at_once() -> None:
    code = (
        "import sys; from typer.testing import CliRunner; from kvagent.cli import app;"
        "flags = '--socket /s --log-level debug --log-format json'.split();"
        "done = CliRunner().invoke(app, ['doctor', *flags, '--peer', 'a:1', '--peer', 'nowhere']);"
        "print(done.exception); assert not {'torch', 'nixl'} & sys.modules.keys()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "peer 'nowhere' is not HOST:PORT" in done.stdout


RING = Ring(folder="/k", own="0a0a0a0a", allowed=("1b1b1b1b", "2c2c2c2c"))
OPEN = Knock(Reach.OPEN, "it listens, and uses no keys")
LOCKED = Knock(Reach.LOCKED, "it listens, and wants keys")


@pytest.mark.parametrize(
    ("reach", "words"),
    [
        (Reach.NO_NAME, "DNS"),
        (Reach.REFUSED, "is the sidecar of its rank 0 running"),
        (Reach.SILENT, "a firewall between drops it"),
        (Reach.NO_WAY, "routes"),
        (Reach.MUTE, "is its process stopped"),
        (Reach.STRANGER, "is that its --http port"),
    ],
)
def test_what_is_said_of_a_door_that_is_no_peers(reach: Reach, words: str) -> None:
    (finding,) = ask_peer(lambda _: PeerRead(knock=Knock(reach, "seen")), ring=RING)
    assert (finding.severity, finding.found) == (E, "seen")
    assert words in finding.todo
    assert "key" not in finding.todo


@pytest.mark.parametrize(
    ("peer", "ring", "found", "todo"),
    [
        (PeerRead(knock=LOCKED), None, "wants keys; none are given here", "--keys DIR"),
        (PeerRead(knock=OPEN), RING, "uses no keys; ours are in /k", "start it with --keys"),
        (PeerRead(knock=LOCKED, error="no answer"), RING, "own key 0a0a0a0a", "/k/allowed"),
        (
            PeerRead(knock=LOCKED, error="it had none of the allowed keys, or uses no keys"),
            RING,
            "it had none of the allowed keys; here: own key",
            "/k/allowed",
        ),
        (PeerRead(knock=LOCKED, error="no answer"), RING, "1b1b1b1b, 2c2c2c2c", "*-0a0a0a0a.key"),
        (
            PeerRead(knock=LOCKED, error="keys: no pair"),
            Ring(folder="/k", error="keys: no pair"),
            "keys: no pair",
            "see the check keys",
        ),
        (PeerRead(knock=OPEN, error="no answer"), None, "no answer", "look at its log"),
        (
            PeerRead(knock=OPEN, error="protocol: peer protocol 2 meets 3", refused=True),
            None,
            "peer protocol 2 meets 3",
            "the same kvagent on both sides",
        ),
    ],
)
def test_a_peer_that_does_not_talk_with_us(
    peer: PeerRead, ring: Ring | None, found: str, todo: str
) -> None:
    (finding,) = ask_peer(lambda _: peer, ring=ring)
    assert finding.severity is E
    assert found in finding.found
    assert todo in finding.todo
    assert "firewall" not in finding.todo


def test_a_rank_that_cannot_be_read_is_named() -> None:
    lost = msgspec.structs.replace(RANK, rank="tp 1, pp 0", reading=None, error="it is gone")
    findings = ask_peer(lambda peer: msgspec.structs.replace(peer, ranks=(RANK, lost)))
    (finding,) = bad(findings)
    assert "rank (tp 1, pp 0) at 10.0.0.7:7100: it is gone" in finding.found


# ---------------------------------------------------------------- the report


def test_the_report_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    print_findings([Finding("peer x", E, "said [red]\x1b[2J\x1b]0;t\x07 this", "do [that]")])
    out = capsys.readouterr().out
    assert "\x1b" not in out
    assert "said [red]" in out
    assert "-> do [that]" in out
    assert "errors: 1, warnings: 0" in out


# ---------------------------------------------------------------- what UCX prints

CONTEXT = """\
#
# UCP context
#
#     component 0  :  self
#            md 4  :  component 4  cma
#
#      resource 0  :  md 0  dev 0  flags -- self/memory
#      resource 1  :  md 1  dev 1  flags -a tcp/eth0
#      resource 2  :  md 5  dev 3  flags -- rc_mlx5/mlx5_0:1
#
"""
PROTOCOLS = """\
[1.1] [vm:1:0]   +--------+-------------+-------------------------------+
[1.1] [vm:1:0]   | doctor-read/af9975e9e0004 intra-node cfg#1           |
[1.1] [vm:1:0]   | remote memory write by ucp_put* from host memory     |
[1.1] [vm:1:0]   +--------+-------------+-------------------------------+
[1.1] [vm:1:0]   | 0..inf | zero-copy   | cma/memory                    |
[1.1] [vm:1:0]   +--------+-------------+-------------------------------+
[1.1] [vm:1:0]   +--------+-------------+-------------------------------+
[1.1] [vm:1:0]   | doctor-read/af9975e9e0004 intra-node cfg#1           |
[1.1] [vm:1:0]   | remote memory read by ucp_get*(multi) into host      |
[1.1] [vm:1:0]   +--------+-------------+-------------------------------+
[1.1] [vm:1:0]   | Range  | Description |            Config             |
[1.1] [vm:1:0]   +--------+-------------+-------------------------------+
[1.1] [vm:1:0]   | 0..1K  | short       | tcp/lo                        |
[1.1] [vm:1:0]   | 1K..inf | zero-copy  | 50% on rc_mlx5/mlx5_0:1       |
[1.1] [vm:1:0]   +--------+-------------+-------------------------------+
[1.1] [vm:1:0]   +--------+-------------+-------------------------------+
[1.1] [vm:1:0]   | doctor-peer-1/af9975e9e0004 inter-node cfg#1         |
[1.1] [vm:1:0]   | remote memory read by ucp_get*(multi) into host      |
[1.1] [vm:1:0]   +--------+-------------+-------------------------------+
[1.1] [vm:1:0]   | Range  | Description |            Config             |
[1.1] [vm:1:0]   +--------+-------------+-------------------------------+
[1.1] [vm:1:0]   | 0..inf | software emulation | tcp/eth0               |
[1.1] [vm:1:0]   +--------+-------------+-------------------------------+
[1.1] [vm:1:0]   | doctor-read/af9975e9e0004 self cfg#0                 |
[1.1] [vm:1:0]   | active message by ucp_am_send* from host memory      |
[1.1] [vm:1:0]   | 0..inf | short       | self/memory                   |
"""


def test_transports_of_a_context() -> None:
    found = [str(each) for each in parse_context(CONTEXT)]
    assert found == ["self/memory", "tcp/eth0", "rc_mlx5/mlx5_0:1"]
    assert parse_context("") == ()


def test_who_carried_a_read() -> None:
    assert carriers(PROTOCOLS) == {
        "doctor-read": "50% on rc_mlx5/mlx5_0:1",
        "doctor-peer-1": "tcp/eth0",
    }
    assert carriers("") == {}
