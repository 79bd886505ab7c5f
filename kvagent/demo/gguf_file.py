"""Reads a GGUF file: its metadata, and rows of its tensors as float32.

The `gguf` package knows the quantizations. Its own reader is not used, since it makes several
NumPy views for every token of the vocabulary and takes seconds where the header takes a moment.
Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md (version 2 and 3, little-endian).
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from kvagent.errors import ConfigError

_SCALARS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
_STRING, _ARRAY = 8, 9


@dataclass(frozen=True)
class GGUFTensor:
    """`shape` in NumPy's order, rows first; `offset` in bytes from the start of the file."""

    shape: tuple[int, ...]
    kind: GGMLQuantizationType
    offset: int


class GGUFFile:
    """An open file: `metadata` and `tensors` by name, and `rows` to read."""

    def __init__(self, path: Path) -> None:
        # As a plain array: slicing a memmap costs more than it shows, and there are many slices.
        self._data = np.asarray(np.memmap(path, dtype=np.uint8, mode="r"))
        try:
            self._read_header()
        except (struct.error, ValueError, KeyError) as error:
            raise ConfigError(f"{path} is not a GGUF file this engine can read: {error}") from error

    def _read_header(self) -> None:
        cursor = _Cursor(self._data.data)
        if cursor.take(4) != b"GGUF":
            raise ValueError("it does not begin with 'GGUF'")
        version = cursor.number("I")
        if version not in (2, 3):
            raise ValueError(f"version {version} (2 and 3 are known)")
        num_tensors, num_fields = cursor.number("Q"), cursor.number("Q")
        self.metadata: dict[str, Any] = {}
        for _ in range(num_fields):
            name = cursor.string()
            self.metadata[name] = cursor.value(cursor.number("I"))
        found = []
        for _ in range(num_tensors):
            name = cursor.string()
            shape = tuple(cursor.number("Q") for _ in range(cursor.number("I")))
            kind = GGMLQuantizationType(cursor.number("I"))
            found.append((name, shape[::-1], kind, cursor.number("Q")))
        alignment = self.metadata.get("general.alignment", 32)
        base = -(-cursor.position // alignment) * alignment
        self.tensors = {
            name: GGUFTensor(shape, kind, base + offset) for name, shape, kind, offset in found
        }

    def rows(self, name: str, start: int, stop: int) -> npt.NDArray[np.float32]:
        """Rows `start` to `stop` of a tensor, dequantized; a vector's rows are its elements."""
        tensor = self.tensors[name]
        block, block_bytes = GGML_QUANT_SIZES[tensor.kind]
        columns = tensor.shape[1] if len(tensor.shape) == 2 else 1
        row_bytes = columns // block * block_bytes
        raw = self._data[tensor.offset + start * row_bytes : tensor.offset + stop * row_bytes]
        values = dequantize(raw.reshape(stop - start, row_bytes), tensor.kind)
        if not values.flags.writeable:  # float32 in the file: still a view of it
            values = values.copy()
        return values.reshape(stop - start, *tensor.shape[1:])


class _Cursor:
    """Reads little-endian values one after the other."""

    def __init__(self, data: memoryview) -> None:
        self._data = data
        self.position = 0

    def take(self, nbytes: int) -> bytes:
        start, self.position = self.position, self.position + nbytes
        if self.position > len(self._data):
            raise ValueError("it ends in the middle of its header")
        return bytes(self._data[start : self.position])

    def number(self, code: str) -> Any:
        return struct.unpack("<" + code, self.take(struct.calcsize("<" + code)))[0]

    def string(self) -> str:
        return self.take(self.number("Q")).decode()

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY:
            return self.number(_SCALARS[kind])
        kind, length = self.number("I"), self.number("Q")
        if kind in (_STRING, _ARRAY):
            return [self.value(kind) for _ in range(length)]
        code = "<" + str(length) + _SCALARS[kind]
        return list(struct.unpack(code, self.take(struct.calcsize(code))))
