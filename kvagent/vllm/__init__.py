"""`KVAgentConnector`: an out-of-tree KV connector for stock vLLM.

    --kv-transfer-config '{"kv_connector": "KVAgentConnector",
      "kv_connector_module_path": "kvagent.vllm", "kv_role": "kv_producer",
      "kv_load_failure_policy": "recompute",
      "kv_connector_extra_config": {"socket": "/run/kvagent/{rank}.sock"}}'

It imports vLLM and is imported by vLLM only; nothing else of kvagent imports it. vLLM's connector
interface changes between releases, so other releases than those it was written for are refused.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvagent.vllm.connector import KVAgentConnector

__all__ = ["KVAgentConnector"]

RELEASES = ("0.32", "0.33")


def __getattr__(name: str) -> Any:
    if name != "KVAgentConnector":
        raise AttributeError(f"module 'kvagent.vllm' has no attribute {name!r}")
    import vllm

    from kvagent.errors import ConfigError

    # Before the connector is imported, which needs names that other releases do not have.
    if ".".join(vllm.__version__.split(".")[:2]) not in RELEASES:
        raise ConfigError(
            f"this is vLLM {vllm.__version__}; kvagent's connector works with "
            f"{' and '.join(RELEASES)}, because vLLM's connector interface changes between releases"
        )
    from kvagent.vllm.connector import KVAgentConnector

    return KVAgentConnector
