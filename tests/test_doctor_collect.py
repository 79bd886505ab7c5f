"""Where the doctor's facts come from: made-up files, real sockets, real processes that go wrong."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
import torch

from kvagent.config import Config
from kvagent.doctor import children, doors, memory
from kvagent.doctor.collect import read_machine
from kvagent.doctor.doors import Door, look_at_doors
from kvagent.doctor.facts import HugePages
from kvagent.memory.host import HostMemory
from tests.loopback import LONG, Stage
from tests.test_agent_loopback import stage as stage

Run = Callable[..., children.Outcome[int]]

FILES = {
    "proc/sys/kernel/random/boot_id": "b1\n",
    "proc/sys/kernel/yama/ptrace_scope": "2\n",
    "proc/self/status": "Name:\tx\nCapEff:\t0000000000004000\n",
    "proc/1/environ": "PATH=/bin\0container=lxc\0",
    "sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages": "10\n",
    "sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages": "6\n",
    "sys/kernel/mm/hugepages/hugepages-2048kB/resv_hugepages": "2\n",
    "sys/kernel/mm/transparent_hugepage/shmem_enabled": "always [advise] never\n",
    "sys/class/net/lo/operstate": "unknown\n",
    "sys/class/net/eth0/operstate": "up\n",
    "sys/class/net/eth1/operstate": "down\n",
    "sys/class/infiniband/mlx5_0/node_type": "",
    "dev/nvidia0": "",
    "dev/nvidiactl": "",
    "dev/shm/x": "",
    "home/.nixl.cfg": "",
}


def test_a_machine_of_files(tmp_path: Path) -> None:
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "proc/self/ns").mkdir()
    for kind in ("pid", "user", "ipc"):
        (tmp_path / "proc/self/ns" / kind).symlink_to(f"{kind}:[7]")
    environ = {"UCX_TLS": "tcp", "HOME": str(tmp_path / "home")}
    machine = read_machine(tmp_path, environ)
    assert machine.place.boot_id == "b1"
    assert machine.place.pid_namespace == "pid:[7]"
    assert machine.ipc_namespace == "ipc:[7]"
    assert machine.place.uid == os.geteuid()
    assert machine.container == "lxc"
    assert machine.ptrace_scope == 2
    assert machine.ipc_lock
    assert machine.huge_pages == HugePages(total=10, free=4, shmem="advise")
    assert machine.interfaces == ("eth0", "lo")
    assert machine.rdma_devices == ("mlx5_0",)
    assert machine.gpus == ("nvidia0",)
    assert machine.ucx_environ == {"UCX_TLS": "tcp"}
    assert machine.nixl_config == str(tmp_path / "home/.nixl.cfg")
    assert machine.shm_bytes is not None


def test_a_machine_without_files(tmp_path: Path) -> None:
    machine = read_machine(tmp_path, {"KUBERNETES_SERVICE_HOST": "10.0.0.1"})
    assert machine.container == "kubernetes"
    assert (machine.ptrace_scope, machine.shm_bytes, machine.interfaces) == (0, None, ())
    assert machine.huge_pages == HugePages(total=0, free=0, shmem="")
    assert not machine.ipc_lock


def test_this_machine() -> None:
    machine = read_machine()
    assert machine.python == sys.version_info[:3]
    assert machine.torch is not None
    assert "lo" in machine.interfaces
    assert machine.place.pid_namespace.startswith("pid:[")


# ---------------------------------------------------------------- doors


def look(**settings: object) -> list[Door]:
    return asyncio.run(look_at_doors(Config(**settings)))  # type: ignore[arg-type]


def test_free_doors() -> None:
    bind, http = look(http="127.0.0.1:0")
    assert bind.address == "127.0.0.1:0"
    assert (bind.any_port, bind.taken, bind.dial_error) == (True, "", "")
    assert bind.dialled.startswith("127.0.0.1:")
    assert (http.setting, http.taken, http.dialled) == ("http", "", "")


def test_taken_doors() -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as other:
        address = f"127.0.0.1:{other.getsockname()[1]}"
        (door,) = look(bind="127.0.0.1:0", http="")
        assert not door.taken
        _, http = look(http=address)
        assert http.taken == "Address already in use"


def test_an_address_of_another_host() -> None:
    (door,) = look(bind="192.0.2.1:0", insecure=True)
    assert door.taken == "Cannot assign requested address"


def test_a_name_that_is_none() -> None:
    (door,) = look(bind="no-such-host.invalid:0", insecure=True)
    assert door.taken


def test_an_advertised_name_that_is_none() -> None:
    (door,) = look(bind="127.0.0.1:0", advertise="no-such-host.invalid")
    assert door.dialled.startswith("no-such-host.invalid:")
    assert door.dial_error


def test_an_advertised_address_where_something_else_listens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On Linux all of 127.0.0.0/8 is this host; a socket bound to one of them has one address."""
    monkeypatch.setattr(doors, "DIAL_SECONDS", 0.5)
    with closing(socket.create_server(("127.0.0.3", 0))) as other:
        port = other.getsockname()[1]
        (door,) = look(bind=f"127.0.0.2:{port}", advertise="127.0.0.3")
    assert door.dialled == f"127.0.0.3:{port}"
    assert door.dial_error == "no connection came back here"
    (door,) = look(bind="127.0.0.2:0", advertise="127.0.0.3")
    assert door.dial_error == "Connection refused"


