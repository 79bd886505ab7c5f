"""Real vLLM servers and their sidecars, out of the environment that scripts/vllm_setup makes."""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

ROOT = Path(__file__).parent.parent
START_SECONDS = 400.0
"""Generous: vLLM takes 40 s on two idle cores."""
REQUEST_SECONDS = 1800.0
REMOTE_DECODE = {"do_remote_decode": True, "do_remote_prefill": False}
"""What a router sends to a prefill server."""

Prompt = Sequence[int]


@dataclass(frozen=True)
class Answer:
    """The tokens of an answer, and what the server knew of each step's two likeliest."""

    tokens: tuple[str, ...]
    top: tuple[dict[str, float], ...] = ()
    """Log probability by token."""
    error: str = ""

    def __bool__(self) -> bool:
        return not self.error

    def agrees(self, other: Answer, margin: float = 0.0) -> bool:
        """Whether the tokens are equal. With a margin, as far as the first step at which the two
        likeliest tokens were that close and the answers chose one of them each: greedy decoding
        goes by rounding there, and what follows are two answers."""
        if self.error or other.error or len(self.tokens) != len(other.tokens):
            return False
        for mine, theirs, top in zip(self.tokens, other.tokens, self.top, strict=True):
            if mine != theirs:
                near = {token for token, value in top.items() if top[mine] - value <= margin}
                return margin > 0 and theirs in near
        return True


def environment() -> Path | None:
    """The folder that scripts/vllm_setup has made, if it is complete."""
    cache = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    folder = Path(os.environ.get("KVAGENT_VLLM") or f"{cache}/kvagent/vllm-0.32.0")
    return folder if (folder / "kvagent-stamp").exists() else None


def free_port() -> int:
    """Below the ports that outgoing connections take, of which one could be gone again."""
    while True:
        port = random.randrange(20000, 32000)
        with socket.socket() as sock, contextlib.suppress(OSError):
            sock.bind(("127.0.0.1", port))
            return port


def wait_for(what: str, condition: Callable[[], Any], seconds: float = 60.0) -> Any:
    """The first true value of `condition`."""
    until = time.monotonic() + seconds
    while not (value := condition()):
        if time.monotonic() > until:
            raise TimeoutError(f"{what}: not after {seconds:g} s")
        time.sleep(0.005)
    return value


