"""Who reads from whom: ranks and sizes of two engines, and nothing about bytes.

`TransferTopology` knows one local rank and what the handshakes learned about remote engines.

There are two answers to "which remote ranks". `handshake_target_ranks` is the field's classic
arithmetic on the two sizes alone; it needs one size to divide the other, and for replicated heads
it names replicas too. `read_shares` intersects the head ranges: it takes any two sizes, covers
each head that the local rank holds exactly once, and picks one replica where there are several.

Which bytes lie behind a share is the business of the plan, which works from the registered
layouts. Mamba state has shard rules of its own and is not described by heads.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Protocol

import msgspec

from kvagent.core import heads
from kvagent.errors import GeometryError, TopologyError, UnknownEngineError

__all__ = ["AttentionBackend", "EngineTransferInfo", "TransferTopology", "is_mamba_spec"]

Positive = Annotated[int, msgspec.Meta(ge=1)]
NotNegative = Annotated[int, msgspec.Meta(ge=0)]


class AttentionBackend(Protocol):
    """The part of an engine's attention backend class that is asked for.

    A class may also have `get_kv_cache_stride_order(include_num_layers_dimension) -> tuple`, as
    engines' own classes do. It is not called: the order of a cache in memory is taken from the
    strides of the registered tensors.
    """

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int, block_size: int, num_kv_heads: int, head_size: int
    ) -> tuple[int, ...]:
        """Shape of one layer's cache tensor (K and V in one)."""


