"""TransferTopology: layouts told from backends, and the tensors to register."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from topologies import BlocksFirst, KvFirst, Latent, Unaskable, topology

from kvagent.core.specs import FullAttentionSpec
from kvagent.core.topology import is_mamba_spec
from kvagent.errors import GeometryError

full_attention = FullAttentionSpec(block_size=16, num_kv_heads=8, head_size=64, dtype="bfloat16")


class MambaSpec:
    """Another engine's class: known by its name."""


# ---------------------------------------------------------------- layout


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
        layout = topology(is_mamba=True, attn_backends=backends)
        assert layout.is_kv_layout_blocks_first
        assert not layout.split_k_and_v
        assert not layout.cross_layers_blocks


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
