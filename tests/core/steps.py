"""Workers' outputs of a step, for the tests of the aggregator."""

from __future__ import annotations

from typing import Any

from kvagent.core.aggregator import KVOutputAggregator
from kvagent.core.output import KVConnectorOutput


class Step:
    """A worker's output of one step; no fields: it has no `kv_connector_output`."""

    def __init__(self, **fields: Any) -> None:
        self.kv_connector_output: Any = KVConnectorOutput(**fields) if fields else None


def combined(aggregator: KVOutputAggregator, *steps: Any, **options: Any) -> Any:
    """The `kv_connector_output` that comes of one step of all ranks."""
    result = aggregator.aggregate(steps, **options)
    assert result is not None
    return result.kv_connector_output


def sent(*ids: str) -> Step:
    return Step(finished_sending=set(ids))


def received(*ids: str, **failed: str) -> Step:
    return Step(finished_recving={*ids, *failed}, failed_recving=failed)
