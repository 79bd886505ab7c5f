"""Which remote rank each head is read from: covered once, replicas spread."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from topologies import KvFirst, Latent, registered, topology

from kvagent.core.heads import ReadShare, read_shares
from kvagent.core.specs import rank_heads
from kvagent.errors import GeometryError, TopologyError


def test_shares_of_sizes_that_do_not_divide():
    """The example of the module's docstring."""
    assert read_shares(0, 2, 3, 8) == [(0, 0, 2), (1, 2, 4)]
    assert read_shares(1, 2, 3, 8) == [(1, 4, 5), (2, 5, 8)]


def test_shares_when_there_are_more_ranks_than_heads():
    assert read_shares(0, 1, 4, 2) == [(0, 0, 1), (2, 1, 2)]
    assert [read_shares(rank, 2, 8, 2) for rank in range(2)] == [[(0, 0, 1)], [(4, 1, 2)]]
    assert [read_shares(rank, 4, 8, 2)[0].rank for rank in range(4)] == [0, 2, 4, 6]
    assert [read_shares(rank, 16, 8, 8)[0].rank for rank in range(16)] == [
        r // 2 for r in range(16)
    ]


def test_shares_of_impossible_ranks_are_refused():
    for arguments in [(2, 2, 1, 8), (-1, 2, 1, 8), (0, 0, 1, 8), (0, 1, 1, 0)]:
        with pytest.raises(GeometryError):
            read_shares(*arguments)
    with pytest.raises(TopologyError):
        read_shares(0, 1, 0, 8)


def test_mla_reads_the_latent_once_and_spreads():
    def ranks(local: int, other: int) -> list[list[int]]:
        return [
            registered(
                other, tp_size=local, tp_rank=rank, is_mla=True, attn_backends=[Latent]
            ).read_ranks("there")
            for rank in range(local)
        ]

    assert ranks(2, 8) == [[0], [4]]
    assert ranks(4, 2) == [[0], [0], [1], [1]]
    assert ranks(3, 2) == [[0], [0], [1]]
    assert ranks(1, 1) == [[0]]
    assert topology(is_mla=True, attn_backends=[Latent]).read_shares(8) == [ReadShare(0, 0, 1)]


sizes = st.integers(1, 24)


@given(local=sizes, other=sizes, heads=st.integers(1, 40))
def test_every_head_is_read_exactly_once(local: int, other: int, heads: int):
    for rank in range(local):
        shares = topology(tp_size=local, tp_rank=rank, total_num_kv_heads=heads).read_shares(other)
        read = [head for share in shares for head in range(share.start, share.stop)]
        assert read == list(range(*rank_heads(rank, local, heads)))
        ranks = [share.rank for share in shares]
        assert ranks == sorted(set(ranks)), "a remote rank twice, or out of order"
        for share in shares:
            held_from, held_to = rank_heads(share.rank, other, heads)
            assert held_from <= share.start < share.stop <= held_to


@given(local=sizes, other=sizes, heads=st.integers(1, 40), mla=st.booleans())
def test_readers_spread_evenly_over_the_replicas(local: int, other: int, heads: int, mla: bool):
    seen = 1 if mla else heads
    assume(other >= seen)
    load: dict[int, Counter[int]] = {head: Counter() for head in range(seen)}
    for rank in range(local):
        here = topology(
            tp_size=local,
            tp_rank=rank,
            total_num_kv_heads=heads,
            is_mla=mla,
            attn_backends=[Latent if mla else KvFirst],
        )
        for share in here.read_shares(other):
            assert share.stop == share.start + 1
            load[share.start][share.rank] += 1
    for head, counts in load.items():
        holders = [r for r in range(other) if rank_heads(r, other, seen)[0] == head]
        assert set(counts) <= set(holders)
        loads = [counts[rank] for rank in holders]
        assert sum(loads) >= 1
        assert max(loads) - min(loads) <= 1


@given(
    small=st.integers(1, 8),
    factor=st.integers(1, 6),
    heads_factor=st.integers(1, 6),
    local_is_larger=st.booleans(),
    heads_divide=st.booleans(),
)
def test_even_sizes_read_from_ranks_that_they_shake_hands_with(
    small: int, factor: int, heads_factor: int, local_is_larger: bool, heads_divide: bool
):
    large = small * factor
    local, other = (large, small) if local_is_larger else (small, large)
    # All ranks' heads are equal: as many heads as there are ranks or a multiple, or a divisor.
    heads = large * heads_factor if heads_divide else small
    for rank in range(local):
        there = registered(other, tp_size=local, tp_rank=rank, total_num_kv_heads=heads)
        assert set(there.read_ranks("there")) <= set(there.target_remote_ranks("there"))
