"""TransferTopology: layouts told from backends, sizes, and who reads from whom."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from kvagent.core.heads import ReadShare, read_shares
from kvagent.core.specs import FullAttentionSpec, rank_heads
from kvagent.core.topology import EngineTransferInfo, TransferTopology, is_mamba_spec
from kvagent.errors import GeometryError, KVAgentError, TopologyError, UnknownEngineError


class KvFirst:
    """K and V in front, as FlashAttention's."""

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int, block_size: int, num_kv_heads: int, head_size: int
    ) -> tuple[int, ...]:
        return (2, num_blocks, block_size, num_kv_heads, head_size)


class BlocksFirst:
    """Blocks in front, as FlashInfer's; with an optional argument and an optional method."""

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_size: int,
        cache_dtype_str: str = "auto",
    ) -> tuple[int, ...]:
        return (num_blocks, 2, block_size, num_kv_heads, head_size)

    @staticmethod
    def get_kv_cache_stride_order(include_num_layers_dimension: bool = False) -> tuple[int, ...]:
        raise NotImplementedError


class Latent:
    """MLA's."""

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int, block_size: int, num_kv_heads: int, head_size: int
    ) -> tuple[int, ...]:
        return (num_blocks, block_size, head_size)


class Unaskable:
    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int, block_size: int, num_kv_heads: int, head_size: int
    ) -> tuple[int, ...]:
        raise NotImplementedError


def topology(**fields: Any) -> TransferTopology:
    defaults: dict[str, Any] = {
        "tp_rank": 0,
        "tp_size": 1,
        "block_size": 16,
        "engine_id": "here",
        "is_mla": False,
        "is_mamba": False,
        "total_num_kv_heads": 8,
        "attn_backends": [KvFirst],
    }
    return TransferTopology(**(defaults | fields))


def remote(tp_size: int = 1, **fields: Any) -> EngineTransferInfo:
    defaults: dict[str, Any] = {
        "remote_tp_size": tp_size,
        "remote_block_len": 4096,
        "remote_block_size": 16,
        "remote_physical_blocks_per_logical": 1,
    }
    return EngineTransferInfo(**(defaults | fields))


def registered(tp_size: int, **fields: Any) -> TransferTopology:
    result = topology(**fields)
    result.register_remote_engine("there", remote(tp_size))
    return result


full_attention = FullAttentionSpec(block_size=16, num_kv_heads=8, head_size=64, dtype="bfloat16")


class MambaSpec:
    """Another engine's class: known by its name."""


# ---------------------------------------------------------------- EngineTransferInfo


def test_info_is_frozen_and_survives_the_wire():
    info = remote(
        4,
        remote_pp_size=2,
        remote_total_num_kv_heads=8,
        remote_layers=(0, 30),
        remote_block_size=64,
    )
    with pytest.raises(AttributeError):
        info.remote_tp_size = 2  # type: ignore[misc]
    data = msgspec.msgpack.encode(info)
    assert msgspec.msgpack.decode(data, type=EngineTransferInfo) == info
    assert hash(info) == hash(
        remote(4, **{k: getattr(info, k) for k in info.__struct_fields__[1:]})
    )


def test_info_takes_its_four_classic_fields_in_order():
    assert EngineTransferInfo(2, 8192, 32, 1) == remote(
        2, remote_block_len=8192, remote_block_size=32
    )


@pytest.mark.parametrize(
    "change",
    [
        {"remote_tp_size": 0},
        {"remote_tp_size": "2"},
        {"remote_block_len": -1},
        {"remote_block_size": 0},
        {"remote_pp_size": 0},
        {"remote_physical_blocks_per_logical": 0},
        {"remote_total_num_kv_heads": 0},
        {"remote_layers": (0, -1)},
        {"surprise": 1},
    ],
    ids=str,
)
def test_info_that_cannot_be_is_refused_on_the_wire(change: dict[str, Any]):
    data = msgspec.msgpack.encode(msgspec.structs.asdict(remote(2)) | change)
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(data, type=EngineTransferInfo)


# ---------------------------------------------------------------- construction and layout


@pytest.mark.parametrize(
    "fields",
    [
        {"tp_rank": -1},
        {"tp_rank": 2, "tp_size": 2},
        {"tp_size": 0},
        {"block_size": 0},
        {"total_num_kv_heads": 0},
        {"attn_backends": []},
    ],
    ids=str,
)
def test_a_topology_that_cannot_be_is_refused(fields: dict[str, Any]):
    with pytest.raises(TopologyError):
        topology(**fields)


