"""Random pairs of engines: every byte after a transfer is the one that the oracle expects."""

from __future__ import annotations

import asyncio

import msgspec
import numpy as np
import pytest
from hypothesis import event, given, settings
from oracle import (
    Case,
    Truth,
    build_side,
    cases,
    count_writes,
    merged_count,
    read_all,
    transfers,
    write,
)

from kvagent.core.layout import RankLayout
from kvagent.core.plan import assign, make_plan


@pytest.mark.timeout(900)
@settings(max_examples=max(200, settings.default.max_examples))
@given(cases())
def test_every_byte_is_right(case: Case) -> None:
    rng = np.random.default_rng(case.seed)
    local = build_side(case, case.local, rng)
    remote = build_side(case, case.remote, rng)
    common = {name: layer for name, layer in remote.names.items() if name in local.names}
    truth = Truth(case, common, rng)
    for rank in remote.ranks:
        write(remote, rank, truth, range(case.stop), rank.tensors)
    layouts = [
        msgspec.msgpack.decode(msgspec.msgpack.encode(rank.layout), type=RankLayout)
        for rank in remote.ranks
    ]
    for layout in layouts:
        layout.validate()
    moved_any = 0
    for rank in local.ranks:
        before = [memory.copy() for memory in rank.memory]
        written = [np.zeros(len(memory), dtype=np.uint8) for memory in rank.memory]
        reads = []
        for assignment in assign(rank.layout, layouts):
            plan = make_plan(rank.layout, layouts[assignment.remote], assignment)
            selection = plan.select(local.tables, remote.tables, case.start, case.stop)
            moved = transfers(plan, selection)
            assert selection.nbytes == sum(length for _, _, length in moved)
            assert selection.descriptors == merged_count(plan, selection)
            count_writes(moved, rank, remote.ranks[assignment.remote], written)
            reads.append((remote.ranks[assignment.remote], plan, selection))
            moved_any += len(moved)
        asyncio.run(read_all(rank, reads))
        assert max(int(count.max()) for count in written) <= 1, "a byte was read twice"
        after = [memory.copy() for memory in rank.memory]
        for copy, memory in zip(before, rank.memory, strict=True):
            memory[:] = copy
        # What may be written: all wanted tokens. What must be: those inside the windows too.
        write(local, rank, truth, range(case.start, case.stop), rank.tensors)
        allowed = [memory.copy() for memory in rank.memory]
        for copy, memory in zip(before, rank.memory, strict=True):
            memory[:] = copy
        for name, layer in common.items():
            if name not in rank.specs:
                continue
            only = Truth.__new__(Truth)
            only.values = {key: value for key, value in truth.values.items() if key[0] == name}
            oldest = max(case.stop - (layer.window or case.stop), case.start)
            write(local, rank, only, range(oldest, case.stop), rank.tensors)
        needed = rank.memory
        for i, memory in enumerate(after):
            must = needed[i] != before[i]
            assert (memory[must] == needed[i][must]).all()
            assert ((memory == before[i]) | (memory == allowed[i])).all()
            if not any(layer.window for layer in common.values()):
                assert (memory == allowed[i]).all()
    event(f"transfers: {'none' if not moved_any else 'some'}")
