"""From vLLM's cache and model to what kvagent calls them: specs, tensors, fingerprint.

vLLM (since 0.32) views each layer's cache as `[block, head, token, content]`, where `content` is K
and V, or a latent vector. What lies inside one block and head is the attention backend's own
business (the CPU backend packs K for its instruction set), so kvagent moves whole blocks between
engines with the same backend, release and block size, which `fingerprint` says. Heads are not
mixed in any layout, so the engines' TP sizes may differ.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch
import vllm
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    MLAAttentionSpec,
    UniformTypeKVCacheSpecs,
)

from kvagent.core.specs import CacheSpec, MLASpec, ModelInfo, WorkerInfo, rank_heads
from kvagent.core.specs import FullAttentionSpec as OurFullAttentionSpec
from kvagent.errors import UnsupportedGeometry

Tensors = dict[str, torch.Tensor]


def block_size(kv_cache_config: KVCacheConfig) -> int:
    """Tokens of one block id, which is the unit that is moved."""
    return int(_group(kv_cache_config).kv_cache_spec.block_size)


def describe(
    vllm_config: Any,
    kv_cache_config: KVCacheConfig,
    kv_caches: Mapping[str, torch.Tensor],
    info: WorkerInfo,
) -> tuple[Tensors, dict[str, CacheSpec]]:
    """The tensors and specs of this rank's layers, by vLLM's layer names.

    Raises `UnsupportedGeometry` for caches that the connector cannot hand over.
    """
    group = _group(kv_cache_config)
    num_heads = vllm_config.model_config.get_total_num_kv_heads()
    tensors: Tensors = {}
    specs: dict[str, CacheSpec] = {}
    for layer in group.layer_names:
        spec = group.kv_cache_spec
        if isinstance(spec, UniformTypeKVCacheSpecs):
            spec = spec.kv_cache_specs[layer]
        _check(layer, spec)
        cache = kv_caches[layer]
        dtype = str(cache.dtype).removeprefix("torch.")
        kernel_block = None if cache.shape[2] == spec.block_size else int(cache.shape[2])
        scale_mode = "" if spec.kv_quant_mode.value == 0 else spec.kv_quant_mode.name
        if isinstance(spec, MLAAttentionSpec):
            tensors[layer] = cache.select(1, 0)
            specs[layer] = MLASpec(
                block_size=spec.block_size,
                head_size=int(cache.shape[3]),
                dtype=dtype,
                axes=("block", "token", "channel"),
                kernel_block_size=kernel_block,
                scale_mode=scale_mode,
            )
            continue
        first, end = rank_heads(info.tp_rank, info.tp_size, num_heads)
        if end - first != cache.shape[1]:
            raise UnsupportedGeometry(
                f"{layer}: {cache.shape[1]} heads here; {end - first} are this rank's share of "
                f"the model's {num_heads}"
            )
        tensors[layer] = cache.view(*cache.shape[:3], 2, spec.head_size)
        specs[layer] = OurFullAttentionSpec(
            block_size=spec.block_size,
            num_kv_heads=num_heads,
            head_size=spec.head_size,
            dtype=dtype,
            axes=("block", "head", "token", "kv", "channel"),
            kernel_block_size=kernel_block,
            scale_mode=scale_mode,
        )
    return tensors, specs


def fingerprint(vllm_config: Any, kv_cache_config: KVCacheConfig) -> ModelInfo:
    """What must be equal on both sides besides the layers' specs.

    The model goes by its served name: paths may differ between hosts, and a router sends one
    request to both.
    """
    model = vllm_config.model_config
    served = model.served_model_name
    text = model.hf_text_config
    rope = getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None) or {}
    layers = vllm_config.compilation_config.static_forward_context
    layer = layers[_group(kv_cache_config).layer_names[0]]
    words = (
        layer.get_attn_backend().get_name(),
        getattr(layer, "isa", ""),  # how the CPU backend packs a block
        f"blocks of {block_size(kv_cache_config)}",
        f"vLLM {vllm.__version__}",
    )
    return ModelInfo(
        name=served if isinstance(served, str) else served[0],
        revision=model.revision or "",
        dtype=str(model.dtype).removeprefix("torch."),
        num_layers=text.num_hidden_layers,
        quantization=model.quantization or "",
        rope=json.dumps(rope, sort_keys=True, default=str),
        attention=", ".join(word for word in words if word),
    )


def _group(kv_cache_config: KVCacheConfig) -> Any:
    groups = kv_cache_config.kv_cache_groups
    if len(groups) != 1:
        raise UnsupportedGeometry(
            f"the model's cache has {len(groups)} groups; kvagent's connector serves models with "
            "one. Sliding windows: start vLLM with --disable-hybrid-kv-cache-manager"
        )
    return groups[0]


def _check(layer: str, spec: Any) -> None:
    if type(spec) not in (FullAttentionSpec, MLAAttentionSpec):
        raise UnsupportedGeometry(f"{layer}: a {type(spec).__name__} cannot be handed over yet")
    for name, plain in (("tokens_per_state", 1), ("num_head_slots", None)):
        if getattr(spec, name) != plain:
            raise UnsupportedGeometry(f"{layer}: {name} is {getattr(spec, name)}: unknown layout")
    if type(spec) is FullAttentionSpec and spec.state_content_bytes is not None:
        raise UnsupportedGeometry(f"{layer}: K and V share their bytes with something else")
    if type(spec) is FullAttentionSpec and spec.head_size_v != spec.head_size:
        raise UnsupportedGeometry(
            f"{layer}: K has {spec.head_size} channels and V {spec.head_size_v}"
        )
