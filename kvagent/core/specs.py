"""What an engine says its KV cache is made of: cache kinds, dtypes, shards, scales.

A spec names the dimensions of a layer's cache tensors in order, and what the numbers mean for the
whole model; which part of it one worker holds follows from `WorkerInfo` or is given. Where the
tensors lie in memory is said elsewhere, in `layout`. Nothing is ever inferred from a shape.

Several tensors of one layer go by `tensor_name(layer, part)`: the layer's own name for the main
tensor, `layer:part` for the others (separate `k` and `v`, scales, Mamba's `conv` and `ssm`).

Specs check themselves when they are made and raise `GeometryError`.
"""

from __future__ import annotations

import math

import msgspec

from kvagent.errors import GeometryError

__all__ = [
    "CacheSpec",
    "ConvPart",
    "FullAttentionSpec",
    "MLASpec",
    "MambaSpec",
    "ModelInfo",
    "ScaleSpec",
    "TokenShard",
    "WorkerInfo",
    "itemsize",
    "rank_heads",
    "tensor_name",
]

ITEM_SIZES = {
    "float64": 8,
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float8_e4m3fn": 1,
    "float8_e4m3fnuz": 1,
    "float8_e5m2": 1,
    "float8_e5m2fnuz": 1,
    "float8_e8m0fnu": 1,
    "int32": 4,
    "int8": 1,
    "uint8": 1,
}
"""Bytes per element, by torch's name of the dtype. Packed 4-bit caches are declared as uint8."""

MAX_EXTENT = 1 << 31
"""No dimension of any cache is longer; it keeps every product of two extents in 64 bits."""


def itemsize(dtype: str) -> int:
    """Bytes of one element; raises `GeometryError` for a dtype that is not in `ITEM_SIZES`."""
    try:
        return ITEM_SIZES[dtype]
    except KeyError:
        raise GeometryError(f"unknown dtype {dtype!r}; known: {', '.join(ITEM_SIZES)}") from None


