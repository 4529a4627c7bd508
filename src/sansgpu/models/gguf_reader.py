"""Reads GGUF files (github.com/ggml-org/ggml/blob/master/docs/gguf.md).

Every count, length and offset is checked against the size of the file before it is used, because gguf's own reader
loops and allocates as often as a damaged file says.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Encoding
from gguf import GGUFValueType as Kind

MOST_VALUES = (
    1 << 23
)  # metadata values, array elements and tensors; vocabularies of 262,144 tokens need about 1.5 million
MOST_TEXT_BYTES = 1 << 28  # of one text; a tokenizer.json has up to 35 MB
MOST_DIMENSIONS = 8
VERSIONS = (2, 3)

_NUMBERS = {
    Kind.UINT8: "u1",
    Kind.INT8: "i1",
    Kind.UINT16: "u2",
    Kind.INT16: "i2",
    Kind.UINT32: "u4",
    Kind.INT32: "i4",
    Kind.FLOAT32: "f4",
    Kind.UINT64: "u8",
    Kind.INT64: "i8",
    Kind.FLOAT64: "f8",
    Kind.BOOL: "?",
}
_TENSORS = {
    Encoding.F16: "f2",
    Encoding.F32: "f4",
    Encoding.F64: "f8",
    Encoding.I8: "i1",
    Encoding.I16: "i2",
    Encoding.I32: "i4",
    Encoding.I64: "i8",
}


class GGUFTensor(NamedTuple):
    """A tensor of a file. `data` is mapped from the disk, in bytes where the encoding is not one of numpy's types."""

    shape: tuple[int, ...]  # in elements, slowest dimension first
    tensor_type: Encoding
    data: np.ndarray


def read_gguf(path: Path) -> tuple[dict[str, Any], dict[str, GGUFTensor]]:
    """Returns the metadata and the tensors of a file. Raises ValueError if the file is damaged."""
    return _Reader(np.memmap(path, np.uint8, "r")).read()


class _Reader:
    """Walks through a file's bytes."""

    def __init__(self, content: np.ndarray) -> None:
        self._content, self._offset, self._order, self._values = content, 4, "<", 0

    def read(self) -> tuple[dict[str, Any], dict[str, GGUFTensor]]:
        version = int(self._number("u4"))
        if version & 0xFFFF == 0:  # written on a machine of the other byte order
            version, self._order = version >> 24, ">"
        if version not in VERSIONS:
            raise ValueError(f"version {version} is not known")
        tensors, pairs = int(self._number("u8")), int(self._number("u8"))
        self._count(tensors + pairs)
        metadata: dict[str, Any] = {}
        for _ in range(pairs):
            name = self._text()
            if name in metadata:
                raise ValueError(f"the key {name[:80]!r} is given twice")
            metadata[name] = self._value(Kind(self._number("u4")))
        headers = [self._header() for _ in range(tensors)]
        alignment = metadata.get(gguf.Keys.General.ALIGNMENT, gguf.GGUF_DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
            raise ValueError("the alignment is no power of two")
        start = -(-self._offset // alignment) * alignment
        found: dict[str, GGUFTensor] = {}
        for name, dimensions, encoding, offset in headers:
            if name in found:
                raise ValueError(f"the tensor {name[:80]!r} is given twice")
            found[name] = self._tensor(dimensions, encoding, start + offset)
        return metadata, found

    def _take(self, start: int, size: int) -> np.ndarray:
        if not 0 <= start <= start + size <= len(self._content):
            raise ValueError(f"it ends before byte {start + size:,}")
        return self._content[start : start + size]

    def _next(self, size: int) -> np.ndarray:
        taken = self._take(self._offset, size)
        self._offset += size
        return taken

    def _number(self, kind: str) -> Any:
        return self._numbers(kind, 1)[0]

    def _numbers(self, kind: str, count: int) -> list[Any]:
        dtype = np.dtype(self._order + kind)
        numbers: list[Any] = np.frombuffer(self._next(count * dtype.itemsize).tobytes(), dtype).tolist()
        return numbers

    def _text(self) -> str:
        size = self._number("u8")
        if size > MOST_TEXT_BYTES:
            raise ValueError(f"a text of {size:,} bytes is too long")
        return self._next(size).tobytes().decode()

    def _count(self, more: int) -> None:
        self._values += more
        if self._values > MOST_VALUES:
            raise ValueError(f"it has more than {MOST_VALUES:,} metadata values and tensors")

    def _value(self, kind: Kind) -> Any:
        if kind in _NUMBERS:
            return self._number(_NUMBERS[kind])
        if kind == Kind.STRING:
            return self._text()
        inner, count = Kind(self._number("u4")), self._number("u8")
        self._count(count)
        if inner in _NUMBERS:
            return self._numbers(_NUMBERS[inner], count)
        if inner == Kind.STRING:
            return [self._text() for _ in range(count)]
        raise ValueError("it has arrays of arrays, which no model needs")

    def _header(self) -> tuple[str, list[int], Encoding, int]:
        name, rank = self._text(), self._number("u4")
        if rank > MOST_DIMENSIONS:
            raise ValueError(f"the tensor {name[:80]!r} has {rank} dimensions")
        dimensions = self._numbers("u8", rank)
        return name, dimensions, Encoding(self._number("u4")), self._number("u8")

    def _tensor(self, dimensions: list[int], encoding: Encoding, start: int) -> GGUFTensor:
        shape = tuple(reversed(dimensions))
        block, size = gguf.GGML_QUANT_SIZES[encoding]
        count = 1
        for length in shape:
            count *= length
        content = self._take(start, count // block * size)
        if encoding in _TENSORS:
            data = content.view(np.dtype(self._order + _TENSORS[encoding])).reshape(shape)
        else:
            data = content.reshape(gguf.quant_shape_to_byte_shape(shape, encoding))
        return GGUFTensor(shape, encoding, data)
