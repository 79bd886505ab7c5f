"""A worker's cache memory as data: ranges, regions, strides and shards. This is what travels.

A **region** is one part (`k`, `v`, `latent`, `conv.x`, `ssm`, `k_scale`, ...) of one layer: a box
of elements in one memory range, given by an offset and by axes with an extent and a byte stride
each. K and V of one tensor are two regions whose offsets differ by the `kv` stride, so every
layout (K/V first, blocks first, NHD, HND, packed, cross-layer, padded) is nothing but strides.
Regions that differ only by layer and offset form a **family**, which keeps a `RankLayout` at a few
kilobytes for 80 layers.

A layout that arrives from a peer is only well typed; `RankLayout.validate` must accept it before
anything is computed from it. How a layout is made from specs and tensors: `layout`.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from kvagent.core.overlap import Box, find_overlap
from kvagent.core.shards import check_token_shard
from kvagent.core.specs import MAX_EXTENT, TokenShard, itemsize
from kvagent.errors import GeometryError

__all__ = ["Axis", "CacheGroup", "Family", "MemoryRange", "RankLayout", "TensorView"]

MAX_ADDRESS = (1 << 63) - 1
MAX_LAYERS = 4096
MAX_REGIONS = 1 << 14
MAX_RANGES = 4096
MAX_NAME = 256

Name = Annotated[str, msgspec.Meta(max_length=MAX_NAME)]


class MemoryRange(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """`nbytes` bytes of registered memory at a virtual address of the process that reads it."""

    address: int
    nbytes: int
    kind: Literal["dram", "vram"] = "dram"
    device: int = 0


class TensorView(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Where a tensor lies: index of its memory range, byte offset, shape, strides in BYTES."""

    memory: int
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