class EngineTransferInfo(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a handshake learned about one remote engine. Travels on the wire."""

    remote_tp_size: Positive
    remote_block_len: NotNegative
    """Bytes of one block of one region."""
    remote_block_size: Positive
    """Tokens per block."""
    remote_physical_blocks_per_logical: Positive
    """Blocks of the kernel for each block id of the scheduler."""
    remote_pp_size: Positive = 1
    remote_total_num_kv_heads: Positive | None = None
    """KV heads of the whole model, all ranks; None when the remote does not say."""
    remote_layers: tuple[NotNegative, NotNegative] | None = None
    """Global indices `(first, one past the last)`; None when the remote does not say."""


def is_mamba_spec(layer_spec: object) -> bool:
    """Whether a layer's spec, ours or another engine's, describes Mamba state.

    It does when its class, or a class it derives from, is named `MambaSpec`, or when it has an
    attribute `kind` with the value "mamba". By name, because an engine passes its own classes.
    """
    if getattr(layer_spec, "kind", None) == "mamba":
        return True
    return any(cls.__name__ == "MambaSpec" for cls in type(layer_spec).__mro__)


@dataclass
class TransferTopology:
    """One local rank, and the remote engines it may read from.

    Raises `TopologyError` when the ranks and sizes do not fit together.
    """

    tp_rank: int
    tp_size: int
    block_size: int
    """Tokens per block."""
    engine_id: str
    is_mla: bool
    is_mamba: bool
    """Whether the model has Mamba layers (a hybrid included)."""
    total_num_kv_heads: int
    """KV heads of the whole model, all ranks."""
    attn_backends: Sequence[type[AttentionBackend]]
    """The first one decides; may be empty for a Mamba model."""
    tensor_shape: Sequence[int] | None = None
    """Shape of one registered cache tensor."""

    local_physical_heads: int = field(init=False)
    """Heads that this rank holds when the ranks divide them evenly, and at least one."""
    is_kv_layout_blocks_first: bool = field(init=False)
    """Whether a block's K and V lie together, so that the block dimension comes first."""
    cross_layers_blocks: bool = field(init=False)
    """Whether one tensor holds all layers."""
    _engines: dict[str, EngineTransferInfo] = field(init=False, repr=False, default_factory=dict)

    def __post_init__(self) -> None:
        if not 0 <= self.tp_rank < self.tp_size:
            raise TopologyError(f"tp_rank {self.tp_rank} is not a rank of tp_size {self.tp_size}")
        if self.block_size < 1:
            raise TopologyError(f"block_size must be at least 1, not {self.block_size}")
        if self.total_num_kv_heads < 1:
            raise TopologyError(
                f"total_num_kv_heads must be at least 1, not {self.total_num_kv_heads}"
            )
        if not self.attn_backends and not self.is_mamba:
            raise TopologyError("attn_backends is empty: without one the layout is not known")

        self.local_physical_heads = max(1, self.total_num_kv_heads // self.tp_size)
        shape = self._backend_shape()
        # Engines lay out the attention caches of a Mamba hybrid blocks first whatever the backend
        # says, because attention and Mamba layers share the same blocks.
        self.is_kv_layout_blocks_first = self.is_mamba or (len(shape) == 5 and shape[0] == 1)
        self.cross_layers_blocks = (
            self.tensor_shape is not None
            and bool(shape)
            and len(self.tensor_shape) == len(shape) + 1
        )

    def _backend_shape(self) -> tuple[int, ...]:
        """The backend's shape for one block, so that a 1 in front can only be that dimension
        (K and V would be a 2). Empty where there is no backend, or nothing to tell from it."""
        if not self.attn_backends or (self.is_mamba and self.tensor_shape is None):
            return ()
        return tuple(
            self.attn_backends[0].get_kv_cache_shape(
                num_blocks=1, block_size=16, num_kv_heads=1, head_size=1
            )
        )

    # ---------------------------------------------------------------- remote engines

    def register_remote_engine(
        self, remote_engine_id: str, info: EngineTransferInfo
    ) -> EngineTransferInfo:
        """Store and return `info`; an engine that is known keeps, and returns, its first one.

        Raises `TopologyError` for the own id, and when the engines disagree on the model's heads.
        """
        if remote_engine_id == self.engine_id:
            raise TopologyError(f"engine {remote_engine_id!r} is this engine, not a remote one")
        total = info.remote_total_num_kv_heads
        if total is not None and total != self.total_num_kv_heads and not self.is_mla:
            raise TopologyError(
                f"engine {remote_engine_id!r} has {total} KV heads in all, "
                f"this engine has {self.total_num_kv_heads}"
            )
        return self._engines.setdefault(remote_engine_id, info)

    def unregister_remote_engine(self, remote_engine_id: str) -> None:
        """Forget an engine, so that it can come back as another one; unknown ids are no error."""
        self._engines.pop(remote_engine_id, None)

    def get_engine_info(self, remote_engine_id: str) -> EngineTransferInfo:
        """What is known of the engine; raises `UnknownEngineError`, which is a `KeyError` too."""
        try:
            return self._engines[remote_engine_id]
        except KeyError:
            raise UnknownEngineError(f"engine {remote_engine_id!r} is not registered") from None

    # ---------------------------------------------------------------- layout

    @property
    def split_k_and_v(self) -> bool:
        """Whether K and V are registered as separate regions."""
        return not (self.cross_layers_blocks or self.is_mla or self.is_kv_layout_blocks_first)

    def get_transfer_cache_regions(self, cache: Any, layer_spec: object) -> Iterable[Any]:
        """The tensors of one layer to register, in order.

        `cache` is the layer's tensor; with a Mamba spec the pair (conv, ssm), of which the first
        stands for both, because they share their blocks. Where K and V are separate regions the
        tensor itself is returned: going through its first dimension gives K, then V.

        Raises `GeometryError` when the cache has not the parts that its layout calls for.
        """
        if is_mamba_spec(layer_spec):
            if len(cache) != 2:
                raise GeometryError(f"a Mamba cache is a pair (conv, ssm), not {len(cache)} parts")
            return [cache[0]]
        if self.is_mamba and cache.shape[0] == 2:
            # K/V in front, but blocks outermost in memory: see `is_kv_layout_blocks_first`.
            cache = cache.swapaxes(0, 1)
        if not self.split_k_and_v:
            return [cache]
        if len(cache) != 2:
            raise GeometryError(
                f"a cache with K and V in its first dimension must have 2 there, not {len(cache)}"
            )
        parts: Iterable[Any] = cache
        return parts

    # ---------------------------------------------------------------- sizes

    def tp_ratio(self, remote_tp_size: int) -> int:
        """Local ranks per remote rank, or, when the remote is larger, minus the remote ranks per
        local rank. Raises `TopologyError` when neither size divides the other."""
        if remote_tp_size < 1:
            raise TopologyError(
                f"remote tensor parallel size must be at least 1, not {remote_tp_size} "
                f"(local {self.tp_size})"
            )
        if self.tp_size % remote_tp_size == 0:
            return self.tp_size // remote_tp_size
        if remote_tp_size % self.tp_size == 0:
            return -(remote_tp_size // self.tp_size)
        raise TopologyError(
            f"tensor parallel sizes do not divide: local {self.tp_size}, remote {remote_tp_size}"
        )

    def block_size_ratio(self, remote_block_size: int) -> int:
        """Remote blocks per local block; raises `TopologyError` when they do not divide."""
        if remote_block_size < 1 or self.block_size % remote_block_size:
            raise TopologyError(
                f"local block size {self.block_size} is not a multiple of "
                f"remote block size {remote_block_size}"
            )
        return self.block_size // remote_block_size

    def is_kv_replicated(self, remote_engine_id: str) -> bool:
        """Whether the remote has more ranks than heads, so that several hold the same head."""
        return self.get_engine_info(remote_engine_id).remote_tp_size > self.total_num_kv_heads

    def replicates_kv_cache(self, remote_engine_id: str) -> bool:
        """Whether several remote ranks hold the same bytes: MLA, or more ranks than heads."""
        return self.is_kv_replicated(remote_engine_id) or self.is_mla

    @property
    def local_replicates_kv_cache(self) -> bool:
        """Whether several local ranks hold the same bytes: MLA, or more ranks than heads."""
        return self.is_mla or self.tp_size > self.total_num_kv_heads

    # ---------------------------------------------------------------- ranks

    def handshake_target_ranks(self, remote_tp_size: int) -> list[int]:
        """The remote ranks opposite this one; raises `TopologyError` as `tp_ratio` does."""
        ratio = self.tp_ratio(remote_tp_size)
        if ratio > 0:
            return [self.tp_rank // ratio]
        return list(range(self.tp_rank * -ratio, (self.tp_rank + 1) * -ratio))

    def target_remote_ranks(self, remote_engine_id: str) -> list[int]:
        """`handshake_target_ranks` for a registered engine."""
        return self.handshake_target_ranks(self.get_engine_info(remote_engine_id).remote_tp_size)

    def read_shares(self, remote_tp_size: int) -> list[heads.ReadShare]:
        """`heads.read_shares` for this rank and any remote size.

        MLA's latent counts as one head, 0, that every rank holds.
        """
        num_heads = 1 if self.is_mla else self.total_num_kv_heads
        return heads.read_shares(self.tp_rank, self.tp_size, remote_tp_size, num_heads)

    def read_ranks(self, remote_engine_id: str) -> list[int]:
        """The ranks of a registered engine that this rank reads from, ascending."""
        info = self.get_engine_info(remote_engine_id)
        return [share.rank for share in self.read_shares(info.remote_tp_size)]

    def describe(self, remote_engine_id: str) -> str:
        """One line for the log."""
        info = self.get_engine_info(remote_engine_id)
        try:
            ratio = str(self.tp_ratio(info.remote_tp_size))
        except TopologyError:  # the plan copes with such sizes, and so must the log
            ratio = f"{self.tp_size}/{info.remote_tp_size}"
        return (
            f"TransferTopology(tp_ratio={ratio}, "
            f"num_kv_heads={1 if self.is_mla else self.total_num_kv_heads}, "
            f"local_tp={self.tp_size}, remote_tp={info.remote_tp_size}, "
            f"local_rank={self.tp_rank}, remote_block_len={info.remote_block_len})"
        )
