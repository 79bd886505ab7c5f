"""`kvagent demo`: prefill on one engine, decode on another, and the proof that it changes nothing.

    prompts --> proxy --> prefill engine, TP 3    decode engine, TP 1    an engine alone
                             3 sidecars  --NIXL-->  1 sidecar              to compare with

Starts all of these as processes, sends prompts through the proxy and the same ones to the engine
alone. Compares the tokens, and the bytes that were moved with what the model's shape says.
"""

from __future__ import annotations

import asyncio
import shutil
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx
import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from kvagent.demo.ask import ask
from kvagent.demo.config import EngineOptions, ModelConfig, default_model
from kvagent.demo.processes import Children, exit_on_sigterm
from kvagent.demo.prompts import demo_prompts
from kvagent.demo.report import Answer, Report, Row, compare, kv_bytes, table
from kvagent.demo.stage import start_stage
from kvagent.errors import KVAgentError

__all__ = ["Demo"]

_LOG_WIDTH = 120
_SILENCE_SECONDS = 300.0
"""A bound against hangs only: the longest a server may take to say the next thing."""


@dataclass(frozen=True, kw_only=True)
class Demo:
    """`model` is a Hugging Face directory or a GGUF file, None for `default_model()`."""

    prefill_tp: int = 3
    decode_tp: int = 1
    model: str | None = None
    prompts: int = 6
    max_tokens: int = 24
    device: str = "cpu"
    """Of the models and their caches: `cpu` or `cuda`."""

    def run(self, *, as_json: bool) -> bool:
        """Whether every request went over the wire and got the tokens of an engine alone.

        Says on the screen what happens. With `as_json` that goes to standard error, and the last
        line of standard output is a `Report`, also when something could not be started. Logs are
        kept when something went wrong, if there are any. For the main thread of a process.
        """
        console = Console(stderr=as_json, highlight=False, markup=False)
        if not console.is_terminal:
            console.width = _LOG_WIDTH
        folder = Path(tempfile.mkdtemp(prefix="kvagent-demo-"))
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

    def _report(self, console: Console, folder: Path) -> Report:
        rows: list[Row] = []
        failure = ""
        try:
            with exit_on_sigterm(), Children(folder) as children:
                rows = asyncio.run(children.run(self._show(console, folder, children)))
        except KVAgentError as error:
            failure = str(error)
            console.print(failure, style="red", soft_wrap=True)
        return Report.of(rows, self.prefill_tp, self.decode_tp, failure)

    async def _show(self, console: Console, folder: Path, children: Children) -> list[Row]:
        started = time.monotonic()

        def say(what: str) -> None:
            console.print(f"{time.monotonic() - started:6.1f} s  {what}", soft_wrap=True)

        prompts = demo_prompts(self.prompts)
        prefill = self._engine("prefill", self.prefill_tp, prompts)
        decode = self._engine("decode", self.decode_tp, prompts)
        say(f"model: {prefill.model}")
        with console.status("loading the model on every rank"):
            stage = await start_stage(children, folder, prefill, decode, say)
        say(f"sending {len(prompts)} prompts through the proxy")
        served = await self._ask_all(console, stage.proxy, prompts)
        say("sending the same to the engine alone")
        alone = await self._ask_all(console, stage.alone, prompts)
        # Only now, since it imports torch: at the start it would take time from the engines.
        config = _model_config(Path(decode.model))
        rows = [
            compare(one, two, kv_bytes(config, decode.kv_dtype, decode.tp, one.prompt_tokens))
            for one, two in zip(served, alone, strict=True)
        ]
        console.print(table(rows))
        same = sum(row.match for row in rows)
        say(f"{same} of {len(rows)} answers are the same as those of the engine alone")
        for number, row in enumerate(rows, start=1):
            if row.problem:
                console.print(f"request {number}: {row.problem}", style="red", soft_wrap=True)
        return rows

    def _engine(self, name: str, tp: int, prompts: Sequence[str]) -> EngineOptions:
        """An engine with room for all prompts at once, so that none waits for blocks while its
        lease runs. A token is at least a byte; float32, since tokens are compared."""
        size = 16
        tokens = [len(prompt.encode()) + 1 + self.max_tokens for prompt in prompts]
        return EngineOptions(
            model=str(Path(self.model).resolve() if self.model else default_model()),
            engine_id=name,
            tp=tp,
            num_blocks=sum(-(-count // size) for count in tokens),
            block_size=size,
            kv_dtype="float32",
            device=self.device,
        )

    async def _ask_all(self, console: Console, url: str, prompts: Sequence[str]) -> list[Answer]:
        """All prompts at once, with a bar for each where somebody watches."""
        bars = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        timeout = httpx.Timeout(_SILENCE_SECONDS)
        async with httpx.AsyncClient(timeout=timeout, trust_env=False) as client:
            with bars:
                return await asyncio.gather(
                    *(self._ask(client, url, prompt, bars) for prompt in prompts)
                )

    async def _ask(
        self, client: httpx.AsyncClient, url: str, prompt: str, bars: Progress
    ) -> Answer:
        title = prompt.replace("\n", " ")
        bar = bars.add_task(title[:40].ljust(40), total=self.max_tokens)

        def on_tokens(count: int) -> None:
            bars.update(bar, completed=count)

        answer = await ask(client, url, prompt, self.max_tokens, on_tokens)
        bars.update(bar, total=max(1, len(answer.token_ids)))
        return answer


def _model_config(path: Path) -> ModelConfig:
    from kvagent.demo.weights import open_checkpoint

    return open_checkpoint(path).config
