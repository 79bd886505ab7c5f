"""The processes of `kvagent demo`: which there are, how they find each other, when they are ready.

Every server takes a free port and says on its standard output which; nothing is agreed beforehand
but the folder in which the sidecars' sockets are.
"""

from __future__ import annotations

import asyncio
import re
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec

from kvagent.demo.config import EngineOptions
from kvagent.demo.processes import Child, Children, until

__all__ = ["Stage", "start_stage"]

_READY_SECONDS = 300.0
"""A bound against hangs only: a process that ends is noticed at once."""
_KVAGENT = (sys.executable, "-m", "kvagent")
_ENGINE_URL = re.compile(r"^kvagent demo engine on (http://\S+)$", re.MULTILINE)
_PROXY_URL = re.compile(r"^(http://\S+)$", re.MULTILINE)


class Stage(msgspec.Struct, frozen=True):
    """Base URLs: of the proxy, and of an engine that has no sidecar."""

    proxy: str
    alone: str


async def start_stage(
    children: Children,
    folder: Path,
    prefill: EngineOptions,
    decode: EngineOptions,
    say: Callable[[str], None],
) -> Stage:
    """Starts everything and returns when all of it takes requests.

    `prefill` and `decode` say what the two engines are; the third is as `decode`, but with TP 1
    and on its own. Raises `KVAgentError` when something takes far too long.
    """
    pair = (prefill, decode)
    say(f"starting {prefill.tp} sidecars for prefill, {decode.tp} for decode, and an engine alone")
    sockets = []
    for options in pair:
        for rank in range(options.tp):
            socket = _template(folder, options).format(rank=rank)
            command = [*_KVAGENT, "serve", "--socket", socket, "--bind", "127.0.0.1:0"]
            children.start(f"{options.engine_id} sidecar {rank}", command)
            sockets.append(Path(socket))
    alone = children.start("engine alone", _engine(decode, tp=1))
    await until(lambda: all(path.exists() for path in sockets), "sidecars", _READY_SECONDS)
    say(f"starting a prefill engine with TP {prefill.tp}, a decode engine with TP {decode.tp}")
    engines = [
        children.start(
            f"{options.engine_id} engine",
            [*_engine(options, options.tp), "--socket-template", _template(folder, options)],
        )
        for options in pair
    ]
    prefill_url, decode_url, alone_url = await asyncio.gather(
        *(_url(engine, _ENGINE_URL) for engine in (*engines, alone))
    )
    say(f"prefill at {prefill_url}, decode at {decode_url}, alone at {alone_url}")
    proxy = (*_KVAGENT, "proxy", "--prefill", prefill_url, "--decode", decode_url, "--port", "0")
    proxy_url = await _url(children.start("proxy", proxy), _PROXY_URL)
    say(f"proxy at {proxy_url}")
    return Stage(proxy_url, alone_url)


def _template(folder: Path, options: EngineOptions) -> str:
    return str(folder / f"{options.engine_id}-{{rank}}.sock")


def _engine(options: EngineOptions, tp: int) -> list[str]:
    command = [*_KVAGENT, "engine", "--engine-id", options.engine_id, "--model", options.model]
    command += ["--tp", str(tp), "--port", "0"]
    command += ["--num-blocks", str(options.num_blocks), "--block-size", str(options.block_size)]
    return [*command, "--kv-dtype", options.kv_dtype, "--device", options.device]


async def _url(child: Child, pattern: re.Pattern[str]) -> str:
    """What the server says that its address is, once it listens."""
    found = await until(lambda: pattern.search(child.output()), child.name, _READY_SECONDS)
    assert found is not None
    return found[1]
