"""Many ranks' reports in, one report for the scheduler out.

Requests are counted over calls (see `kvagent.core.tally` for the life of a request); stats,
metadata and cache events are combined within one call, by their own methods.

A count that never completes, because a rank died, is dropped without a word when it is too old.
It is not reported as failed: "finished" means that nothing writes to the blocks any more, and a
missing report is no proof of that. Whoever owns the request's deadline must say so.

No clock in here: ages are differences of the `now` that the caller passes, in seconds.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

from kvagent.core.output import Aggregatable, CacheEvents, KVConnectorOutput
from kvagent.core.tally import Tally
from kvagent.errors import AggregationError

__all__ = ["CountingConnector", "KVOutputAggregator", "WorkerOutput"]


class WorkerOutput(Protocol):
    """What a worker hands back for a step; `kv_connector_output` is None or like
    `KVConnectorOutput` (`failed_recving`, which classic outputs lack, may be missing)."""

    kv_connector_output: Any


class CountingConnector(Protocol):
    """The part of an engine's connector that `from_connector` asks."""

    def get_finished_count(self) -> int | None:
        """How many ranks report each request; None or 0: all of them."""


OutputT = TypeVar("OutputT", bound=WorkerOutput)


class KVOutputAggregator:
    """Combines the outputs of all ranks of one engine.

    `expected_finished_count`: how many different ranks must report a request; `world_size`: ranks
    of the engine, None when any number of outputs will do; `max_age`: seconds after which the
    memory of an unfinished, or of a finished, request is dropped.
    """

    def __init__(
        self,
        expected_finished_count: int,
        *,
        world_size: int | None = None,
        max_age: float = 600.0,
    ) -> None:
        if expected_finished_count < 1:
            raise AggregationError(
                f"expected_finished_count must be at least 1, not {expected_finished_count}"
            )
        self._expected = expected_finished_count
        self._world_size = world_size
        self._sending = Tally(max_age)
        self._recving = Tally(max_age)
        self._invalid_block_ids: set[int] = set()

    @classmethod
    def from_connector(cls, connector: CountingConnector, world_size: int) -> KVOutputAggregator:
        """Expects what the connector says, else a report from every rank."""
        return cls(connector.get_finished_count() or world_size, world_size=world_size)

    @property
    def num_counting(self) -> int:
        """Requests that some ranks have reported and others not yet, both directions together."""
        return len(self._sending.counts) + len(self._recving.counts)

    def aggregate(
        self,
        outputs: Sequence[OutputT | None],
        output_rank: int = 0,
        now: float | None = None,
    ) -> OutputT | None:
        """Count this step's reports and return the combined output, if there is one to put it on.

        `outputs` has one entry per rank, in order. The one at `output_rank` is returned, with its
        `kv_connector_output` replaced; what the other ranks passed is left as it was. When the
        entry at `output_rank` is None or falsy so is the result: None. What finished in such a
        step, and its invalid blocks, come with the next output; its stats, metadata and events
        are about a step without output and go nowhere.

        `now` lets what is too old be dropped; without it nothing ages.

        Raises `AggregationError`, before anything is counted, when `output_rank` or the number of
        outputs is out of range, another rank's output is missing, or values cannot be combined.
        """
        if not 0 <= output_rank < len(outputs):
            raise AggregationError(
                f"output_rank {output_rank} is not a rank of {len(outputs)} outputs"
            )
        if self._world_size is not None and len(outputs) > self._world_size:
            raise AggregationError(
                f"outputs of {len(outputs)} ranks, the engine has {self._world_size}"
            )
        output = outputs[output_rank]
        reports: list[tuple[int, Any]] = []
        for rank, worker_output in enumerate(outputs):
            if worker_output is None:
                if output:
                    raise AggregationError(f"rank {rank} gave no output, rank {output_rank} did")
            elif worker_output.kv_connector_output is not None:
                reports.append((rank, worker_output.kv_connector_output))

        if output:
            combined = _combine_values(reports, output_rank)
            self._count(reports)
            self._deliver(combined)
            output.kv_connector_output = combined
        else:
            self._count(reports)
            output = None
        if now is not None:
            self.sweep(now)
        return output

    def forget(self, request_id: str) -> None:
        """Drop all that is known of a request. Call it when an id ends without finishing, and
        before an id is used again; unknown ids are no error."""
        self._sending.forget(request_id)
        self._recving.forget(request_id)

    def sweep(self, now: float) -> set[str]:
        """Drop what is older than `max_age`; returns the requests that had not finished."""
        return self._sending.sweep(now) | self._recving.sweep(now)

    def _count(self, reports: Sequence[tuple[int, Any]]) -> None:
        for rank, report in reports:
            if report.expected_finished_count > 0:
                self._expected = report.expected_finished_count
            for request_id in report.finished_sending or ():
                self._sending.report(request_id, rank, self._expected)
            for request_id in report.finished_recving or ():
                self._recving.report(request_id, rank, self._expected)
            failed: dict[str, str] = getattr(report, "failed_recving", None) or {}
            for request_id, reason in failed.items():
                self._recving.fail(request_id, reason, self._expected)
            self._invalid_block_ids |= set(report.invalid_block_ids or ())

    def _deliver(self, combined: KVConnectorOutput) -> None:
        """Move what is complete into `combined`; it is done from here on."""
        received = self._recving.take()
        combined.finished_sending = set(self._sending.take()) or None
        combined.finished_recving = set(received) or None
        combined.failed_recving = {
            request_id: reason for request_id, reason in received.items() if reason is not None
        }
        combined.invalid_block_ids = self._invalid_block_ids
        combined.expected_finished_count = self._expected
        self._invalid_block_ids = set()