def rank_heads(tp_rank: int, tp_size: int, num_heads: int) -> tuple[int, int]:
    """The heads `[h0, h1)` of `num_heads` that a rank holds.

    Even shares when the size divides, shares that differ by one when it does not, and one head
    each, replicated, when there are more ranks than heads.
    """
    if tp_size < 1 or num_heads < 1 or not 0 <= tp_rank < tp_size:
        raise GeometryError(f"no rank {tp_rank} of {tp_size} with {num_heads} heads")
    start = tp_rank * num_heads // tp_size
    return start, max(start + 1, (tp_rank + 1) * num_heads // tp_size)


def tensor_name(layer: str, part: str = "") -> str:
    """The key of one tensor of a layer; `part` "" is the layer's main tensor."""
    return f"{layer}:{part}" if part else layer


def _positive(owner: object, **values: int | None) -> None:
    for name, value in values.items():
        if value is not None and not 1 <= value < MAX_EXTENT:
            raise GeometryError(
                f"{type(owner).__name__}.{name} is {value}; it must be from 1 to {MAX_EXTENT - 1}"
            )


def _check_axes(
    owner: object, axes: tuple[str, ...], required: set[str], allowed: set[str]
) -> None:
    if len(set(axes)) != len(axes) or not required <= set(axes) <= required | allowed:
        raise GeometryError(
            f"{type(owner).__name__}.axes is {axes}; it must name {sorted(required)} once each"
            + (f" and may name {sorted(allowed)}" if allowed else "")
        )


class TokenShard(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The tokens a rank holds when the context is split: token `t` when
    `(t // interleave) % size == rank`. The rank's blocks hold its own tokens densely, and the
    block size is a multiple of `interleave`, so one block id stands for `size * block_size`
    tokens of the request."""

    rank: int = 0
    size: int = 1
    interleave: int = 1

    def __post_init__(self) -> None:
        _positive(self, size=self.size, interleave=self.interleave)
        if not 0 <= self.rank < self.size:
            raise GeometryError(f"token shard {self.rank} of {self.size} does not exist")


class ScaleSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Quantization scales stored beside the cache, in a tensor of their own (part `scale`).

    `axes` are a subset of the cache's; `channel` is there when a head has `channels` scales.
    Without `kv` there are two tensors, `k_scale` and `v_scale`; without `head` a scale serves all
    heads of the model and is the same on every tensor-parallel rank.
    Without `token` there is one scale per block, and then both sides need equal block sizes.
    `mode` is what the values mean to the kernels; the sides must agree on it.
    """

    dtype: str = "float32"
    axes: tuple[str, ...] = ("kv", "block", "token", "head")
    channels: int = 1
    mode: str = ""

    def __post_init__(self) -> None:
        itemsize(self.dtype)
        _positive(self, channels=self.channels)
        _check_axes(self, self.axes, {"block"}, {"kv", "token", "head", "channel"})
        if self.channels > 1 and "channel" not in self.axes:
            raise GeometryError(f"ScaleSpec.axes has no `channel` for {self.channels} channels")


class FullAttentionSpec(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="full"
):
    """Keys and values of ordinary (MHA, GQA, MQA, sliding window) attention.

    block_size: tokens of one block id. kernel_block_size: tokens of one entry of the tensor's
    `block` axis when the kernel's blocks are smaller; block id `b` is then entries `b * n` to
    `b * n + n - 1`, with `n = block_size // kernel_block_size`.
    num_kv_heads: of the whole model. heads: `(h0, h1)` held here, when it does not follow from
    the rank. tokens: the shard held here, when the context is split over ranks.
    axes: dimensions in tensor order. K and V packed in the last dimension are
    `(..., "kv", "channel")` of the unflattened tensor. Without `kv` there are two tensors,
    `layer:k` and `layer:v`, and `head_size_v` may differ from `head_size`.
    sliding_window: `w` when a token sees itself and the `w - 1` before it. Only the blocks that
    hold the last `w` tokens are read; the entries of older blocks in a block list may be anything.
    scale_mode: how a quantized cache is scaled ("", "per_tensor", ...); scales: the tensor of
    scales, when they are stored per token or per block.
    group: the cache group, which is the index of the block list in `offer` and `fetch`.
    """

    block_size: int
    num_kv_heads: int
    head_size: int
    dtype: str = "bfloat16"
    axes: tuple[str, ...] = ("kv", "block", "token", "head", "channel")
    head_size_v: int | None = None
    sliding_window: int | None = None
    kernel_block_size: int | None = None
    heads: tuple[int, int] | None = None
    tokens: TokenShard = TokenShard()
    scale_mode: str = ""
    scales: ScaleSpec | None = None
    group: int = 0

    def __post_init__(self) -> None:
        _check_common(self)
        _positive(
            self,
            num_kv_heads=self.num_kv_heads,
            head_size=self.head_size,
            head_size_v=self.head_size_v,
            sliding_window=self.sliding_window,
        )
        _check_axes(self, self.axes, {"block", "token", "head", "channel"}, {"kv"})
        _check_heads(self, self.heads, self.num_kv_heads)
        if "kv" in self.axes and self.head_size_v not in (None, self.head_size):
            raise GeometryError(
                "head_size_v differs from head_size, so K and V cannot share one tensor with a "
                "`kv` axis; leave `kv` out and give two tensors"
            )


class MLASpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="mla"):
    """The latent cache of multi-head latent attention: one vector per token, the same on every
    tensor-parallel rank. `head_size` elements of `dtype` each; formats that mix dtypes in one
    token are declared as uint8. Other fields as in `FullAttentionSpec`."""

    block_size: int
    head_size: int
    dtype: str = "bfloat16"
    axes: tuple[str, ...] = ("block", "token", "channel")
    sliding_window: int | None = None
    kernel_block_size: int | None = None
    tokens: TokenShard = TokenShard()
    scale_mode: str = ""
    scales: ScaleSpec | None = None
    group: int = 0

    def __post_init__(self) -> None:
        _check_common(self)
        _positive(self, head_size=self.head_size, sliding_window=self.sliding_window)
        _check_axes(self, self.axes, {"block", "token", "channel"}, set())
        if self.scales and {"kv", "head"} & set(self.scales.axes):
            raise GeometryError("MLASpec.scales.axes: a latent cache has no `kv` and no `head`")


class ConvPart(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One part of a Mamba layer's convolution channels, sharded by itself.

    `units` of the whole model (heads, or groups) of `size` channels each are dealt to the ranks
    like heads: x has the SSM's heads, B and C have the groups, and so on. `held` is `(u0, u1)`
    when it does not follow from the rank.
    """

    name: str
    units: int
    size: int
    held: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        _positive(self, units=self.units, size=self.size)
        _check_heads(self, self.held, self.units)


class MambaSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="mamba"):
    """The state of a Mamba-like layer (Mamba 1 and 2, gated delta nets, short convolutions).

    Two tensors: `layer:conv` of axes `conv_axes`, whose channels are the concatenated `conv`
    parts and whose `width` is the kernel's length minus one, and `layer:ssm` of axes `block`,
    `head` and then the dimensions `ssm_shape` of one head's state. Either may be absent.

    There is no token axis: one block holds one request's state, and the block list of its group
    is exactly one id. The state is handed over whole, whatever `start_token` is.

    **The first N - 1 tokens.** A consumer that computes the last prompt token again (it has to,
    for the logits) must not feed it to this state twice. So for a prompt of N tokens the producer
    offers the state after N - 1 tokens, and the consumer continues with the last one.
    """

    conv: tuple[ConvPart, ...] = ()
    conv_width: int = 0
    conv_dtype: str = "bfloat16"
    conv_axes: tuple[str, ...] = ("block", "width", "channel")
    ssm_heads: int = 0
    ssm_shape: tuple[int, ...] = ()
    ssm_dtype: str = "float32"
    heads: tuple[int, int] | None = None
    group: int = 0

    def __post_init__(self) -> None:
        itemsize(self.conv_dtype)
        itemsize(self.ssm_dtype)
        _check_group(self, self.group)
        if not self.conv and not self.ssm_heads:
            raise GeometryError("MambaSpec has neither conv parts nor ssm_heads")
        if self.conv:
            _positive(self, conv_width=self.conv_width)
            _check_axes(self, self.conv_axes, {"block", "width", "channel"}, set())
            if len({part.name for part in self.conv}) != len(self.conv):
                raise GeometryError("MambaSpec.conv: two parts have one name")
        if self.ssm_heads:
            _positive(self, ssm_heads=self.ssm_heads)
            for extent in self.ssm_shape:
                _positive(self, ssm_shape=extent)
            if math.prod(self.ssm_shape) >= MAX_EXTENT:
                raise GeometryError(f"MambaSpec.ssm_shape {self.ssm_shape} is too large")
            _check_heads(self, self.heads, self.ssm_heads)


CacheSpec = FullAttentionSpec | MLASpec | MambaSpec


class ModelInfo(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The model's fingerprint: two engines exchange KV only when every field is equal.

    `quantization`, `rope` and `attention` are the engine's own words for whatever changes the
    values in the cache: weight quantization, position encoding and its scaling, attention variant.
    """

    name: str
    revision: str = ""
    dtype: str = "bfloat16"
    num_layers: int = 0
    quantization: str = ""
    rope: str = ""
    attention: str = ""


class WorkerInfo(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Who a worker is: its engine, its place in it, its model.

    `leader` is the control endpoint "host:port" of rank 0's sidecar; None for rank 0 itself.
    """

    engine_id: str
    model: ModelInfo
    tp_rank: int = 0
    tp_size: int = 1
    pp_rank: int = 0
    pp_size: int = 1
    leader: str | None = None

    def __post_init__(self) -> None:
        _positive(self, tp_size=self.tp_size, pp_size=self.pp_size)
        if not 0 < len(self.engine_id) <= 256:
            raise GeometryError("WorkerInfo.engine_id must have from 1 to 256 characters")
        if not (0 <= self.tp_rank < self.tp_size and 0 <= self.pp_rank < self.pp_size):
            raise GeometryError(
                f"rank (tp {self.tp_rank}, pp {self.pp_rank}) is outside "
                f"tp {self.tp_size} x pp {self.pp_size}"
            )


def _check_group(owner: object, group: int) -> None:
    if not 0 <= group < 64:
        raise GeometryError(f"{type(owner).__name__}.group is {group}; it must be from 0 to 63")


def _check_common(owner: FullAttentionSpec | MLASpec) -> None:
    block_size, kernel_block_size, tokens = owner.block_size, owner.kernel_block_size, owner.tokens
    itemsize(owner.dtype)
    _positive(owner, block_size=block_size, kernel_block_size=kernel_block_size)
    _check_group(owner, owner.group)
    if tokens.size > 1 and block_size % tokens.interleave:
        raise GeometryError(
            f"block_size {block_size} is not a multiple of tokens.interleave {tokens.interleave}"
        )
    if kernel_block_size is not None and block_size % kernel_block_size:
        raise GeometryError(
            f"block_size {block_size} is not a multiple of kernel_block_size {kernel_block_size}"
        )


def _check_heads(owner: object, heads: tuple[int, int] | None, num_heads: int) -> None:
    if heads is not None and not 0 <= heads[0] < heads[1] <= num_heads:
        raise GeometryError(
            f"{type(owner).__name__}: heads {heads} are not a range of {num_heads} heads"
        )
