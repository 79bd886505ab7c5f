"""Which NICs are next to a GPU, on made-up trees of /sys."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from kvagent.cuda.calls import Gpu
from kvagent.cuda.nics import Distance, Near, Nic, gpu_addresses, near_nics, net_devices, tell_ucx
from kvagent.doctor.facts import Severity
from kvagent.doctor.gpus import check_nics


class Sys:
    """A tree: devices are given by their place, "pci0000:3a/0000:3a:00.0/0000:3b:00.0"."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def device(self, place: str, *, node: int = 0, **files: str) -> Path:
        folder = self.root / "sys/devices" / place
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in {"numa_node": str(node), **files}.items():
            (folder / name).write_text(f"{text}\n")
        link = self.root / "sys/bus/pci/devices" / folder.name
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(folder)
        return folder

    def gpu(self, place: str, node: int = 0) -> str:
        return self.device(place, node=node, vendor="0x10de", **{"class": "0x030200"}).name

    def nic(
        self, name: str, place: str, node: int = 0, interface: str = "", state: str = "4: ACTIVE"
    ) -> None:
        folder = self.device(place, node=node, vendor="0x15b3")
        if interface:
            (folder / "net" / interface).mkdir(parents=True)
        ports = folder / "infiniband" / name / "ports/1"
        ports.mkdir(parents=True)
        (ports / "state").write_text(f"{state}\n")
        (ports.parent.parent / "device").symlink_to(folder)
        link = self.root / "sys/class/infiniband" / name
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(ports.parent.parent)

    def interface(self, name: str, state: str = "up") -> None:
        folder = self.root / "sys/class/net" / name
        folder.mkdir(parents=True)
        (folder / "operstate").write_text(f"{state}\n")


@pytest.fixture
def sys(tmp_path: Path) -> Sys:
    return Sys(tmp_path)


ROOT = "pci0000:3a/0000:3a:00.0/0000:3b:00.0"
"""A root complex, its port, and a switch."""


def eight(sys: Sys) -> list[str]:
    """As a server with two sockets: a switch with a GPU and a NIC for each of four root complexes,
    and a NIC of its own for the storage."""
    gpus = []
    for i, bus in enumerate(("1a", "3a", "9a", "ba")):
        switch = f"pci0000:{bus}/0000:{bus}:01.0/0000:{int(bus, 16) + 1:x}:00.0"
        node = i // 2
        gpus.append(sys.gpu(f"{switch}/0000:{bus}:08.0/0000:{bus}:10.0", node))
        sys.nic(f"mlx5_{i}", f"{switch}/0000:{bus}:09.0/0000:{bus}:11.0", node, f"ib{i}")
    sys.nic("mlx5_9", "pci0000:00/0000:00:02.0/0000:02:00.0", 0, "eth0")
    sys.interface("eth0")
    sys.interface("lo", "unknown")
    sys.interface("eth1", "down")
    return gpus


def test_each_gpu_has_the_one_under_its_switch(sys: Sys) -> None:
    gpus = eight(sys)
    assert sorted(gpu_addresses(sys.root)) == sorted(gpus)
    for i, gpu in enumerate(gpus):
        near = near_nics(gpu, sys.root)
        assert near == Near((Nic(f"mlx5_{i}:1", f"ib{i}"),), Distance.SWITCH)
        assert net_devices(gpu, sys.root) == (f"mlx5_{i}:1", "eth0", "lo")


@pytest.mark.parametrize(
    ("place", "node", "distance"),
    [
        (f"{ROOT}/0000:3b:01.0/0000:3d:00.0", 0, Distance.SWITCH),
        ("pci0000:3a/0000:3a:02.0/0000:3e:00.0", 0, Distance.ROOT),
        ("pci0000:5a/0000:5a:00.0/0000:5b:00.0", 0, Distance.NODE),
        ("pci0000:9a/0000:9a:00.0/0000:9b:00.0", 1, Distance.SYSTEM),
        ("pci0000:5a/0000:5a:00.0/0000:5b:00.0", -1, Distance.SYSTEM),
    ],
    ids=str,
)
def test_distances(sys: Sys, place: str, node: int, distance: Distance) -> None:
    gpu = sys.gpu(f"{ROOT}/0000:3b:00.0/0000:3c:00.0")
    sys.nic("mlx5_0", place, node)
    near = near_nics(gpu, sys.root)
    assert near is not None
    assert near.distance is distance
    assert str(distance) in {
        finding.found.split(", ", 1)[1] for finding in check_nics({}, sys.root)
    }