class Process:
    """A command in a process group of its own, whose output goes to a file."""

    def __init__(self, log: Path, command: Sequence[str], env: Mapping[str, str]) -> None:
        self.log = log
        with log.open("a") as file:
            self._process = subprocess.Popen(
                command,
                stdout=file,
                stderr=file,
                env={**os.environ, "PYTHONPATH": str(ROOT), **env},
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    def running(self) -> bool:
        return self._process.poll() is None

    def kill(self) -> None:
        """SIGKILL to all of its processes."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def close(self) -> None:
        if self.running():
            self._process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(20)
        self.kill()

    def end_of_log(self) -> str:
        return "\n".join(self.log.read_text().splitlines()[-30:])


class Http:
    """What answers at a port of this host."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.url = f"http://127.0.0.1:{port}"
        self.client = httpx.Client(base_url=self.url, timeout=REQUEST_SECONDS)

    def healthy(self) -> bool:
        try:
            return self.client.get("/health").status_code == 200
        except httpx.TransportError:
            return False

    def complete(
        self,
        prompt: Prompt,
        max_tokens: int,
        headers: Mapping[str, str] | None = None,
        **fields: Any,
    ) -> dict[str, Any]:
        """The whole answer, whatever its status; a greedy one."""
        body = _body(prompt, max_tokens, fields)
        answer = self.client.post("/v1/completions", json=body, headers=headers)
        return {"status": answer.status_code, **answer.json()}

    def leave(self, prompt: Prompt, until: Callable[[], Any], **fields: Any) -> None:
        """Asks, and closes the connection when `until` is true, before there is an answer."""
        body = json.dumps(_body(prompt, 1, fields)).encode()
        head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
        head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        with socket.create_connection(("127.0.0.1", self.port)) as connection:
            connection.sendall(head.encode() + body)
            wait_for("the moment to leave", until)

    def answer(self, prompt: Prompt, max_tokens: int, **fields: Any) -> Answer:
        likeliest = {"logprobs": 2, "return_tokens_as_token_ids": True}
        answer = self.complete(prompt, max_tokens, **likeliest, **fields)
        if answer["status"] != 200:
            return Answer((), error=f"status {answer['status']}")
        choice = answer["choices"][0]
        if choice["finish_reason"] != "length":
            return Answer((), error=str(choice["finish_reason"]))
        logprobs = choice["logprobs"]
        return Answer(tuple(logprobs["tokens"]), tuple(logprobs["top_logprobs"]))

    def ticket(self, prompt: Prompt) -> dict[str, Any]:
        """What a router gets of a prefill server."""
        answer = self.complete(prompt, 1, kv_transfer_params=REMOTE_DECODE)
        return dict(answer["kv_transfer_params"])

    def token_times(self, prompt: Prompt, max_tokens: int) -> Iterator[float]:
        """When each token of a stream came, in seconds."""
        body = _body(prompt, max_tokens, {"stream": True})
        with self.client.stream("POST", "/v1/completions", json=body) as answer:
            for line in answer.iter_lines():
                if line.startswith("data: {"):
                    yield time.perf_counter()

    def metric(self, name: str, **labels: str) -> float:
        """The sum of all series of that name with those labels."""
        total = 0.0
        for line in self.client.get("/metrics").text.splitlines():
            if re.match(re.escape(name) + r"[ {]", line) and all(
                f'{key}="{value}"' in line for key, value in labels.items()
            ):
                total += float(line.rsplit(" ", 1)[1])
        return total


def _body(prompt: Prompt, max_tokens: int, fields: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "model": "model",
        "prompt": list(prompt),
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        **fields,
    }


class Server(Http):
    """`vllm serve`; `transfer` is its --kv-transfer-config, None for vLLM alone."""

    def __init__(
        self,
        folder: Path,
        name: str,
        core: str,
        transfer: Mapping[str, Any] | None = None,
        options: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        port: int = 0,
    ) -> None:
        super().__init__(port or free_port())
        home = environment()
        assert home is not None
        self._again = (folder, name, core, transfer, options, env)
        command = [str(home / "bin" / "python"), "-m", "vllm.entrypoints.cli.main", "serve"]
        command += [str(home / "model"), "--served-model-name", "model", "--enforce-eager"]
        command += ["--host", "127.0.0.1", "--port", str(self.port), "--dtype", "float32"]
        command += ["--max-model-len", "4096", "--disable-uvicorn-access-log", *options]
        if transfer is not None:
            command += ["--kv-transfer-config", json.dumps(transfer)]
        settings = {
            "VLLM_CPU_KVCACHE_SPACE": "2",
            "VLLM_CPU_OMP_THREADS_BIND": core,
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
            # NixlConnector's UCX gets what kvagent's sidecars set for themselves on one host.
            "UCX_NET_DEVICES": "lo",
            "VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port()),
            **(env or {}),
        }
        self.process = Process(folder / f"{name}-vllm.log", command, settings)

    def wait(self) -> Server:
        def up() -> bool:
            if not self.process.running():
                raise RuntimeError(f"vLLM did not start:\n{self.process.end_of_log()}")
            return self.healthy()

        wait_for("vLLM's start", up, START_SECONDS)
        return self

    def restarted(self) -> Server:
        """Another process on the same port."""
        self.close()
        return Server(*self._again, port=self.port)

    def close(self) -> None:
        self.process.close()


class Proxy(Http):
    """`kvagent proxy`."""

    def __init__(self, folder: Path, prefill: Http, decode: Http) -> None:
        super().__init__(free_port())
        command = [sys.executable, "-m", "kvagent", "proxy", "--port", str(self.port)]
        command += ["--prefill", prefill.url, "--decode", decode.url]
        self.process = Process(folder / "proxy.log", command, {})
        wait_for("the proxy's start", self.healthy)

    def close(self) -> None:
        self.process.close()


class VllmRouter(Http):
    """`vllm-router`, in its mode for disaggregated prefill."""

    def __init__(self, folder: Path, prefill: Http, decode: Http) -> None:
        super().__init__(free_port())
        home = environment()
        assert home is not None
        command = [str(home / "router" / "bin" / "vllm-router"), "--vllm-pd-disaggregation"]
        command += ["--prefill", prefill.url, "--decode", decode.url, "--policy", "round_robin"]
        command += ["--host", "127.0.0.1", "--port", str(self.port)]
        command += ["--prometheus-port", str(free_port())]
        self.process = Process(folder / "vllm-router.log", command, {})
        wait_for("the router's start", self.healthy)

    def close(self) -> None:
        self.process.close()


def together(calls: Sequence[Callable[[], Any]]) -> list[Any]:
    """The results of calls that run at the same time."""
    with ThreadPoolExecutor(max_workers=len(calls)) as pool:
        return [future.result() for future in [pool.submit(call) for call in calls]]
