"""What a worker, and in the end the scheduler, hears about finished transfers.

One `KVConnectorOutput` is either one rank's report or, after `KVOutputAggregator`, the report of
the whole engine. It says nothing of transfers that are still under way. The three fields typed
`Any` belong to the engine: they are carried, and combined through the two protocols below, never
looked into.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import msgspec

__all__ = ["Aggregatable", "CacheEvents", "KVConnectorOutput"]


@runtime_checkable
class Aggregatable(Protocol):
    """What `kv_connector_stats` and `kv_connector_worker_meta` must offer to be combined."""

    def aggregate(self, other: Any, /) -> Any:
        """Both as one; may change and return `self`, leaves `other` alone."""


@runtime_checkable
class CacheEvents(Protocol):
    """What `kv_cache_events` must offer to be combined."""

    def get_all_events(self) -> Sequence[Any]: ...

    def add_events(self, events: Any, /) -> None: ...

    def increment_workers(self, count: int, /) -> None: ...


class KVConnectorOutput(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Everything that finished since the previous output.

    It goes over the wire as msgpack; the `Any` fields come back as plain data (dicts, lists,
    numbers, strings), whatever they were.
    """

    finished_sending: set[str] | None = None
    """Requests whose blocks have been read, or need no longer be held; None when there are none."""
    finished_recving: set[str] | None = None
    """Requests whose fetch has reached its end, failed ones included; None when there are none."""
    failed_recving: dict[str, str] = msgspec.field(default_factory=dict)
    """Those of `finished_recving` that failed: request id -> reason."""
    invalid_block_ids: set[int] = msgspec.field(default_factory=set)
    """Blocks of this engine whose contents must not be used."""
    kv_connector_stats: Any = None
    """`Aggregatable` when more than one rank sends some."""
    kv_cache_events: Any = None
    """`CacheEvents` when more than one rank sends some."""
    kv_connector_worker_meta: Any = None
    """`Aggregatable` when more than one rank sends some."""
    expected_finished_count: int = 0
    """From a rank: how many ranks must report each request first seen from now on, 0 for no
    change. In the combined output: the number now in force."""

    def is_empty(self) -> bool:
        """Whether nothing is reported. `expected_finished_count` is a setting, not a report."""
        return not (
            self.finished_sending
            or self.finished_recving
            or self.failed_recving
            or self.invalid_block_ids
            or self.kv_connector_stats
            or self.kv_cache_events
            or self.kv_connector_worker_meta
        )
