"""Bytes to messages and back, with a size cap before any byte is decoded.

msgpack through msgspec, strictly typed: an unknown field, a wrong type or a wrong tag is a
`ProtocolError`, never an exception of a library and never an object of a type we did not name.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any, Generic, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from kvagent.errors import BlockRangeError, GeometryError, ProtocolError

T = TypeVar("T")

MAX_BLOCKS = 1 << 20
"""Most block ids one transfer may name (16 M tokens at 16 tokens a block)."""


class Codec(Generic[T]):
    """Encodes and decodes one tagged union `types`, refusing more than `max_bytes` bytes."""

    def __init__(self, types: Any, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[T] = msgspec.msgpack.Decoder(types, strict=True)

    def encode(self, message: T) -> bytes:
        try:
            data = self._encoder.encode(message)
        except (UnicodeEncodeError, OverflowError, TypeError) as error:
            raise ProtocolError(f"{type(message).__name__} cannot be sent: {error}") from error
        if len(data) > self.max_bytes:
            raise ProtocolError(
                f"{type(message).__name__} takes {len(data)} bytes, the cap is {self.max_bytes}"
            )
        return data

    def decode(self, data: bytes | memoryview) -> T:
        if len(data) > self.max_bytes:
            raise ProtocolError(f"a message of {len(data)} bytes, the cap is {self.max_bytes}")
        try:
            return self._decoder.decode(data)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, GeometryError) as error:
            raise ProtocolError(f"not a message: {error}") from error


BlockIds = Sequence[int] | Sequence[Sequence[int]]
"""What an engine passes: a list of ints, or one list for each cache group."""


def pack_blocks(block_ids: BlockIds) -> tuple[bytes, ...]:
    """One little-endian int32 string per cache group; a flat list is group 0.

    Raises `BlockRangeError` for anything that is not a list of non-negative 31-bit ints.
    """
    groups: Sequence[Any] = (block_ids,)
    try:
        if len(block_ids) and not isinstance(block_ids[0], (int, np.integer)):
            groups = block_ids
        # array.array takes a list of ints faster than numpy does, and nothing but ints.
        packed = tuple([array("I", list(group)).tobytes() for group in groups])
    except (TypeError, ValueError, OverflowError, LookupError) as error:
        raise BlockRangeError(
            f"block ids must be ints from 0 to 2**31 - 1, or one list of them per group: {error}"
        ) from error
    for ids in packed:
        if len(ids) > 4 * MAX_BLOCKS:
            raise BlockRangeError(f"{len(ids) // 4} block ids, the cap is {MAX_BLOCKS}")
        if not ids[3::4].isascii():  # the highest bit of one is set
            raise BlockRangeError("block ids must be ints from 0 to 2**31 - 1")
    return packed


def unpack_blocks(packed: Sequence[bytes]) -> list[npt.NDArray[np.int32]]:
    """The int32 arrays of `pack_blocks`; raises `ProtocolError` when the bytes are not whole."""
    if any(len(group) % 4 or len(group) > 4 * MAX_BLOCKS for group in packed):
        raise ProtocolError("block ids are not whole int32 values, or too many")
    return [np.frombuffer(group, dtype="<i4").astype(np.int32, copy=False) for group in packed]
