"""What the scheduler's half of the connector tells the workers' half, once a step.

The scheduler's half knows everything: it speaks with the sidecar. But vLLM takes the failures of
loads from its workers only, and the other ends too in steps that compute nothing, so they travel
there and come back with the step's output.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata


@dataclass
class Ended(KVConnectorMetadata):
    """Requests whose transfer has ended since the last step. All empty in most steps."""

    sent: set[str] = field(default_factory=set)
    """Nobody reads their blocks any more."""
    received: set[str] = field(default_factory=set)
    """Nothing writes into their blocks any more; the failed ones included."""
    failed: set[str] = field(default_factory=set)
    """What lies in their blocks is not to be used."""