class Axis(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One dimension of a region: `extent` steps of `stride` bytes."""

    name: Name
    extent: int
    stride: int


class CacheGroup(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Layers that share block tables. `index` is the engine-wide number of the block list,
    `block_size` the tokens of one block id (0: a state, one block per request), `tokens` the
    shard of the context that this rank holds."""

    index: int
    block_size: int
    num_blocks: int
    tokens: TokenShard = TokenShard()


class Family(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Regions of the same part and shape in many layers.

    axes: always `block`; `token` when values are per token; `head` when sharded; others in full.
    `block` counts physical blocks: `num_blocks` times the physical blocks of one block id.
    block_tokens: tokens of one physical block; 0 for states.
    heads: `(h0, h1, H)`: the head axis holds heads `[h0, h1)` of `H`; `(0, 1, 1)` without one.
    window: tokens that are worth reading, counted from the last; 0: all.
    layers: indices into `RankLayout.layers`; memories, offsets: of each layer's region.
    """

    part: Name
    dtype: Name
    group: int
    axes: tuple[Axis, ...]
    block_tokens: int
    heads: tuple[int, int, int] = (0, 1, 1)
    window: int = 0
    layers: Annotated[tuple[int, ...], msgspec.Meta(max_length=MAX_LAYERS)]
    memories: Annotated[tuple[int, ...], msgspec.Meta(max_length=MAX_LAYERS)]
    offsets: Annotated[tuple[int, ...], msgspec.Meta(max_length=MAX_LAYERS)]

    def axis(self, name: str) -> Axis | None:
        """The axis of that name, or None."""
        return next((axis for axis in self.axes if axis.name == name), None)

    @property
    def block(self) -> Axis:
        axis = self.axis("block")
        if axis is None:
            raise GeometryError(f"part {self.part!r} has no block axis")
        return axis

    @property
    def itemsize(self) -> int:
        return itemsize(self.dtype)

    @property
    def extent(self) -> int:
        """Bytes from a region's first byte to its last."""
        return self.itemsize + sum((axis.extent - 1) * axis.stride for axis in self.axes)


class RankLayout(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything a peer must know about one rank's cache memory in order to read from it."""

    tp_rank: int = 0
    tp_size: int = 1
    pp_rank: int = 0
    pp_size: int = 1
    ranges: Annotated[tuple[MemoryRange, ...], msgspec.Meta(max_length=MAX_RANGES)]
    groups: Annotated[tuple[CacheGroup, ...], msgspec.Meta(max_length=64)]
    layers: Annotated[tuple[Name, ...], msgspec.Meta(max_length=MAX_LAYERS)]
    families: Annotated[tuple[Family, ...], msgspec.Meta(max_length=MAX_LAYERS)]

    @property
    def kind(self) -> Literal["dram", "vram"]:
        """`dram` or `vram`; one layout never mixes them."""
        return self.ranges[0].kind

    @property
    def device(self) -> int:
        return self.ranges[0].device

    def group(self, index: int) -> CacheGroup:
        """The group of that engine-wide index; `GeometryError` when this rank has no such."""
        for group in self.groups:
            if group.index == index:
                return group
        raise GeometryError(f"there is no cache group {index} here")

    def addresses(self, family: Family) -> list[int]:
        """The address of each of a family's regions, in the order of `family.layers`."""
        return [
            self.ranges[memory].address + offset
            for memory, offset in zip(family.memories, family.offsets, strict=True)
        ]

    def validate(self) -> None:
        """Raise `GeometryError` unless all of this is consistent, in bounds and free of overlap.

        After it, no arithmetic on this layout overflows 63 bits, every element of every region
        lies in its range, and no two elements of one cache group share a byte. (Regions of
        different groups may share memory: engines let groups draw from one pool of blocks.)
        """
        self._check_ranks_and_ranges()
        self._check_groups()
        if len(set(self.layers)) != len(self.layers):
            raise GeometryError("a layer is named twice")
        seen: set[tuple[int, str]] = set()
        regions = 0
        for family in self.families:
            self._check_family(family)
            regions += len(family.layers)
            if regions > MAX_REGIONS:
                raise GeometryError(f"more than {MAX_REGIONS} regions")
            for layer in family.layers:
                if (layer, family.part) in seen:
                    raise GeometryError(
                        f"layer {self.layers[layer]!r} has two parts {family.part!r}"
                    )
                seen.add((layer, family.part))
        for group in self.groups:
            self._check_overlap(group)

    def _check_ranks_and_ranges(self) -> None:
        for name, rank, size in (
            ("tp", self.tp_rank, self.tp_size),
            ("pp", self.pp_rank, self.pp_size),
        ):
            if not (1 <= size <= 1 << 16 and 0 <= rank < size):
                raise GeometryError(f"{name} rank {rank} of {size} does not exist")
        if not self.ranges or not self.groups or not self.layers or not self.families:
            raise GeometryError("a layout needs a memory range, a group, a layer and a region")
        for memory in self.ranges:
            if not (
                memory.address > 0
                and memory.nbytes > 0
                and memory.address + memory.nbytes <= MAX_ADDRESS
                and 0 <= memory.device < 1 << 16
            ):
                raise GeometryError(f"impossible memory range {memory}")
        if len({(memory.kind, memory.device) for memory in self.ranges}) > 1:
            raise GeometryError("the memory of one rank must lie on one device")

    def _check_groups(self) -> None:
        if len({group.index for group in self.groups}) != len(self.groups):
            raise GeometryError("a cache group is described twice")
        for group in self.groups:
            if not (
                0 <= group.index < 64
                and 0 <= group.block_size < MAX_EXTENT
                and 1 <= group.num_blocks < MAX_EXTENT
            ):
                raise GeometryError(f"impossible cache group {group}")
            check_token_shard(group.tokens)
            if group.tokens.size > 1 and group.block_size % group.tokens.interleave:
                raise GeometryError(f"blocks of group {group.index} cut its token shards: {group}")

    def _check_family(self, family: Family) -> None:
        what = f"part {family.part!r} of group {family.group}"
        group = self.group(family.group)
        if not (0 < len(family.layers) == len(family.memories) == len(family.offsets)):
            raise GeometryError(f"{what}: layers, memories and offsets differ in number")
        if len({axis.name for axis in family.axes}) != len(family.axes) or len(family.axes) > 8:
            raise GeometryError(f"{what}: axes are named twice, or too many")
        for axis in family.axes:
            if not (1 <= axis.extent < MAX_EXTENT and 0 <= axis.stride <= MAX_ADDRESS):
                raise GeometryError(f"{what}: impossible axis {axis}")
        span = family.itemsize
        for axis in sorted(family.axes, key=lambda axis: (axis.stride, axis.extent)):
            if axis.extent > 1:
                if axis.stride < span:
                    raise GeometryError(f"{what}: axis {axis.name!r} overlaps itself: {axis}")
                span += (axis.extent - 1) * axis.stride
            if span > MAX_ADDRESS:
                raise GeometryError(f"{what}: spans more than the address space")
        blocks = family.block.extent
        if blocks % group.num_blocks:
            raise GeometryError(f"{what}: {blocks} blocks are no multiple of {group.num_blocks}")
        if family.block_tokens * (blocks // group.num_blocks) != group.block_size:
            raise GeometryError(
                f"{what}: {blocks // group.num_blocks} physical blocks of {family.block_tokens} "
                f"tokens do not make a block of {group.block_size}"
            )
        token = family.axis("token")
        if token is not None and token.extent != family.block_tokens:
            raise GeometryError(f"{what}: {token} is not a block of {family.block_tokens} tokens")
        h0, h1, total = family.heads
        head = family.axis("head")
        held = head.extent if head else 1
        if not 0 <= h0 < h1 <= total < MAX_EXTENT or held != h1 - h0:
            raise GeometryError(f"{what}: heads {family.heads} do not fit an axis of {held}")
        if not 0 <= family.window < MAX_EXTENT:
            raise GeometryError(f"{what}: impossible window {family.window}")
        for layer, memory, offset in zip(
            family.layers, family.memories, family.offsets, strict=True
        ):
            if not 0 <= layer < len(self.layers):
                raise GeometryError(f"{what}: there is no layer {layer}")
            if not 0 <= memory < len(self.ranges):
                raise GeometryError(f"{what}: there is no memory range {memory}")
            if offset < 0 or offset + span > self.ranges[memory].nbytes:
                raise GeometryError(
                    f"{what}, layer {self.layers[layer]!r}: bytes [{offset}, {offset + span}) lie "
                    f"outside its range of {self.ranges[memory].nbytes} bytes"
                )

    def _check_overlap(self, group: CacheGroup) -> None:
        boxes: list[Box] = []
        names: list[str] = []
        for family in self.families:
            if family.group != group.index:
                continue
            axes = tuple((axis.stride, axis.extent) for axis in family.axes if axis.extent > 1)
            for layer, address in zip(family.layers, self.addresses(family), strict=True):
                names.append(f"{self.layers[layer]}:{family.part}")
                boxes.append(Box(address, axes, family.itemsize, len(names) - 1))
        pair = find_overlap(boxes)
        if pair is not None:
            raise GeometryError(
                f"group {group.index}: {names[pair[0]]} and {names[pair[1]]} share bytes"
            )
