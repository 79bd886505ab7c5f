"""kvagent: moves KV cache between the engines of disaggregated LLM serving.

These are the public names; everything else may change. They load on first use, so that
`import kvagent` costs nothing to a process that needs one of them.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvagent.client.embedded import EmbeddedAgent
    from kvagent.client.engine import EngineClient
    from kvagent.client.worker import WorkerClient
    from kvagent.core.aggregator import KVOutputAggregator
    from kvagent.core.output import KVConnectorOutput
    from kvagent.core.specs import (
        ConvPart,
        FullAttentionSpec,
        MambaSpec,
        MLASpec,
        ModelInfo,
        ScaleSpec,
        TokenShard,
        WorkerInfo,
    )
    from kvagent.core.topology import EngineTransferInfo, TransferTopology

__all__ = [
    "ConvPart",
    "EmbeddedAgent",
    "EngineClient",
    "EngineTransferInfo",
    "FullAttentionSpec",
    "KVConnectorOutput",
    "KVOutputAggregator",
    "MLASpec",
    "MambaSpec",
    "ModelInfo",
    "ScaleSpec",
    "TokenShard",
    "TransferTopology",
    "WorkerClient",
    "WorkerInfo",
]

_HOMES = {
    "EmbeddedAgent": "client.embedded",
    "EngineClient": "client.engine",
    "WorkerClient": "client.worker",
    "KVOutputAggregator": "core.aggregator",
    "KVConnectorOutput": "core.output",
    "EngineTransferInfo": "core.topology",
    "TransferTopology": "core.topology",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'kvagent' has no attribute {name!r}")
    return getattr(importlib.import_module(f"kvagent.{_HOMES.get(name, 'core.specs')}"), name)