def test_fields_can_be_given_in_the_classic_order():
    positional = TransferTopology(1, 4, 16, "here", False, False, 8, [KvFirst], (2, 10, 16, 2, 64))
    assert (positional.tp_rank, positional.tp_size, positional.block_size) == (1, 4, 16)
    assert positional.local_physical_heads == 2


@pytest.mark.parametrize(
    ("tp_size", "heads", "expected"), [(1, 8, 8), (4, 8, 2), (8, 8, 1), (16, 8, 1), (3, 8, 2)]
)
def test_local_physical_heads(tp_size: int, heads: int, expected: int):
    assert topology(tp_size=tp_size, total_num_kv_heads=heads).local_physical_heads == expected


@pytest.mark.parametrize(
    ("backend", "mla", "blocks_first", "split"),
    [
        (KvFirst, False, False, True),
        (BlocksFirst, False, True, False),
        (Latent, True, False, False),
    ],
)
def test_layout_of_the_usual_backends(backend: Any, mla: bool, blocks_first: bool, split: bool):
    layout = topology(attn_backends=[backend], is_mla=mla)
    assert layout.is_kv_layout_blocks_first is blocks_first
    assert layout.split_k_and_v is split
    assert layout.cross_layers_blocks is False


def test_a_mamba_hybrid_is_blocks_first_whatever_its_backend_says():
    for backends in ([], [KvFirst], [Unaskable]):
        try:
            layout = topology(is_mamba=True, attn_backends=backends)
        except NotImplementedError:
            pytest.fail("a Mamba hybrid's backend need not answer")
        assert layout.is_kv_layout_blocks_first
        assert not layout.split_k_and_v


@pytest.mark.parametrize("backend", [KvFirst, BlocksFirst])
def test_cross_layer_tensors_have_one_dimension_more(backend: Any):
    one_layer = topology(attn_backends=[backend], tensor_shape=torch.Size((2, 10, 16, 8, 64)))
    assert not one_layer.cross_layers_blocks
    all_layers = topology(attn_backends=[backend], tensor_shape=(10, 30, 2, 16, 8, 64))
    assert all_layers.cross_layers_blocks
    assert not all_layers.split_k_and_v


def test_cross_layer_tensors_of_mla_and_mamba():
    assert topology(
        is_mla=True, attn_backends=[Latent], tensor_shape=(10, 30, 16, 576)
    ).cross_layers_blocks
    assert topology(is_mamba=True, tensor_shape=(10, 30, 2, 16, 8, 64)).cross_layers_blocks
    assert not topology(is_mamba=True, attn_backends=[], tensor_shape=(10, 30)).cross_layers_blocks


# ---------------------------------------------------------------- regions


def test_regions_k_and_v_apart():
    cache = torch.zeros(2, 10, 16, 8, 64)
    regions = list(topology().get_transfer_cache_regions(cache, full_attention))
    assert [region.data_ptr() for region in regions] == [cache[0].data_ptr(), cache[1].data_ptr()]


def test_regions_k_and_v_apart_in_two_tensors():
    key, value = torch.zeros(10, 16, 8, 64), torch.zeros(10, 16, 8, 64)
    regions = list(topology().get_transfer_cache_regions((key, value), full_attention))
    assert regions[0] is key
    assert regions[1] is value


@pytest.mark.parametrize(
    ("fields", "shape"),
    [
        ({"attn_backends": [BlocksFirst]}, (10, 2, 16, 8, 64)),
        ({"attn_backends": [Latent], "is_mla": True}, (10, 16, 576)),
        ({"tensor_shape": (10, 30, 2, 16, 8, 64)}, (10, 30, 2, 16, 8, 64)),
    ],
)
def test_regions_in_one(fields: dict[str, Any], shape: tuple[int, ...]):
    cache = torch.zeros(shape)
    regions = list(topology(**fields).get_transfer_cache_regions(cache, full_attention))
    assert len(regions) == 1
    assert regions[0] is cache


