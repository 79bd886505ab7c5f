"""The check from start to end: every case, the demo, a table, a file of JSON.

Exit codes: 0 when all is well, 1 when something is not (or was not looked at for want of time), 2
for wrong arguments or missing packages, 3 without a GPU.
"""

from __future__ import annotations

import argparse
import platform
import re
import subprocess
import sys
import tempfile
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import msgspec

from kvagent.doctor.reading import carriers
from kvagent.gpu_check.engine import CheckFailed, Engine
from kvagent.gpu_check.setup import Case, Command, cases

__all__ = ["main"]

NO_GPU = 3
ROUNDS = 4
_SAID = re.compile(r"go by (\w+)[:,]")
SPANS = ((0, 100), (5, 93), (37, 38))
"""Tokens that are moved, `[start, end)`: whole blocks, parts of some, one token."""


class Outcome(msgspec.Struct, kw_only=True):
    """What a case came to. Rates are in GB/s, of the whole fetch and of its reads alone."""

    name: str
    ok: bool = False
    problem: str = ""
    transfers: int = 0
    transport: str = ""
    ucx: str = ""
    """What UCX says that it reads by."""
    staged: bool = False
    fetch_rate: float = 0.0
    wire_rate: float = 0.0
    copy_rate: float = 0.0
    event: str = ""
    seconds: float = 0.0


class Report(msgspec.Struct, kw_only=True):
    device: str
    gpu: dict[str, str] = {}
    versions: dict[str, str] = {}
    cases: list[Outcome] = []
    demo: dict[str, Any] = {}
    seconds: float = 0.0
    ok: bool = False


def main(arguments: list[str]) -> int:
    options = _parser().parse_args(arguments)
    begin = time.monotonic()
    report = Report(device=options.device, versions=_versions())
    if options.device == "cuda":
        why, report.gpu = _look_at_gpu()
        if why:
            print(f"gpu_check: no GPU: {why}", file=sys.stderr)
            return NO_GPU
    until = begin + options.seconds
    folder = Path(tempfile.mkdtemp(prefix="kvagent-gpu-check-"))
    print(f"gpu_check on {report.gpu.get('name', options.device)}; logs are in {folder}")
    for number, case in enumerate(cases(options.device)):
        if options.only and options.only not in case.name:
            continue
        outcome = Outcome(name=case.name)
        if time.monotonic() > until:
            outcome.problem = "not looked at: the time is up"
        else:
            _examine(case, folder / str(number), outcome)
        report.cases.append(outcome)
        print(f"{time.monotonic() - begin:6.1f} s  {'ok  ' if outcome.ok else 'FAIL'} {case.name}")
    if options.demo:
        report.demo = _demo(options.device, until - time.monotonic())
    report.seconds = time.monotonic() - begin
    demo_ok = not options.demo or bool(report.demo.get("ok"))
    report.ok = bool(report.cases) and all(each.ok for each in report.cases) and demo_ok
    options.json.write_bytes(msgspec.json.format(msgspec.json.encode(report)))
    show(report)
    print(f"written to {options.json}")
    return 0 if report.ok else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="gpu_check", description=__doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--json", type=Path, default=Path("gpu_check.json"), metavar="FILE")
    parser.add_argument("--seconds", type=float, default=240.0, help="begin nothing after so many")
    parser.add_argument("--no-demo", dest="demo", action="store_false")
    parser.add_argument("--only", default="", metavar="TEXT", help="cases with that in their name")
    parser.add_argument("--wheels", metavar="DIR", help="packages to install from, without network")
    return parser