def test_two_as_near_as_one_another(sys: Sys) -> None:
    gpu = sys.gpu(f"{ROOT}/0000:3b:00.0/0000:3c:00.0")
    for i in (1, 2):
        sys.nic(f"mlx5_{i}", f"{ROOT}/0000:3b:0{i}.0/0000:4{i}:00.0")
    sys.nic("mlx5_3", f"{ROOT}/0000:3b:03.0/0000:43:00.0", state="1: DOWN")
    sys.nic("mlx5_4", "pci0000:5a/0000:5a:00.0/0000:5b:00.0")
    assert net_devices(gpu, sys.root) == ("mlx5_1:1", "mlx5_2:1")


def test_a_virtual_machine_without_a_tree(sys: Sys) -> None:
    """Everything hangs on one root, as hypervisors have it."""
    gpu = sys.gpu("pci0000:00/0000:00:05.0", node=-1)
    sys.nic("mlx5_0", "pci0000:00/0000:00:06.0", node=-1)
    near = near_nics(gpu, sys.root)
    assert near is not None
    assert near.distance is Distance.ROOT


def test_nothing_to_choose(sys: Sys) -> None:
    assert gpu_addresses(sys.root) == []
    assert [*check_nics({}, sys.root)] == []
    gpu = sys.gpu(f"{ROOT}/0000:3b:00.0/0000:3c:00.0")
    sys.interface("eth0")
    assert near_nics(gpu, sys.root) is None
    assert net_devices(gpu, sys.root) == ()
    (finding,) = check_nics({}, sys.root)
    assert (finding.severity, gpu in finding.found) == (Severity.INFO, True)


def gpu_at(pci: str) -> Gpu:
    return Gpu(0, "GPU", "uuid", pci)


def test_what_ucx_is_told(sys: Sys, caplog: pytest.LogCaptureFixture) -> None:
    first, second, *_ = eight(sys)
    with caplog.at_level(logging.INFO, "kvagent.nics"):
        environ: dict[str, str] = {}
        tell_ucx((), gpu_at(second), environ, sys.root)
        assert environ == {"UCX_NET_DEVICES": "mlx5_1:1,eth0,lo"}
        assert f"nearest to GPU 0 at {second}" in caplog.text
        environ = {}
        tell_ucx(("mlx5_7:1", "eth3"), gpu_at(first), environ, sys.root)
        assert environ == {"UCX_NET_DEVICES": "mlx5_7:1,eth3"}
        assert "the setting nics" in caplog.text
        environ = {"UCX_NET_DEVICES": "lo"}
        tell_ucx(("mlx5_7:1",), gpu_at(first), environ, sys.root)
        assert environ == {"UCX_NET_DEVICES": "lo"}
        assert "UCX_NET_DEVICES=lo, from the environment" in caplog.text
        environ = {}
        tell_ucx((), gpu_at("0000:ff:00.0"), environ, sys.root / "nothing")
        assert environ == {}
        assert "UCX chooses" in caplog.text


def test_what_the_doctor_says(sys: Sys) -> None:
    gpus = eight(sys)
    found = [*check_nics({}, sys.root)]
    assert [finding.severity for finding in found] == [Severity.OK] * len(gpus)
    assert any(f"GPU {gpus[2]}: mlx5_2:1, the same PCI switch" in f.found for f in found)
    found = [*check_nics({"UCX_NET_DEVICES": "mlx5_0:1,eth0"}, sys.root)]
    bad = [finding for finding in found if finding.severity is Severity.WARNING]
    assert len(bad) == len(gpus) - 1
    assert all("UCX_NET_DEVICES" in finding.todo for finding in bad)
    all_good = check_nics({"UCX_NET_DEVICES": "all"}, sys.root)
    assert {finding.severity for finding in all_good} == {Severity.OK}
