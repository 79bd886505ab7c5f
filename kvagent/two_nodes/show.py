"""All of it in order: networks, services, the demo's requests, the outage.

front namespace: this process, the client, the engine alone, one side of every network
    proxy -- network "prefill" -- prefill-engine ) socket ( prefill-sidecar --+
          -- network "decode"  -- decode-engine  ) socket ( decode-sidecar  --+ "fabric"
"""

from __future__ import annotations

import asyncio
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx
import msgspec
from rich.console import Console

from kvagent.demo.config import ModelConfig, default_model
from kvagent.demo.processes import Children, exit_on_sigterm
from kvagent.demo.prompts import demo_prompts
from kvagent.demo.report import Report, Row, compare, kv_bytes, table
from kvagent.errors import KVAgentError
from kvagent.two_nodes.compose import Compose, Service, read_compose
from kvagent.two_nodes.containers import Containers
from kvagent.two_nodes.namespaces import World
from kvagent.two_nodes.outage import TRIES, Drill, Timed, long_prompts, peer_transport, timed
from kvagent.two_nodes.report import Outage, TwoNodes, hardship, outage_table
from kvagent.two_nodes.stage import ALONE_PORT, start_alone, start_services

__all__ = ["TwoNodesShow"]

_LOG_WIDTH = 120
_SILENCE_SECONDS = 300.0
"""A bound against hangs only: the longest a server may take to say the next thing."""
_ALONE = f"http://127.0.0.1:{ALONE_PORT}"
_AT_ONCE = 3
"""Long prompts, when the link is to be cut."""
_KV_DTYPE = "float32"
"""The default of `kvagent engine`, which the compose file leaves as it is."""
_PROBE = "import socket; socket.create_connection(('{}', {}), timeout=2)"


@dataclass(frozen=True, kw_only=True)
class TwoNodesShow:
    """`cut_seconds`: how long the link is down. `megabits`: how fast it is during that, so that a
    transfer takes long enough to be cut in the middle."""

    compose: Path
    prompts: int = 6
    max_tokens: int = 24
    cut_seconds: float = 5.0
    megabits: float = 50.0

    def run(self, *, as_json: bool) -> bool:
        """Whether all was as it should be. Call it in namespaces of our own (`namespaces.enter`).

        Says on the screen what happens. With `as_json` that goes to standard error, and the last
        line of standard output is a `TwoNodes`, also when something could not be started. Logs are
        kept when something went wrong. For the main thread of a process.
        """
        console = Console(stderr=as_json, highlight=False, markup=False)
        if not console.is_terminal:
            console.width = _LOG_WIDTH
        folder = Path(tempfile.mkdtemp(prefix="kvagent-two-nodes-"))
        ok = interrupted = False
        try:
            report = self._report(console, folder)
            ok = report.ok
        except (KeyboardInterrupt, SystemExit):
            interrupted = True
            raise
        finally:
            if ok or interrupted or not any(folder.iterdir()):
                shutil.rmtree(folder, ignore_errors=True)
            else:
                console.print(f"The logs of all processes are in {folder}", soft_wrap=True)
        if as_json:
            print(msgspec.json.encode(report).decode(), flush=True)
        return ok

    def _report(self, console: Console, folder: Path) -> TwoNodes:
        try:
            compose = read_compose(self.compose)
            services = compose.ours()
            world = World(compose, services)
            with exit_on_sigterm(), Children(folder) as children:
                containers = Containers(world, children)
                try:
                    stage = _Stage(self, console, compose, services, world, containers, children)
                    return asyncio.run(children.run(stage.show()))
                finally:
                    containers.close()
        except KVAgentError as error:
            console.print(str(error), style="red", soft_wrap=True)
            return TwoNodes(**msgspec.structs.asdict(Report.of([], 1, 1, str(error))))


