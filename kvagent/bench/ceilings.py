"""Asks raw ranks (see `raw`) to move what a fetch of ours moves: the other columns of the table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import numpy as np

from kvagent.bench.questions import (
    BASE,
    NIXL_WAYS,
    Expose,
    Exposed,
    Lists,
    Place,
    Placed,
    Read,
    Sources,
    Timing,
    Way,
)
from kvagent.bench.shapes import Workload
from kvagent.bench.world import Side, World
from kvagent.core.layout import MemoryRange, RankLayout, allocate, build_layout
from kvagent.core.plan import assign, make_plan
from kvagent.core.specs import ModelInfo, WorkerInfo

__all__ = ["RawConsumer", "RawSide"]

T = TypeVar("T")


def layouts(workload: Workload, tp: int) -> list[tuple[RankLayout, int]]:
    """Every rank's layout at `BASE`, and its bytes."""
    found = []
    specs = workload.shape.specs(workload.block_size)
    for rank in range(tp):
        info = WorkerInfo(engine_id="e", tp_rank=rank, tp_size=tp, model=ModelInfo(name="m"))
        nbytes, views = allocate(specs, info, workload.num_blocks)
        memory = (MemoryRange(BASE, nbytes),)
        found.append((build_layout(specs, info, views, memory, workload.num_blocks), nbytes))
    return found


class RawSide:
    """The raw ranks of one side, with memory for a workload."""

    def __init__(
        self, world: World, side: Side, workload: Workload, tp: int, *, ordinary: bool
    ) -> None:
        """`ordinary`: for `nixl_ordinary`, which needs memory of its own."""
        self.layouts = layouts(workload, tp)
        self.helpers = world.raw_ranks(side, tp)
        places = [Place(nbytes, world.address(side), ordinary) for _, nbytes in self.layouts]
        self.placed = self._ask(places, Placed)

    def _ask(self, questions: Sequence[object], kind: type[T]) -> list[T]:
        for helper, question in zip(self.helpers, questions, strict=True):
            helper.tell(question)
        return [helper.answer(kind) for helper in self.helpers]

    def expose(self, way: Way) -> list[bytes]:
        """Every rank's metadata, for NIXL's ways; it holds until the next call."""
        if way not in NIXL_WAYS:
            way = ""
        exposed = self._ask([Expose(way)] * len(self.helpers), Exposed)
        return [each.metadata for each in exposed]


class RawConsumer(RawSide):
    def __init__(
        self, world: World, workload: Workload, sources: Sequence[Placed], *, ordinary: bool
    ) -> None:
        """`sources`: the producer's raw ranks. `nbytes` and `descriptors` are then those of the
        whole workload, each request posted in one piece."""
        super().__init__(world, "consumer", workload, workload.consumer_tp, ordinary=ordinary)
        remotes = [layout for layout, _ in layouts(workload, workload.producer_tp)]
        requests = workload.requests()
        self.nbytes = self.descriptors = 0
        self._readers: list[list[int]] = []
        questions = []
        for local, _ in self.layouts:
            lists = []
            assignments = assign(local, remotes)
            for assignment in assignments:
                plan = make_plan(local, remotes[assignment.remote], assignment)
                indices = []
                for request in requests:
                    near, far = (
                        [np.array(ids, np.int32) for ids in workload.block_ids(side)]
                        for side in (request.local, request.remote)
                    )
                    picked = plan.select(near, far, 0, request.tokens)
                    assert not len(picked.extra), "workloads are whole blocks"
                    indices.append((picked.local_index.tobytes(), picked.remote_index.tobytes()))
                    self.nbytes += picked.nbytes
                    self.descriptors += picked.descriptors
                rows = (plan.local_rows.tobytes(), plan.remote_rows.tobytes())
                lists.append(Lists(sources[assignment.remote], *rows, indices))
            self._readers.append([assignment.remote for assignment in assignments])
            questions.append(Sources(lists))
        self._ask(questions, bool)
        self._requests = len(requests)

    def read(self, way: Way, metadata: Sequence[bytes], depth: int = 0) -> float:
        """Seconds until the slowest rank is done; `depth` as in `raw.Read`, 0: all at once."""
        depth = depth or self._requests
        if way == "tcp":  # one stream, however many ranks there are
            return self.helpers[0].ask(Read(way, [], depth, self.nbytes), Timing).seconds
        questions = [
            Read(way, [metadata[i] for i in remotes], depth, self.nbytes)
            for remotes in self._readers
        ]
        return max(timing.seconds for timing in self._ask(questions, Timing))
