"""TransferTopology: what it knows of engines, and the arithmetic of their sizes."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from topologies import KvFirst, Latent, registered, remote, topology

from kvagent.core.topology import EngineTransferInfo, TransferTopology
from kvagent.errors import KVAgentError, TopologyError, UnknownEngineError

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


# ---------------------------------------------------------------- construction


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