@dataclass
class _Stage:
    """One run."""

    options: TwoNodesShow
    console: Console
    compose: Compose
    services: dict[str, Service]
    world: World
    containers: Containers
    children: Children

    async def show(self) -> TwoNodes:
        started = time.monotonic()

        def say(what: str) -> None:
            self.console.print(f"{time.monotonic() - started:6.1f} s  {what}", soft_wrap=True)

        self._say_addresses(say)
        await asyncio.gather(
            start_services(self.containers, self.services, say),
            start_alone(self.children, self.services["decode-engine"]),
        )
        proxy = f"http://{self.world.address('proxy', 'front')}:8000"
        fabric = self.world.networks["fabric"]
        sidecar = f"http://{self.world.address('decode-sidecar', 'fabric')}:9100"
        timeout = httpx.Timeout(_SILENCE_SECONDS)
        async with httpx.AsyncClient(timeout=timeout, trust_env=False) as client:
            apart = await self._are_apart()
            say(f"the engines {'cannot' if apart else 'CAN'} reach the other node's containers")
            before = fabric.bytes_to("decode-sidecar")
            prompts = demo_prompts(self.options.prompts)
            say(f"sending {len(prompts)} prompts through the proxy")
            served = await self._ask(client, proxy, prompts)
            link_bytes = fabric.bytes_to("decode-sidecar") - before
            transport = await peer_transport(client, sidecar)
            say(f"{link_bytes / 1e6:.1f} MB over the link, by {transport}")

            drill = Drill(fabric, "prefill-sidecar", "decode-sidecar", sidecar, client)
            cut, suffered = await self._suffer(drill, proxy, say)
            say("sending one more prompt")
            after = await self._ask(client, proxy, cut[:1])

            say("sending the same to the engine alone")
            alone = await self._ask(client, _ALONE, prompts)
            alone_cut = await self._ask(client, _ALONE, cut)
        rows = self._rows(served, alone)
        outage = self._outage(drill, suffered, after[0], alone_cut)
        self.console.print(table(rows))
        self.console.print(outage_table(outage))
        return self._result(rows, outage, transport, link_bytes, apart)

    def _say_addresses(self, say: Callable[[str], None]) -> None:
        for name, network in self.world.networks.items():
            members = ", ".join(f"{who} {where}" for who, where in network.addresses.items())
            say(f"network {name}: {members}")

    async def _are_apart(self) -> bool:
        """Whether each engine fails to reach every container of the other node."""
        tries = [
            (engine, address, port)
            for engine, other in (("prefill", "decode"), ("decode", "prefill"))
            for address, port in (
                (self.world.address(f"{other}-engine", other), 8000),
                (self.world.address(f"{other}-sidecar", "fabric"), 7100),
                (self.world.address(f"{other}-sidecar", "fabric"), 9100),
            )
        ]
        reached = await asyncio.gather(
            *(
                self.containers.succeeds(f"{engine}-engine", ["python", "-c", _PROBE.format(*to)])
                for engine, *to in tries
            )
        )
        return not any(reached)

    async def _suffer(
        self, drill: Drill, url: str, say: Callable[[str], None]
    ) -> tuple[list[str], list[Timed]]:
        """Sends prompts until the link was cut in the middle of a transfer; all of them, and their
        answers."""
        prompts = long_prompts(_AT_ONCE * TRIES)
        answers: list[Timed] = []
        while not drill.done and len(answers) < len(prompts):
            batch = prompts[len(answers) :][:_AT_ONCE]
            say(f"sending {len(batch)} long prompts over {self.options.megabits:g} Mbit/s")
            answers += await drill.run(
                url,
                batch,
                self.options.max_tokens,
                megabits=self.options.megabits,
                seconds=self.options.cut_seconds,
                say=say,
            )
            if not drill.done:
                say("no transfer was seen under way, so nothing was cut")
        if not drill.done:
            raise KVAgentError(f"nothing could be cut in {TRIES} tries: give it a lower --megabits")
        return prompts[: len(answers)], answers

    async def _ask(
        self, client: httpx.AsyncClient, url: str, prompts: Sequence[str]
    ) -> list[Timed]:
        """All at once."""
        limit = self.options.max_tokens
        return await asyncio.gather(*(timed(client, url, prompt, limit) for prompt in prompts))

    def _rows(self, served: Sequence[Timed], alone: Sequence[Timed]) -> list[Row]:
        config = _model_config()
        return [
            compare(one, two, kv_bytes(config, _KV_DTYPE, 1, one.prompt_tokens))
            for (one, _), (two, _) in zip(served, alone, strict=True)
        ]

    def _outage(
        self, drill: Drill, suffered: Sequence[Timed], after: Timed, alone: Sequence[Timed]
    ) -> Outage:
        config = _model_config()
        requests = [
            hardship(one, two, kv_bytes(config, _KV_DTYPE, 1, one.prompt_tokens), seconds)
            for (one, seconds), (two, _) in zip([*suffered, after], [*alone, alone[0]], strict=True)
        ]
        last = requests.pop()
        return Outage(
            ok=not any(each.problem for each in requests)
            and not last.problem
            and last.kv == "fetched",
            rate_mbit_per_s=self.options.megabits,
            cut_seconds=drill.cut_seconds,
            at_cut=drill.at_cut,
            stalled_bytes=drill.stalled_bytes,
            fetched=sum(each.kv == "fetched" for each in requests),
            recomputed=sum(each.kv == "recomputed" for each in requests),
            requests=requests,
            after=last,
        )

    def _result(
        self, rows: list[Row], outage: Outage, transport: str, link_bytes: int, apart: bool
    ) -> TwoNodes:
        moved = sum(row.transfer_bytes for row in rows)
        problems = [f"request {n}: {row.problem}" for n, row in enumerate(rows, 1) if row.problem]
        problems += [each.problem for each in (*outage.requests, outage.after) if each.problem]
        if transport != "tcp":
            problems.append(f"the bytes came by {transport}, not over the link")
        if link_bytes < moved:
            problems.append(f"{moved} bytes were moved, {link_bytes} went over the link")
        if not apart:
            problems.append("an engine reaches the other node's containers")
        for problem in problems:
            self.console.print(problem, style="red", soft_wrap=True)
        report = Report.of(rows, 1, 1)
        values = msgspec.structs.asdict(report) | {"ok": report.ok and outage.ok and not problems}
        return TwoNodes(
            **values, transport=transport, link_bytes=link_bytes, apart=apart, outage=outage
        )


def _model_config() -> ModelConfig:
    # Late, since it imports torch: at the start it would take time from the engines.
    from kvagent.demo.weights import open_checkpoint

    return open_checkpoint(default_model()).config
