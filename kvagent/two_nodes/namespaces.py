"""Networks and volumes that only our own processes see.

This process first moves into a network and a mount namespace of its own; networks and volumes are
made in there. When it is gone, however it ended, so is all of it: nothing is left on the machine.
The parts are those of a container engine: a network is a bridge, a service is a network namespace
with one end of a veth pair for each of its networks, the other end is a port of the bridge.
"""

from __future__ import annotations

import ctypes
import ipaddress
import json
import os
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

from kvagent.errors import KVAgentError
from kvagent.two_nodes.compose import Compose, Service

__all__ = ["HIDDEN", "NamespacesError", "Network", "World", "enter"]

HIDDEN = Path("/run/two-nodes")
"""Ours alone. Services see of it what is mounted for them."""
_VOLUMES, _HOSTS = HIDDEN / "volumes", HIDDEN / "hosts"

_NEWNS, _NEWUSER, _NEWNET = 0x00020000, 0x10000000, 0x40000000  # linux/sched.h
_PROGRAMS = ("ip", "tc", "mount", "nsenter", "unshare")
_SUBNETS = ipaddress.IPv4Network("10.77.0.0/16").subnets(new_prefix=24)


class NamespacesError(KVAgentError):
    """This machine does not let us make namespaces, or networks in them."""


def run(*command: str) -> str:
    """Its output; `NamespacesError` with what it said when it fails."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise NamespacesError(f"{' '.join(command)}: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout


def enter() -> None:
    """Moves this process into namespaces of its own: as root, or in a user namespace. Call it while
    the process has one thread. Raises `NamespacesError`."""
    missing = [program for program in _PROGRAMS if shutil.which(program) is None]
    if missing:
        raise NamespacesError(
            f"these programs are missing: {', '.join(missing)}; "
            "on Debian and Ubuntu: apt install iproute2 util-linux mount"
        )
    uid, gid = os.geteuid(), os.getegid()
    try:
        _unshare(_NEWNS | _NEWNET)
    except PermissionError:
        try:
            _unshare(_NEWUSER | _NEWNS | _NEWNET)
            _become_root(uid, gid)
        except OSError as error:
            raise NamespacesError(
                f"namespaces are not allowed here ({error.strerror}): it takes root with "
                "CAP_SYS_ADMIN, or user namespaces that are open to all"
            ) from error
    run("mount", "--make-rprivate", "/")
    # Everything that we mount or create is below it: sockets, keys, names of namespaces.
    run("mount", "-t", "tmpfs", "tmpfs", "/run")
    HIDDEN.mkdir()
    run("ip", "link", "set", "lo", "up")
    _try()


def _try() -> None:
    """All that a kernel may lack or refuse, once: what fails later is a failure of ours."""
    run(*isolated(), "true")
    run("ip", "link", "add", "try", "type", "bridge")
    run("ip", "link", "add", "try0", "type", "veth", "peer", "name", "try1")
    run("tc", "qdisc", "add", "dev", "try0", "root", *_rate(1))
    for link in ("try0", "try"):
        run("ip", "link", "delete", link)


def isolated() -> tuple[str, ...]:
    """Runs a command as the first process of a PID namespace, with mounts of its own. Should
    `unshare` die, the kernel kills all that are in there."""
    return ("unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc", "--")


def _unshare(flags: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(flags):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def _become_root(uid: int, gid: int) -> None:
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"0 {uid} 1")
    Path("/proc/self/gid_map").write_text(f"0 {gid} 1")


def _rate(megabits: float) -> tuple[str, ...]:
    """For tc. The burst has room for the largest packet of a veth, 64 KiB."""
    return ("tbf", "rate", f"{megabits:g}mbit", "burst", "256kb", "latency", "50ms")


class Network:
    """One network of the compose file; `gateway` is our own address in it."""

    def __init__(self, number: int, subnet: ipaddress.IPv4Network) -> None:
        self.bridge = f"net{number}"
        self._subnet = subnet
        self._hosts = subnet.hosts()
        self.gateway = next(self._hosts)
        self.addresses: dict[str, ipaddress.IPv4Address] = {}
        self._ports: dict[str, str] = {}
        run("ip", "link", "add", self.bridge, "type", "bridge")
        run("ip", "address", "add", f"{self.gateway}/{subnet.prefixlen}", "dev", self.bridge)
        run("ip", "link", "set", self.bridge, "up")

    def join(self, service: str, interface: str) -> None:
        """Gives the service's namespace an interface in this network."""
        address = self.addresses[service] = next(self._hosts)
        port = self._ports[service] = f"{self.bridge}p{len(self._ports)}"
        run("ip", "link", "add", port, "type", "veth",
            "peer", "name", interface, "netns", service)  # fmt: skip
        run("ip", "link", "set", port, "master", self.bridge, "up")
        run("ip", "-n", service, "address", "add",
            f"{address}/{self._subnet.prefixlen}", "dev", interface)  # fmt: skip
        run("ip", "-n", service, "link", "set", interface, "up")

    def limit(self, service: str, megabits: float) -> None:
        """How fast bytes may go to this service."""
        run("tc", "qdisc", "replace", "dev", self._ports[service], "root", *_rate(megabits))

    def unlimit(self, service: str) -> None:
        run("tc", "qdisc", "delete", "dev", self._ports[service], "root")

    def cut(self, service: str) -> None:
        """As if its cable were pulled."""
        run("ip", "link", "set", self._ports[service], "down")

    def mend(self, service: str) -> None:
        run("ip", "link", "set", self._ports[service], "up")

    def bytes_to(self, service: str) -> int:
        """That have gone to this service, headers included."""
        shown = json.loads(run("ip", "-json", "-s", "link", "show", "dev", self._ports[service]))
        return int(shown[0]["stats64"]["tx"]["bytes"])


