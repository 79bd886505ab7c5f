"""Real vLLM servers and their sidecars, out of the environment that scripts/vllm_setup makes."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from tests.harness import Sidecar

ROOT = Path(__file__).parent.parent
START_SECONDS = 400.0
"""Generous: vLLM takes 40 s on two idle cores."""
REQUEST_SECONDS = 1800.0
REMOTE_DECODE = {"do_remote_decode": True, "do_remote_prefill": False}
"""What a router sends to a prefill server."""

Prompt = Sequence[int]


def environment() -> Path | None:
    """The folder that scripts/vllm_setup has made, if it is complete."""
    cache = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    folder = Path(os.environ.get("KVAGENT_VLLM") or f"{cache}/kvagent/vllm-0.32.0")
    return folder if (folder / "kvagent-stamp").exists() else None


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def wait_for(what: str, condition: Callable[[], Any], seconds: float = 60.0) -> Any:
    """The first true value of `condition`."""
    until = time.monotonic() + seconds
    while not (value := condition()):
        if time.monotonic() > until:
            raise TimeoutError(f"{what}: not after {seconds:g} s")
        time.sleep(0.02)
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

    def complete(self, prompt: Prompt, max_tokens: int, **fields: Any) -> dict[str, Any]:
        """The whole answer, whatever its status; a greedy one."""
        body = {
            "model": "model",
            "prompt": list(prompt),
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            **fields,
        }
        answer = self.client.post("/v1/completions", json=body)
        return {"status": answer.status_code, **answer.json()}

    def text(self, prompt: Prompt, max_tokens: int, **fields: Any) -> str:
        answer = self.complete(prompt, max_tokens, **fields)
        if answer["status"] != 200:
            return f"<status {answer['status']}>"
        choice = answer["choices"][0]
        finished = choice["finish_reason"] == "length"
        return str(choice["text"]) if finished else f"<{choice['finish_reason']}>"

    def ticket(self, prompt: Prompt) -> dict[str, Any]:
        """What a router gets of a prefill server."""
        answer = self.complete(prompt, 1, kv_transfer_params=REMOTE_DECODE)
        return dict(answer["kv_transfer_params"])

    def token_times(self, prompt: Prompt, max_tokens: int) -> Iterator[float]:
        """When each token of a stream came, in seconds."""
        body = {
            "model": "model",
            "prompt": list(prompt),
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
        }
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


def together(calls: Sequence[Callable[[], Any]]) -> list[Any]:
    """The results of calls that run at the same time."""
    with ThreadPoolExecutor(max_workers=len(calls)) as pool:
        return [future.result() for future in [pool.submit(call) for call in calls]]


@dataclass
class Pair:
    """A prefill server on core 0, a decode server on core 1, and the proxy before them."""

    folder: Path
    connector: str
    prefill_options: Sequence[str] = ()
    decode_options: Sequence[str] = ()
    prefill: Server = field(init=False)
    decode: Server = field(init=False)
    proxy: Proxy = field(init=False)

    def start(self) -> None:
        self.prefill = self._server("prefill", "kv_producer", "0")
        self.decode = self._server("decode", "kv_consumer", "1")
        self.prefill.wait()
        self.decode.wait()
        self.proxy = Proxy(self.folder, self.prefill, self.decode)

    def transfer_config(self, name: str, role: str) -> dict[str, Any]:
        raise NotImplementedError

    def step_log(self, name: str) -> Path:
        """Where the timed connector of a server notes its steps; see tests/vllm_probe.py."""
        return self.folder / f"{name}-steps"

    def close(self) -> None:
        for name in ("proxy", "prefill", "decode"):
            if hasattr(self, name):
                getattr(self, name).close()

    def _server(self, name: str, role: str, core: str) -> Server:
        env = {"KVAGENT_STEP_LOG": str(self.step_log(name))}
        config = {
            "kv_role": role,
            "kv_load_failure_policy": "recompute",
            "kv_connector": self.connector,
            "kv_connector_module_path": "tests.vllm_probe",
            **self.transfer_config(name, role),
        }
        options = self.prefill_options if name == "prefill" else self.decode_options
        return Server(self.folder, name, core, config, options, env)


class KVAgentPair(Pair):
    """With sidecars, whose settings may change while the servers run."""

    def __init__(
        self,
        folder: Path,
        prefill_options: Sequence[str] = (),
        decode_options: Sequence[str] = (),
        lease_seconds: float = 30.0,
    ) -> None:
        super().__init__(folder, "TimedKVAgentConnector", prefill_options, decode_options)
        self.sidecars: dict[str, Sidecar] = {}
        self.status: dict[str, Http] = {}
        self._embedded = False
        self.start_sidecar("prefill", lease_seconds=lease_seconds)
        self.start_sidecar("decode")

    def start_sidecar(self, name: str, **settings: Any) -> None:
        """Kills the one that runs, and starts another with other settings at its socket."""
        if name in self.sidecars:
            self.sidecars.pop(name).kill()
        port = self.status[name].port if name in self.status else free_port()
        file = self.folder / f"{name}.toml"
        file.write_text(
            "".join(f"{key} = {json.dumps(value)}\n" for key, value in settings.items())
        )
        self.sidecars[name] = Sidecar(
            self.folder, name, "--config", str(file), "--http", f"127.0.0.1:{port}"
        )
        self.status[name] = Http(port)

    def wait_ready(self, name: str) -> None:
        """Until the sidecar has its engine again."""

        def ready() -> bool:
            try:
                return self.status[name].client.get("/readyz").status_code == 200
            except httpx.TransportError:
                return False

        wait_for(f"{name}'s sidecar", ready)

    def embed_prefill(self) -> None:
        """Restarts the prefill server with the agent in its worker, and no sidecar."""
        self.prefill.close()
        self.sidecars.pop("prefill").close()
        self._embedded = True
        self.prefill = self._server("prefill", "kv_producer", "0").wait()

    def transfer_config(self, name: str, role: str) -> dict[str, Any]:
        if name == "prefill" and self._embedded:
            return {"kv_connector_extra_config": {"embedded": True}}
        return {"kv_connector_extra_config": {"socket": str(self.folder / f"{name}.sock")}}

    def close(self) -> None:
        super().close()
        for sidecar in self.sidecars.values():
            sidecar.close()


class NixlPair(Pair):
    def __init__(
        self,
        folder: Path,
        prefill_options: Sequence[str] = (),
        decode_options: Sequence[str] = (),
        lease_seconds: int = 30,
    ) -> None:
        super().__init__(folder, "TimedNixlConnector", prefill_options, decode_options)
        self._lease_seconds = lease_seconds

    def transfer_config(self, name: str, role: str) -> dict[str, Any]:
        return {"kv_connector_extra_config": {"kv_lease_duration": self._lease_seconds}}

    def change_lease(self, lease_seconds: int) -> None:
        """Restarts both servers: each takes it from its own configuration."""
        self.close()
        self._lease_seconds = lease_seconds
        self.start()
