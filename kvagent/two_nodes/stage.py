"""Starts the services in the compose file's order, each when those before it are as it says."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping

from kvagent.demo.processes import Child, Children, until
from kvagent.errors import KVAgentError
from kvagent.two_nodes.compose import Service
from kvagent.two_nodes.containers import Containers, command_of, environment_of

__all__ = ["ALONE_PORT", "start_alone", "start_services"]

ALONE_PORT = 8001
_READY_SECONDS = 300.0
"""A bound against hangs only: a process that ends is noticed at once."""


async def start_services(
    containers: Containers, services: Mapping[str, Service], say: Callable[[str], None]
) -> None:
    """`services` in an order in which each comes after those that it depends on. Returns when all
    are healthy; raises `KVAgentError` when one ends, or is not after far too long."""
    waits: dict[str, asyncio.Task[None]] = {}

    async def bring_up(name: str, service: Service) -> None:
        for other, dependency in service.depends_on.items():
            if dependency.condition == "service_started":
                raise KVAgentError(f"{name}: to wait for a start only is not done here")
            await waits[other]
        say(f"starting {name}: {' '.join(command_of(service))}")
        if service.healthcheck is None:
            await containers.complete(name, service)
        else:
            await containers.healthy(containers.start(name, service))

    for name, service in services.items():
        waits[name] = asyncio.create_task(_bounded(name, bring_up(name, service)))
    try:
        await asyncio.gather(*waits.values())
    finally:
        for task in waits.values():
            task.cancel()
        await asyncio.gather(*waits.values(), return_exceptions=True)


async def start_alone(children: Children, engine: Service) -> Child:
    """The engine to compare with: `engine` without a sidecar, in our own network."""
    words = [word for word in command_of(engine) if not word.startswith("--socket-template=")]
    renamed = {"--engine-id": "alone", "--port": str(ALONE_PORT), "--host": "127.0.0.1"}
    options = [f"{name}={value}" for name, value in renamed.items()]
    words = [word for word in words if word.split("=")[0] not in renamed] + options
    env = [f"{key}={value}" for key, value in environment_of(engine).items()]
    child = children.start("engine alone", ["env", "-i", *env, *words])
    await until(lambda: "kvagent demo engine on" in child.output(), child.name, _READY_SECONDS)
    return child


async def _bounded(name: str, work: Awaitable[None]) -> None:
    try:
        await asyncio.wait_for(work, _READY_SECONDS)
    except asyncio.TimeoutError:
        raise KVAgentError(f"{name}: not ready after {_READY_SECONDS:g} s") from None
