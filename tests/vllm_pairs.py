"""A prefill server, a decode server and a proxy, with kvagent's connector or vLLM's own."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import httpx

from tests.harness import Sidecar
from tests.vllm_servers import Http, Proxy, Server, free_port, wait_for


@dataclass
class Pair:
    """The prefill server computes on core 0, the decode server on core 1."""

    folder: Path
    prefill_options: Sequence[str] = ()
    decode_options: Sequence[str] = ()
    lease_seconds: int = 30
    prefill_cores: str = "0"
    failure_policy: str = "recompute"
    """vLLM's `kv_load_failure_policy`, of the decode server."""
    prefill: Server = field(init=False)
    decode: Server = field(init=False)
    proxy: Proxy = field(init=False)

    name: ClassVar[str]
    connector: ClassVar[str]
    fetch_metric: ClassVar[str]
    failure_metric: ClassVar[str]

    def start(self) -> None:
        self.prefill = self._server("prefill", "kv_producer", self.prefill_cores)
        self.decode = self._server("decode", "kv_consumer", "1")
        self.prefill.wait()
        self.decode.wait()
        self.proxy = Proxy(self.folder, self.prefill, self.decode)

    def fetches(self) -> float:
        """Good transfers that the decode server has counted."""
        return self.decode.metric(self.fetch_metric)

    def failures(self, **labels: str) -> float:
        return self.decode.metric(self.failure_metric, **labels)

    def restart_decode(self, failure_policy: str) -> None:
        self.proxy.close()
        self.decode.close()
        self.failure_policy = failure_policy
        self.decode = self._server("decode", "kv_consumer", "1").wait()
        self.proxy = Proxy(self.folder, self.prefill, self.decode)

    def step_log(self, name: str) -> Path:
        """Where the timed connector of a server notes its steps; see tests/vllm_probe.py."""
        return self.folder / f"{name}-steps"

    def transfer_config(self, name: str) -> dict[str, Any]:
        raise NotImplementedError

    def close(self) -> None:
        for name in ("proxy", "prefill", "decode"):
            if hasattr(self, name):
                getattr(self, name).close()

    def _server(self, name: str, role: str, cores: str) -> Server:
        config = {
            "kv_role": role,
            "kv_load_failure_policy": self.failure_policy,
            "kv_connector": self.connector,
            "kv_connector_module_path": "tests.vllm_probe",
            **self.transfer_config(name),
        }
        options = self.prefill_options if name == "prefill" else self.decode_options
        env = {"KVAGENT_STEP_LOG": str(self.step_log(name))}
        return Server(self.folder, name, cores, config, options, env)


@dataclass
class KVAgentPair(Pair):
    """With sidecars, whose settings may change while the servers run."""

    prefill_ranks: int = 1
    sidecars: dict[str, Sidecar] = field(default_factory=dict)
    status: dict[str, Http] = field(default_factory=dict)
    embedded: bool = False
    """Whether the prefill server has the agent in its worker."""

    name = "KVAgent"
    connector = "TimedKVAgentConnector"
    fetch_metric = "vllm:kvagent_fetch_seconds_count"
    failure_metric = "vllm:kvagent_failed_transfers_total"

    def start(self) -> None:
        for rank in range(self.prefill_ranks):
            self.start_sidecar("prefill", rank, lease_seconds=self.lease_seconds)
        self.start_sidecar("decode")
        super().start()

    def start_sidecar(self, name: str, rank: int = 0, **settings: Any) -> None:
        """Kills the one that runs, and starts another with other settings at its socket."""
        full = f"{name}-{rank}"
        if full in self.sidecars:
            self.sidecars.pop(full).kill()
        port = self.status[full].port if full in self.status else free_port()
        file = self.folder / f"{full}.toml"
        file.write_text(
            "".join(f"{key} = {json.dumps(value)}\n" for key, value in settings.items())
        )
        self.sidecars[full] = Sidecar(
            self.folder, full, "--config", str(file), "--http", f"127.0.0.1:{port}"
        )
        self.status[full] = Http(port)

    def sidecar_metric(self, name: str, metric: str, **labels: str) -> float:
        return self.status[f"{name}-0"].metric(metric, **labels)

    def kill_sidecar(self, name: str) -> None:
        self.sidecars[f"{name}-0"].kill()

    def wait_ready(self, name: str) -> None:
        """Until the sidecar has its engine again."""

        def ready() -> bool:
            try:
                return self.status[f"{name}-0"].client.get("/readyz").status_code == 200
            except httpx.TransportError:
                return False

        wait_for(f"{name}'s sidecar", ready)

    def embed_prefill(self) -> None:
        """Restarts the prefill server with the agent in its worker, and no sidecar."""
        self.prefill.close()
        self.sidecars.pop("prefill-0").close()
        self.embedded = True
        self.prefill = self._server("prefill", "kv_producer", self.prefill_cores).wait()
        self.proxy.close()
        self.proxy = Proxy(self.folder, self.prefill, self.decode)

    def transfer_config(self, name: str) -> dict[str, Any]:
        if name == "prefill" and self.embedded:
            return {"kv_connector_extra_config": {"embedded": True}}
        socket = str(self.folder / f"{name}-{{rank}}.sock")
        return {"kv_connector_extra_config": {"socket": socket}}

    def close(self) -> None:
        super().close()
        for sidecar in self.sidecars.values():
            sidecar.close()


class NixlPair(Pair):
    """With vLLM's NixlConnector, helped a little; see tests/vllm_probe.py."""

    name = "Nixl"
    connector = "TimedNixlConnector"
    fetch_metric = "vllm:nixl_xfer_time_seconds_count"
    failure_metric = "vllm:nixl_num_failed_transfers_total"

    def transfer_config(self, name: str) -> dict[str, Any]:
        return {"kv_connector_extra_config": {"kv_lease_duration": self.lease_seconds}}


class StockNixlPair(NixlPair):
    """With NixlConnector as it is."""

    name = "Nixl, as it is"
    connector = "TimedStockNixlConnector"
