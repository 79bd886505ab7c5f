"""Attention backends of the usual shapes, and topologies with defaults, for the tests here."""

from __future__ import annotations

from typing import Any

from kvagent.core.topology import EngineTransferInfo, TransferTopology


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
    """A Mamba hybrid's layout does not depend on its backend, which need not answer."""

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


def registered(remote_size: int, **fields: Any) -> TransferTopology:
    """A topology that knows the engine "there", of `remote_size` ranks."""
    result = topology(**fields)
    result.register_remote_engine("there", remote(remote_size))
    return result