def test_regions_of_a_mamba_hybrid():
    hybrid = topology(is_mamba=True)
    conv, ssm = torch.zeros(10, 3, 64), torch.zeros(10, 4, 8, 8)
    (region,) = hybrid.get_transfer_cache_regions((conv, ssm), MambaSpec())
    assert region is conv

    kv_first = torch.arange(2 * 10 * 4).reshape(2, 10, 1, 1, 4)
    (region,) = hybrid.get_transfer_cache_regions(kv_first, full_attention)
    assert region.shape == (10, 2, 1, 1, 4)
    assert region.data_ptr() == kv_first.data_ptr()
    assert torch.equal(region[3, 1], kv_first[1, 3])

    blocks_first = torch.zeros(10, 2, 1, 1, 4)
    (region,) = hybrid.get_transfer_cache_regions(blocks_first, full_attention)
    assert region is blocks_first


def test_regions_of_caches_without_their_parts_are_refused():
    with pytest.raises(GeometryError, match="first dimension"):
        topology().get_transfer_cache_regions(torch.zeros(10, 16, 8, 64), full_attention)
    with pytest.raises(GeometryError, match="pair"):
        topology(is_mamba=True).get_transfer_cache_regions((torch.zeros(1),), MambaSpec())


def test_mamba_specs_are_known_by_name_or_kind():
    class Derived(MambaSpec):
        pass

    assert is_mamba_spec(MambaSpec())
    assert is_mamba_spec(Derived())
    assert is_mamba_spec(SimpleNamespace(kind="mamba"))
    assert not is_mamba_spec(SimpleNamespace(kind="full"))
    assert not is_mamba_spec(full_attention)
    assert not is_mamba_spec(None)


# ---------------------------------------------------------------- remote engines


def test_the_first_info_of_an_engine_is_kept():
    here = topology()
    first, second = remote(2), remote(4)
    assert here.register_remote_engine("there", first) is first
    assert here.register_remote_engine("there", second) is first
    assert here.get_engine_info("there") is first


def test_an_engine_can_come_back_as_another_one():
    here = topology()
    here.register_remote_engine("there", remote(2))
    here.unregister_remote_engine("there")
    with pytest.raises(UnknownEngineError):
        here.get_engine_info("there")
    here.unregister_remote_engine("there")
    assert here.register_remote_engine("there", remote(4)).remote_tp_size == 4


def test_the_own_id_is_refused():
    with pytest.raises(TopologyError, match="here"):
        topology().register_remote_engine("here", remote())


def test_another_number_of_heads_is_refused():
    with pytest.raises(TopologyError, match=r"4.*8"):
        topology().register_remote_engine("there", remote(remote_total_num_kv_heads=4))
    topology().register_remote_engine("there", remote(remote_total_num_kv_heads=8))
    latent = topology(is_mla=True, attn_backends=[Latent], total_num_kv_heads=1)
    latent.register_remote_engine("there", remote(remote_total_num_kv_heads=128))


@pytest.mark.parametrize(
    "method",
    [
        "get_engine_info",
        "is_kv_replicated",
        "replicates_kv_cache",
        "target_remote_ranks",
        "read_ranks",
        "describe",
    ],
)
@pytest.mark.parametrize("error", [UnknownEngineError, KeyError, KVAgentError])
def test_unknown_engines_are_named(method: str, error: type[Exception]):
    for mla in (False, True):
        with pytest.raises(error, match="nowhere"):
            getattr(topology(is_mla=mla), method)("nowhere")


def test_topologies_do_not_share_their_engines():
    registered(2)
    with pytest.raises(UnknownEngineError):
        topology().get_engine_info("there")


@pytest.mark.parametrize(
    ("remote_size", "heads", "mla", "replicated", "replicates"),
    [
        (4, 8, False, False, False),
        (8, 8, False, False, False),
        (16, 8, False, True, True),
        (1, 1, True, False, True),
        (2, 1, True, True, True),
    ],
)
def test_replication(remote_size: int, heads: int, mla: bool, replicated: bool, replicates: bool):
    there = registered(remote_size, total_num_kv_heads=heads, is_mla=mla)
    assert there.is_kv_replicated("there") is replicated
    assert there.replicates_kv_cache("there") is replicates
    here = topology(tp_size=remote_size, total_num_kv_heads=heads, is_mla=mla)
    assert here.local_replicates_kv_cache is replicates


# ---------------------------------------------------------------- sizes


