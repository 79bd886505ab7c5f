"""A service of the compose file as a process tree: its command, environment, network and mounts.

Each has a network, a mount and a PID namespace of its own, as the containers have; its program is
the first process in there. The PID namespace is also what makes UCX take TCP between the sidecars:
in one PID namespace it would read through the kernel, whatever the networks are.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from kvagent.demo.processes import Child, Children
from kvagent.errors import KVAgentError
from kvagent.two_nodes.compose import Service
from kvagent.two_nodes.namespaces import World, isolated

__all__ = ["ENTRYPOINT", "Container", "Containers"]

ENTRYPOINT = ("kvagent",)
"""Of the image, in docker/Dockerfile."""

_POLL_SECONDS = 0.05


def command_of(service: Service) -> list[str]:
    """What a container engine would start."""
    return [*(ENTRYPOINT if service.entrypoint is None else service.entrypoint), *service.command]


def environment_of(service: Service) -> dict[str, str]:
    """All of it: nothing comes from the outside but the programs."""
    path = f"{Path(sys.executable).parent}:{os.defpath}"
    return {"PATH": path, "HOME": "/tmp", **service.environment}


class Container:
    """A service that was started. `child` is the process around it."""

    def __init__(self, name: str, service: Service, child: Child) -> None:
        self.name = name
        self.service = service
        self.child = child

    def terminate(self) -> None:
        """SIGTERM to its first process. (`unshare` keeps signals to itself.)"""
        pid = self.child.process.pid
        try:
            children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
            for each in children:
                os.kill(int(each), signal.SIGTERM)
        except (OSError, ValueError):
            pass  # it has ended


class Containers:
    """Starts services in their namespaces. `children` ends what is left in the end."""

    def __init__(self, world: World, children: Children) -> None:
        self._world = world
        self._children = children
        self.running: dict[str, Container] = {}

    def start(self, name: str, service: Service) -> Container:
        """A service that stays."""
        child = self._children.start(name, self._words(name, service))
        container = self.running[name] = Container(name, service, child)
        return container

    async def complete(self, name: str, service: Service) -> None:
        """A service that ends by itself; raises `KVAgentError` unless it ends well."""
        code, said = await _outcome(self._words(name, service))
        if code:
            raise KVAgentError(f"{name} ended with {code}: {said}")

    def _words(self, name: str, service: Service) -> list[str]:
        script = f'set -e\n{self._world.mount_script(name, service)}\nexec "$@"'
        # `env` comes after the shell: its programs are found by our own PATH.
        inner = ("sh", "-c", script, name, *_env(service), *command_of(service))
        return [*_network_of(name), *isolated(), *inner]

    async def healthy(self, container: Container) -> None:
        """Waits until its health check succeeds once. Whoever calls bounds the time."""
        check = container.service.healthcheck
        assert check is not None
        assert check.test[0] == "CMD"
        while not await self.succeeds(container.name, check.test[1:]):  # noqa: ASYNC110
            await asyncio.sleep(_POLL_SECONDS)

    async def succeeds(self, name: str, command: Sequence[str]) -> bool:
        """Whether a command in a service's network exits with 0."""
        service = self.running[name].service
        code, _ = await _outcome([*_network_of(name), *_env(service), *command])
        return code == 0

    def close(self) -> None:
        """Tells all of them to end, the youngest first; does not wait."""
        for container in reversed(self.running.values()):
            container.terminate()


async def _outcome(words: Sequence[str]) -> tuple[int, str]:
    """How a command ends, and what it says; it does not outlive our interest in it. (It may say
    little, since nobody reads until it ends.)"""
    process = _popen(words)
    try:
        while process.poll() is None:  # noqa: ASYNC110
            await asyncio.sleep(_POLL_SECONDS)
    finally:
        process.kill()
        said, _ = process.communicate()
    return process.returncode, said.strip()


def _popen(words: Sequence[str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        words,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def _network_of(name: str) -> list[str]:
    return ["nsenter", f"--net=/run/netns/{name}", "--"]


def _env(service: Service) -> list[str]:
    values: Mapping[str, str] = environment_of(service)
    return ["env", "-i", *(f"{key}={value}" for key, value in values.items())]