class World:
    """All networks and volumes of the compose file, for `services`."""

    def __init__(self, compose: Compose, services: Mapping[str, Service]) -> None:
        used = {name for service in services.values() for name in service.networks}
        self.networks = {
            name: Network(number, subnet)
            for number, (name, subnet) in enumerate(zip(sorted(used), _SUBNETS, strict=False))
        }
        for name, service in services.items():
            run("ip", "netns", "add", name)
            run("ip", "-n", name, "link", "set", "lo", "up")
            for number, network in enumerate(service.networks):
                self.networks[network].join(name, f"eth{number}")
        for name in {mount.source for service in services.values() for mount in service.mounts()}:
            self._make_volume(name, compose)
        for name, service in services.items():
            self._write_hosts(name, service)

    def _make_volume(self, name: str, compose: Compose) -> None:
        folder, volume = _VOLUMES / name, compose.volumes[name]
        folder.mkdir(parents=True)
        if volume is not None and volume.driver_opts is not None:
            options = volume.driver_opts.o.split(",")
            # The user is the image's; here all services run as the one who started us.
            kept = [each for each in options if not each.startswith(("uid=", "gid="))]
            run("mount", "-t", "tmpfs", "-o", ",".join(kept), "tmpfs", str(folder))

    def _write_hosts(self, name: str, service: Service) -> None:
        """A service knows the names of those that it shares a network with."""
        known = {
            other: address
            for network in service.networks
            for other, address in self.networks[network].addresses.items()
        }
        lines = ["127.0.0.1 localhost", *(f"{known[other]} {other}" for other in known)]
        _HOSTS.mkdir(exist_ok=True)
        (_HOSTS / name).write_text("\n".join(lines) + "\n")

    def address(self, service: str, network: str) -> str:
        return str(self.networks[network].addresses[service])

    def mount_script(self, name: str, service: Service) -> str:
        """Shell commands that put a service's volumes where it wants them, and hide the rest."""
        lines = [f"mount --bind {_HOSTS / name} /etc/hosts"]
        for mount in service.mounts():
            lines.append(f"mkdir -p {mount.target}")
            lines.append(f"mount --bind {_VOLUMES / mount.source} {mount.target}")
            if mount.read_only:
                lines.append(f"mount -o remount,bind,ro {mount.target}")
        lines.append(f"mount -t tmpfs tmpfs {HIDDEN}")
        return "\n".join(lines)