def test_doors_that_a_sidecar_holds(stage: Stage) -> None:
    (sidecar,) = stage.sidecars(1)
    address = f"127.0.0.1:{sidecar.agent.rank.port}"
    (door,) = look(bind=address)
    assert door.taken == "Address already in use"
    assert door.sidecar.startswith("kvagent ")
    assert (door.dialled, door.dial_error) == (address, "")


# ---------------------------------------------------------------- memory


class HugeMemory(HostMemory):
    """What a machine with huge pages gives; these are ordinary ones."""

    def __init__(self, nbytes: int) -> None:
        super().__init__(nbytes)
        self.pages = "huge"


@pytest.mark.parametrize("kind", ["ordinary", "huge"])
def test_samples_of_memory(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "HostMemory", HugeMemory)
    sample, other = (memory.make_sample(kind, 1 << 20) for _ in range(2))
    assert (sample.pages, sample.range.kind, sample.range.nbytes) == (kind, "dram", 1 << 20)
    assert not sample.is_filled()
    sample.fill()
    other.fill()
    assert sample.is_filled()
    assert other.is_filled()
    assert sample.range.address != other.range.address
    assert sample.copy_seconds() > 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_memory_that_is_not_there() -> None:
    with pytest.raises(memory.NoMemory, match="no GPU"):
        memory.make_sample("cuda", 1 << 20)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_sample_on_a_gpu() -> None:
    sample = memory.make_sample("cuda", 1 << 20)
    assert (sample.range.kind, sample.range.device) == ("vram", 0)
    sample.fill()
    assert sample.is_filled()


# ---------------------------------------------------------------- processes that go wrong


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs code as if it were a part of the doctor."""

    def run(code: str, timeout: float = LONG) -> children.Outcome[int]:
        (tmp_path / "code.py").write_text(code)
        script = tmp_path / "python"
        script.write_text(f"#!/bin/sh\nexec {sys.executable} {tmp_path}/code.py\n")
        script.chmod(0o755)
        with monkeypatch.context() as patched:
            patched.setattr(sys, "executable", str(script))
            return children.run_child("any", [], int, {}, timeout)

    return run


def test_a_child_that_answers(run: Run) -> None:
    outcome = run("print('[1] a.c:7 UCX  WARN  odd thing\\n[2] b.c:8 UCX  INFO  x\\n5')")
    assert (outcome.value, outcome.error) == (5, "")
    assert children.ucx_warnings(outcome.log) == ("odd thing",)


@pytest.mark.parametrize(
    ("code", "error"),
    [
        ("import os; os.kill(os.getpid(), 11)", "killed by SIGSEGV"),
        ('import sys; print(5); sys.exit("no such thing")', ""),
        ('import sys; sys.exit("no such thing")', "ended with 1: no such thing"),
        ("pass", "ended with 0"),
    ],
)
def test_a_child_that_fails(run: Run, code: str, error: str) -> None:
    outcome = run(code)
    assert (outcome.value is None) == bool(error)
    assert error in outcome.error


def test_a_child_that_hangs(run: Run) -> None:
    outcome = run("import time; time.sleep(1000)", timeout=0.5)
    assert outcome.value is None
    assert "no answer within 0.5 s" in outcome.error