def _look_at_gpu() -> tuple[str, dict[str, str]]:
    """Why there is none, or what it is."""
    import torch

    from kvagent.cuda.torch_cuda import TorchCuda
    from kvagent.errors import KVAgentError

    if not torch.cuda.is_available():
        built = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "without CUDA"
        return f"torch {torch.__version__}, {built}, sees none", {}
    try:
        gpu = TorchCuda().describe(0)
    except KVAgentError as error:
        return str(error), {}
    found = {"name": gpu.name, "uuid": gpu.uuid, "pci": gpu.pci, "flushes": str(gpu.flushes)}
    return "", found


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version(), "kernel": platform.release()}
    for name in ("kvagent", "torch", "nixl", "nixl-cu12", "nixl-cu13"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            pass
    return found


# ---------------------------------------------------------------- one case


def _examine(case: Case, folder: Path, outcome: Outcome) -> None:
    folder.mkdir()
    begin = time.monotonic()
    try:
        with (
            Engine(folder, "prefill", case.producer, sidecars=case.sidecars) as producer,
            Engine(folder, "decode", case.consumer, sidecars=case.sidecars) as consumer,
        ):
            for engine in (producer, consumer):
                engine.begin()
            for engine in (producer, consumer):
                engine.start()
            producer.tell_all(Command(do="fill"))
            for number, (start, tokens) in enumerate(SPANS):
                _transfer(producer, consumer, outcome, f"r{number}", start, tokens)
            if case.measure:
                _measure(producer, consumer, outcome)
            if case.event:
                _transfer(producer, consumer, outcome, "late", 0, SPANS[0][1], late=True)
            lines = consumer.log_lines()
            said = [found[1] for line in lines if (found := _SAID.search(line))]
            outcome.transport = ", ".join(sorted(set(said)))
            outcome.ucx = ", ".join(sorted(set(carriers("\n".join(lines)).values())))
    except CheckFailed as error:
        outcome.problem = str(error)
    else:
        outcome.ok = True
    outcome.seconds = time.monotonic() - begin


def _transfer(
    producer: Engine,
    consumer: Engine,
    outcome: Outcome,
    name: str,
    start: int,
    tokens: int,
    *,
    late: bool = False,
) -> None:
    """Scattered blocks, and every byte compared, those around them too."""
    there = _blocks(producer, tokens, 5, 3)
    here = _blocks(consumer, tokens, 7, 2)
    consumer.tell_all(Command(do="guard"))
    offered = producer.tell(Command(do="offer", name=name, blocks=there, tokens=tokens, late=late))
    fetched = consumer.tell(
        Command(do="fetch", name=name, ticket=offered.ticket, blocks=here, start=start)
    )
    outcome.staged = outcome.staged or fetched.stats["staged"] > 0
    sent = producer.tell_all(Command(do="digest", blocks=there, start=start, tokens=tokens))
    came = consumer.tell_all(Command(do="digest", blocks=here, start=start, tokens=tokens))
    want = {head: digest for answer in sent for head, digest in answer.digests.items()}
    got = {head: digest for answer in came for head, digest in answer.digests.items()}
    wrong = sorted(head for head in want if got.get(head) != want[head])
    if wrong or len(want) != len(got):
        raise CheckFailed(f"tokens [{start}, {tokens}): wrong bytes in heads {', '.join(wrong)}")
    if not all(answer.clean for answer in came):
        raise CheckFailed(f"tokens [{start}, {tokens}): bytes outside were written")
    if late:
        how = "pending" if offered.pending else "already past"
        outcome.event = f"{how} at the offer, which took {offered.seconds * 1e3:.0f} ms"
    outcome.transfers += 1


def _blocks(engine: Engine, tokens: int, step: int, first: int) -> tuple[int, ...]:
    """Ids that are not in order; the numbers of blocks are powers of two, and steps odd."""
    size, total = engine.side.block_size, 4096 // engine.side.block_size
    return tuple((step * i + first) % total for i in range(-(-tokens // size)))


def _measure(producer: Engine, consumer: Engine, outcome: Outcome) -> None:
    """Half the cache at once, the best of some rounds, and a plain copy of all of it."""
    tokens = 2048
    for number in range(ROUNDS):
        name = f"large{number}"
        blocks = _blocks(producer, tokens, 1, 0)
        offered = producer.tell(Command(do="offer", name=name, blocks=blocks, tokens=tokens))
        stats = consumer.tell(
            Command(do="fetch", name=name, ticket=offered.ticket, blocks=blocks)
        ).stats
        for field, seconds in (("fetch_rate", stats["seconds"]), ("wire_rate", stats["wire"])):
            rate = stats["bytes"] / max(seconds, 1e-9) / 1e9
            setattr(outcome, field, max(getattr(outcome, field), round(rate, 3)))
    copied = consumer.tell(Command(do="copy"))
    outcome.copy_rate = round(copied.stats["bytes"] / copied.seconds / 1e9, 3)


# ---------------------------------------------------------------- the demo, and what is shown


def _demo(device: str, seconds: float) -> dict[str, Any]:
    if seconds < 30:
        return {"ok": False, "failure": "not looked at: the time is up"}
    command = [
        *(sys.executable, "-m", "kvagent", "demo", "--json", "--device", device),
        *("--prefill-tp", "2", "--prompts", "3", "--max-tokens", "12"),
    ]
    try:
        done = subprocess.run(command, capture_output=True, timeout=seconds, check=False)
    except subprocess.TimeoutExpired:
        return {"ok": False, "failure": f"not done after {seconds:.0f} s"}
    try:
        last = done.stdout.strip().splitlines()[-1]
        found: dict[str, Any] = msgspec.json.decode(last)
    except (IndexError, msgspec.DecodeError):
        words = done.stderr.decode(errors="replace").strip().splitlines()[-3:]
        return {"ok": False, "failure": "; ".join(words) or f"exit code {done.returncode}"}
    return found


def show(report: Report) -> None:
    """The table."""
    from rich.console import Console
    from rich.table import Table

    table = Table("case", "", "transport", "UCX", "fetch GB/s", "wire GB/s", "copy GB/s", "s")
    for each in report.cases:
        rates = [f"{rate:.2f}" if rate else "" for rate in _rates(each)]
        notes = [each.problem, each.event, "permuted" if each.staged else ""]
        name = "\n".join([each.name, *(f"  {note}" for note in notes if note)])
        verdict = "[green]ok[/]" if each.ok else "[red]FAIL[/]"
        table.add_row(name, verdict, each.transport, each.ucx, *rates, f"{each.seconds:.0f}")
    console = Console(width=None if sys.stdout.isatty() else 140, highlight=False)
    console.print(table)
    if report.demo:
        failure = report.demo.get("failure") or ""
        verdict = "ok" if report.demo.get("ok") else f"FAIL {failure}"
        console.print(f"demo on {report.device}: {verdict}", markup=False)
    verdict = "all is well" if report.ok else "something is not well"
    console.print(f"{verdict}; {report.seconds:.0f} s", markup=False)


def _rates(each: Outcome) -> tuple[float, float, float]:
    return each.fetch_rate, each.wire_rate, each.copy_rate
