"""Parses GGUF files (github.com/ggml-org/ggml/blob/master/docs/gguf.md).

Checks every count, length and offset against the size of the file before using it. The reader of the gguf package does
not, so a damaged file can make it loop or allocate without bound.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Encoding
from gguf import GGUFValueType as Kind

# Metadata values, array elements and tensors; a vocabulary of 262,144 tokens needs about 1.5 million.
MAX_VALUES = 1 << 23
MAX_STRING_BYTES = 1 << 28  # a tokenizer.json has up to 35 MB
MAX_DIMENSIONS = 8
VERSIONS = (2, 3)

_NUMPY_TYPES = {
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
_NUMPY_ENCODINGS = {
    Encoding.F16: "f2",
    Encoding.F32: "f4",
    Encoding.F64: "f8",
    Encoding.I8: "i1",
    Encoding.I16: "i2",
    Encoding.I32: "i4",
    Encoding.I64: "i8",
}


class GGUFTensor(NamedTuple):
    """A memory-mapped tensor of a file. `data` consists of bytes if numpy has no type for the encoding."""

    shape: tuple[int, ...]  # numbers of elements, slowest dimension first
    tensor_type: Encoding
    data: np.ndarray


def read_gguf(path: Path) -> tuple[dict[str, Any], dict[str, GGUFTensor]]:
    """Returns the metadata and the tensors of a file. Raises ValueError if the file is damaged."""
    return _Reader(np.memmap(path, np.uint8, "r")).read()


class _Reader:
    """Parses the bytes of a file from start to end."""

    def __init__(self, content: np.ndarray) -> None:
        self._content, self._offset, self._order, self._values = content, 4, "<", 0

    def read(self) -> tuple[dict[str, Any], dict[str, GGUFTensor]]:
        version = int(self._number("u4"))
        if version & 0xFFFF == 0:  # written with the other byte order
            version, self._order = version >> 24, ">"
        if version not in VERSIONS:
            raise ValueError(f"version {version} is not supported")
        tensors, pairs = int(self._number("u8")), int(self._number("u8"))
        self._count(tensors + pairs)
        metadata: dict[str, Any] = {}
        for _ in range(pairs):
            name = self._string()
            if name in metadata:
                raise ValueError(f"the key {name[:80]!r} occurs twice")
            metadata[name] = self._value(Kind(self._number("u4")))
        headers = [self._header() for _ in range(tensors)]
        alignment = metadata.get(gguf.Keys.General.ALIGNMENT, gguf.GGUF_DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
            raise ValueError("the alignment is not a power of two")
        start = -(-self._offset // alignment) * alignment
        by_name: dict[str, GGUFTensor] = {}
        for name, dimensions, encoding, offset in headers:
            if name in by_name:
                raise ValueError(f"the tensor {name[:80]!r} occurs twice")
            by_name[name] = self._tensor(dimensions, encoding, start + offset)
        return metadata, by_name

    def _take(self, start: int, size: int) -> np.ndarray:
        if not 0 <= start <= start + size <= len(self._content):
            raise ValueError(f"the file ends before byte {start + size:,}")
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

    def _string(self) -> str:
        size = self._number("u8")
        if size > MAX_STRING_BYTES:
            raise ValueError(f"a string of {size:,} bytes is too long")
        return self._next(size).tobytes().decode()

    def _count(self, added: int) -> None:
        self._values += added
        if self._values > MAX_VALUES:
            raise ValueError(f"the file has more than {MAX_VALUES:,} metadata values and tensors")

    def _value(self, kind: Kind) -> Any:
        if kind in _NUMPY_TYPES:
            return self._number(_NUMPY_TYPES[kind])
        if kind == Kind.STRING:
            return self._string()
        inner, count = Kind(self._number("u4")), self._number("u8")
        self._count(count)
        if inner in _NUMPY_TYPES:
            return self._numbers(_NUMPY_TYPES[inner], count)
        if inner == Kind.STRING:
            return [self._string() for _ in range(count)]
        raise ValueError("nested arrays are not supported")

    def _header(self) -> tuple[str, list[int], Encoding, int]:
        name, rank = self._string(), self._number("u4")
        if rank > MAX_DIMENSIONS:
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
        if encoding in _NUMPY_ENCODINGS:
            data = content.view(np.dtype(self._order + _NUMPY_ENCODINGS[encoding])).reshape(shape)
        else:
            data = content.reshape(gguf.quant_shape_to_byte_shape(shape, encoding))
        return GGUFTensor(shape, encoding, data)