def _combine_values(reports: Sequence[tuple[int, Any]], output_rank: int) -> KVConnectorOutput:
    """A new output with the values that the ranks sent along, each combined into one."""
    # All are checked before any is changed.
    stats = _select(reports, "kv_connector_stats", Aggregatable)
    meta = _select(reports, "kv_connector_worker_meta", Aggregatable)
    events = _select(reports, "kv_cache_events", CacheEvents)
    return KVConnectorOutput(
        kv_connector_stats=_fold(stats, output_rank, _add_values),
        kv_connector_worker_meta=_fold(meta, output_rank, _add_values),
        kv_cache_events=_fold(events, output_rank, _add_events),
    )


def _select(reports: Sequence[tuple[int, Any]], name: str, protocol: type) -> list[tuple[int, Any]]:
    """`(rank, value)` of every rank that sent the value; raises when several cannot be combined."""
    values = [(rank, getattr(report, name)) for rank, report in reports if getattr(report, name)]
    if not values:
        return values
    first_rank, first = values[0]
    for rank, value in values[1:]:
        if not (isinstance(value, type(first)) or isinstance(first, type(value))):
            raise AggregationError(
                f"{name}: rank {first_rank} sent {type(first).__name__}, "
                f"rank {rank} sent {type(value).__name__}"
            )
        if not (isinstance(first, protocol) and isinstance(value, protocol)):
            raise AggregationError(
                f"{name}: several ranks sent {type(value).__name__}, "
                f"which lacks the methods of {protocol.__name__}"
            )
    return values


def _fold(
    values: Sequence[tuple[int, Any]], output_rank: int, add: Callable[[Any, Any], Any]
) -> Any:
    """All values as one, None when there are none."""
    if len(values) < 2:
        return values[0][1] if values else None
    rank, total = values[0]
    if rank != output_rank:
        total = copy.deepcopy(total)
    for _, value in values[1:]:
        total = add(total, value)
    return total


def _add_values(total: Any, value: Any) -> Any:
    # A copy, because a total may adopt parts of what it takes in and then add to those.
    return total.aggregate(copy.deepcopy(value))


def _add_events(total: Any, value: Any) -> Any:
    total.add_events(list(value.get_all_events()))
    total.increment_workers(1)
    return total
