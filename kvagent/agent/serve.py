"""`kvagent serve`: one agent in one process, from start to SIGTERM."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import resource
import signal

import uvloop

from kvagent.agent.agent import Agent
from kvagent.config import Config
from kvagent.errors import ConfigError
from kvagent.fabric.base import Fabric
from kvagent.visible import logs, spans

log = logging.getLogger("kvagent")

GC_OBJECTS = 20_000


def nixl_fabric(name: str, config: Config) -> Fabric:
    """The real fabric; NIXL is loaded only now."""
    from kvagent.fabric.nixl import NixlFabric

    return NixlFabric(name, piece_bytes=config.piece_bytes, inflight_bytes=config.inflight_bytes)


def serve(config: Config) -> None:
    """Runs until SIGTERM or SIGINT, then drains. A second signal stops at once."""
    if not config.socket:
        raise ConfigError("socket: give the path of the unix socket with --socket")
    if config.is_loopback():
        # UCX listens on every interface unless it is told otherwise. This sidecar is for this
        # host, and so is its data plane. (Not when embedded: the engine may use UCX itself.)
        os.environ.setdefault("UCX_NET_DEVICES", "lo")
    _raise_descriptor_limit()
    logs.configure(config.log_level, config.log_format)
    spans.start(os.environ)
    uvloop.run(_serve(config))


def _raise_descriptor_limit() -> None:
    """To what this process may have: peers, and strangers who knock, each take a descriptor."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def _calm_collector() -> None:
    """What is there now, torch above all, stays: the garbage collector need not walk it again and
    again. And what a transfer makes has no cycles, so it may wait for more before it looks; that
    takes a sixth off a small transfer."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(GC_OBJECTS, 10, 10)


async def _serve(config: Config) -> None:
    loop = asyncio.get_running_loop()
    stop, now = asyncio.Event(), asyncio.Event()

    def on_signal() -> None:
        (now if stop.is_set() else stop).set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)
    agent = Agent(config, nixl_fabric, alone=True)
    try:
        await agent.start()
        _calm_collector()
        await stop.wait()
        log.info("draining for at most %g s; a second signal stops at once", config.drain_timeout)
        drain = asyncio.create_task(agent.drain(config.drain_timeout))
        hurry = asyncio.create_task(now.wait())
        await asyncio.wait({drain, hurry}, return_when=asyncio.FIRST_COMPLETED)
        for task in (drain, hurry):
            task.cancel()
        await asyncio.gather(drain, hurry, return_exceptions=True)
    finally:
        await agent.stop()
    log.info("stopped")