@pytest.mark.parametrize(
    ("local", "other", "ratio"), [(4, 4, 1), (4, 2, 2), (8, 1, 8), (2, 4, -2), (1, 8, -8)]
)
def test_tp_ratio(local: int, other: int, ratio: int):
    assert topology(tp_size=local).tp_ratio(other) == ratio


@pytest.mark.parametrize(("local", "other"), [(4, 3), (3, 4), (6, 4)])
def test_tp_sizes_that_do_not_divide_are_both_named(local: int, other: int):
    for call in ("tp_ratio", "handshake_target_ranks"):
        with pytest.raises(TopologyError, match=f"{local}.*{other}"):
            getattr(topology(tp_size=local), call)(other)
    with pytest.raises(TopologyError, match=f"{local}.*{other}"):
        registered(other, tp_size=local).target_remote_ranks("there")


@pytest.mark.parametrize("size", [0, -2])
def test_remote_tp_sizes_below_one_are_refused(size: int):
    for call in ("tp_ratio", "handshake_target_ranks", "read_shares"):
        with pytest.raises(TopologyError, match=str(size)):
            getattr(topology(), call)(size)


@pytest.mark.parametrize(("local", "other", "ratio"), [(16, 16, 1), (64, 16, 4), (16, 1, 16)])
def test_block_size_ratio(local: int, other: int, ratio: int):
    assert topology(block_size=local).block_size_ratio(other) == ratio


@pytest.mark.parametrize(("local", "other"), [(16, 64), (48, 32), (16, 0), (16, -16)])
def test_block_sizes_that_do_not_divide_are_both_named(local: int, other: int):
    with pytest.raises(TopologyError, match=f"{local}.*{other}"):
        topology(block_size=local).block_size_ratio(other)


# ---------------------------------------------------------------- ranks


@pytest.mark.parametrize(
    ("local", "other", "targets"),
    [
        (4, 4, [[0], [1], [2], [3]]),
        (4, 2, [[0], [0], [1], [1]]),
        (4, 1, [[0], [0], [0], [0]]),
        (2, 4, [[0, 1], [2, 3]]),
        (1, 4, [[0, 1, 2, 3]]),
    ],
)
def test_handshake_target_ranks(local: int, other: int, targets: list[list[int]]):
    for rank, expected in enumerate(targets):
        there = registered(other, tp_size=local, tp_rank=rank)
        assert there.handshake_target_ranks(other) == expected
        assert there.target_remote_ranks("there") == expected


def test_shares_of_sizes_that_do_not_divide():
    """The example of the module's docstring."""
    assert read_shares(0, 2, 3, 8) == [(0, 0, 2), (1, 2, 4)]
    assert read_shares(1, 2, 3, 8) == [(1, 4, 5), (2, 5, 8)]


def test_shares_when_there_are_more_ranks_than_heads():
    assert [read_shares(0, 1, 4, 2)] == [[(0, 0, 1), (2, 1, 2)]]
    assert [read_shares(rank, 2, 8, 2) for rank in range(2)] == [[(0, 0, 1)], [(4, 1, 2)]]
    assert [read_shares(rank, 4, 8, 2)[0].rank for rank in range(4)] == [0, 2, 4, 6]
    assert [read_shares(rank, 16, 8, 8)[0].rank for rank in range(16)] == [
        r // 2 for r in range(16)
    ]


def test_shares_of_impossible_ranks_are_refused():
    for arguments in [(2, 2, 1, 8), (-1, 2, 1, 8), (0, 0, 1, 8), (0, 1, 0, 8), (0, 1, 1, 0)]:
        with pytest.raises(GeometryError):
            read_shares(*arguments)


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


# ---------------------------------------------------------------- describe


def test_describe_is_one_line_with_every_size():
    text = registered(2, tp_size=4, tp_rank=3).describe("there")
    assert text == (
        "TransferTopology(tp_ratio=2, num_kv_heads=8, local_tp=4, remote_tp=2, "
        "local_rank=3, remote_block_len=4096)"
    )
    assert "num_kv_heads=1," in registered(
        2, is_mla=True, attn_backends=[Latent], total_num_kv_heads=16
    ).describe("there")


def test_describe_copes_with_sizes_that_do_not_divide():
    assert "tp_ratio=3/2," in registered(2, tp_size=3).describe("there")
