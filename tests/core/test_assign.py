"""Who reads what from whom: complete, never twice, and spread over replicas."""

from __future__ import annotations

import re
from collections import Counter

import msgspec
import pytest
from rigs import engine, full, layout, worker

from kvagent.core.layout import RankLayout
from kvagent.core.plan import assign
from kvagent.core.specs import (
    CacheSpec,
    MambaSpec,
    MLASpec,
    ScaleSpec,
    TokenShard,
)
from kvagent.errors import UnsupportedGeometry

SIZES = [1, 2, 3, 4, 8]


@pytest.mark.parametrize("heads", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("remote_tp", SIZES)
@pytest.mark.parametrize("local_tp", SIZES)
def test_heads_are_covered_once(local_tp: int, remote_tp: int, heads: int) -> None:
    spec = full(num_kv_heads=heads)
    remotes = engine(spec, remote_tp)
    for local in engine(spec, local_tp):
        for index, family in enumerate(local.families):
            read: list[int] = []
            for assignment in assign(local, remotes):
                for box in assignment.boxes:
                    if box.local_family != index:
                        continue
                    theirs = remotes[assignment.remote].families[box.remote_family]
                    assert theirs.part == family.part
                    assert theirs.heads[0] <= box.heads[0] < box.heads[1] <= theirs.heads[1]
                    read += range(*box.heads)
            assert sorted(read) == list(range(*family.heads[:2]))


@pytest.mark.parametrize("local_tp", SIZES)
@pytest.mark.parametrize("remote_tp", SIZES)
def test_replicas_share_the_load_evenly(local_tp: int, remote_tp: int) -> None:
    spec = MLASpec(block_size=16, head_size=8)
    remotes = engine(spec, remote_tp)
    load: Counter[int] = Counter()
    for local in engine(spec, local_tp):
        (assignment,) = assign(local, remotes)
        load[assignment.remote] += 1
    assert len(load) == min(local_tp, remote_tp)
    assert max(load.values()) - min(load.values()) <= 1


def test_replicated_heads_share_the_load_evenly() -> None:
    """Two heads on eight ranks each side: each remote rank serves exactly one local rank."""
    remotes = engine(full(num_kv_heads=2), 8)
    load = Counter(
        assignment.remote
        for local in engine(full(num_kv_heads=2), 8)
        for assignment in assign(local, remotes)
    )
    assert load == Counter(range(8))


def stages(names: list[list[str]], tp_size: int = 1) -> list[RankLayout]:
    return [
        layout({name: full() for name in stage}, worker(rank, tp_size, i, len(names)))
        for i, stage in enumerate(names)
        for rank in range(tp_size)
    ]


def test_layers_match_by_name() -> None:
    remotes = stages([["a"], ["b", "c"], ["d", "remote draft"]])
    (local,) = stages([["d", "c", "b", "local draft", "a"]])
    found = {
        assignment.remote: {
            local.layers[local.families[box.local_family].layers[place]]
            for box in assignment.boxes
            for place in box.local_regions
        }
        for assignment in assign(local, remotes)
    }
    assert found == {0: {"a"}, 1: {"b", "c"}, 2: {"d"}}
    assert assign(stages([["x"], ["a"]])[0], remotes) == []


def sharded(size: int, interleave: int, tp: int = 1, only: int | None = None) -> list[RankLayout]:
    """A latent cache split over `size` ranks, `tp` replicas of each."""
    return [
        layout(
            MLASpec(
                block_size=16,
                head_size=8,
                tokens=TokenShard(
                    rank=rank % size if only is None else only, size=size, interleave=interleave
                ),
            ),
            worker(rank, size * tp),
        )
        for rank in range(size * tp)
    ]


def test_split_contexts() -> None:
    (whole,) = sharded(1, 1)
    assert [a.remote for a in assign(whole, sharded(4, 2))] == [0, 1, 2, 3]
    assert [a.remote for a in assign(sharded(4, 2)[2], [whole])] == [0]
    assert [a.remote for a in assign(sharded(4, 2)[1], sharded(4, 2))] == [1]
    assert [a.remote for a in assign(sharded(4, 1)[3], sharded(2, 1))] == [1]
    assert [a.remote for a in assign(sharded(2, 1)[1], sharded(4, 1))] == [1, 3]
    assert [a.remote for a in assign(sharded(2, 2)[1], sharded(2, 4))] == [0, 1]
    # Replicas of a shard are spread too.
    assert [a.remote for a in assign(sharded(2, 1, tp=2)[3], sharded(2, 1, tp=2))] == [3]
    with pytest.raises(UnsupportedGeometry, match="do not hold all tokens"):
        assign(whole, sharded(2, 1, only=0))


def test_missing_heads_are_named() -> None:
    remotes = [
        layout(full(heads=(0, 2)), worker(0, 2)),
        layout(full(heads=(3, 4)), worker(1, 2)),
    ]
    with pytest.raises(UnsupportedGeometry, match=re.escape("'layer.0', part 'k': no remote rank")):
        assign(layout(full()), remotes)
    with pytest.raises(UnsupportedGeometry, match=re.escape("heads [2, 3)")):
        assign(layout(full()), remotes)


def test_the_remote_engine_must_be_complete() -> None:
    local = layout(full())
    remotes = engine(full(), 4)
    with pytest.raises(UnsupportedGeometry, match="3 remote layouts of 3 different ranks"):
        assign(local, remotes[:3])
    with pytest.raises(UnsupportedGeometry, match="4 remote layouts of 3 different ranks"):
        assign(local, [*remotes[:3], remotes[0]])
    with pytest.raises(UnsupportedGeometry, match="disagree"):
        assign(local, [*remotes[:3], layout(full())])
    with pytest.raises(UnsupportedGeometry, match="no ranks"):
        assign(local, [])


@pytest.mark.parametrize(
    ("ours", "theirs", "message"),
    [
        (full(), full(dtype="bfloat16"), "dtype: local float16, remote bfloat16"),
        (full(), full(head_size=16), "'channel': 8}, remote {'channel': 16}"),
        (full(), full(num_kv_heads=8), "heads: local 4, remote 8"),
        (full(sliding_window=8), full(), "sliding window: local 8, remote 0"),
        (full(scales=ScaleSpec()), full(), "local parts ['k', 'k_scale', 'v', 'v_scale']"),
        (full(), MLASpec(block_size=16, head_size=8), "remote parts ['latent']"),
        (
            full(scales=ScaleSpec()),
            full(scales=ScaleSpec(axes=("kv", "block", "head"))),
            "token axis: local True, remote False",
        ),
        (
            full(scales=ScaleSpec(axes=("kv", "block"))),
            full(scales=ScaleSpec(axes=("kv", "block")), block_size=32),
            "block size of per-block values: local 16, remote 32",
        ),
        (
            MambaSpec(ssm_heads=2, ssm_shape=(3,)),
            MambaSpec(ssm_heads=2, ssm_shape=(4,)),
            "{'state0': 3}, remote {'state0': 4}",
        ),
    ],
)
def test_regions_that_cannot_correspond(ours: CacheSpec, theirs: CacheSpec, message: str) -> None:
    with pytest.raises(UnsupportedGeometry, match=re.escape(message)):
        assign(layout(ours), [layout(theirs)])


def test_a_state_is_not_tokens() -> None:
    local = layout(MambaSpec(ssm_heads=2))
    family = msgspec.structs.replace(local.families[0], block_tokens=4)
    group = msgspec.structs.replace(local.groups[0], block_size=4)
    remote = msgspec.structs.replace(local, families=(family,), groups=(group,))
    remote.validate()
    with pytest.raises(UnsupportedGeometry, match="is a state"):
        assign(local, [remote])
