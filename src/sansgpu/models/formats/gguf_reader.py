"""Parses GGUF files (github.com/ggml-org/ggml/blob/master/docs/gguf.md), and encodes tensors for them.

The parser checks every count, length and offset against the size of the file before using it. The reader of the gguf
package does not, so a damaged file can make it loop or allocate without bound.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, cast

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Encoding
from gguf import GGUFValueType, LlamaFileType

from sansgpu.config import ConfigError
from sansgpu.config.wording import counted
from sansgpu.kernels.block_quantization import FORMATS, SMALLER_BLOCKS, quantize_rows

GGUFType = Literal["f32", "f16", "bf16", "q8_0", "q6_k", "q4_k", "q4_1", "q4_0"]
TYPES: dict[GGUFType, tuple[Encoding, LlamaFileType]] = {  # encodings of matrices; vectors are always f32
    "f32": (Encoding.F32, LlamaFileType.ALL_F32),
    "f16": (Encoding.F16, LlamaFileType.MOSTLY_F16),
    "bf16": (Encoding.BF16, LlamaFileType.MOSTLY_BF16),
    "q8_0": (Encoding.Q8_0, LlamaFileType.MOSTLY_Q8_0),
    "q6_k": (Encoding.Q6_K, LlamaFileType.MOSTLY_Q6_K),
    "q4_k": (Encoding.Q4_K, LlamaFileType.MOSTLY_Q4_K_S),
    "q4_1": (Encoding.Q4_1, LlamaFileType.MOSTLY_Q4_1),
    "q4_0": (Encoding.Q4_0, LlamaFileType.MOSTLY_Q4_0),
}
EMBEDDING, HEAD = "token_embd.weight", "output.weight"
_ENCODED_VALUES = 1 << 24  # values converted to fp32 at a time; an embedding may have a billion


class EncodingChoice(NamedTuple):
    """The encoding of a tensor, and the one that was wanted but cannot be used if its blocks do not divide a row."""

    used: Encoding
    wanted: Encoding


def encoding_of(shape: Sequence[int], gguf_type: GGUFType, is_head: bool, is_precise: bool) -> EncodingChoice:
    """Chooses the encoding of a tensor. In 4-bit files the output head is q6_k, as in those that llama.cpp writes.

    `is_precise` says that llama.cpp requires f32.
    """
    if len(shape) < 2 or is_precise:
        return EncodingChoice(Encoding.F32, Encoding.F32)
    wanted = Encoding.Q6_K if is_head and gguf_type.startswith("q4") else TYPES[gguf_type][0]
    smaller = SMALLER_BLOCKS.get(wanted.name.lower())
    tried = (wanted,) if smaller is None else (wanted, FORMATS[smaller].encoding)
    whole = (e for e in tried if shape[-1] % gguf.GGML_QUANT_SIZES[e][0] == 0)
    return EncodingChoice(next(whole, Encoding.F16), wanted)


def describe_substitutes(choices: Mapping[str, EncodingChoice]) -> str | None:
    """Returns a message about the matrices that do not have the wanted encoding, or None if all have it."""
    replaced = {name: choice for name, choice in choices.items() if choice.used != choice.wanted}
    if not replaced:
        return None
    counts = Counter((choice.used.name.lower(), choice.wanted.name.lower()) for choice in replaced.values())
    parts = [f"{count:,} as {used} instead of {wanted}" for (used, wanted), count in counts.items()]
    return (
        f"{counted(len(replaced), 'matrix is', 'matrices are')} stored in a different type, because their row length "
        f"is not a multiple of the block size: {' and '.join(parts)}; the first is {next(iter(replaced))}."
    )


def encode(name: str, tensor: torch.Tensor, encoding: Encoding) -> np.ndarray:
    """Returns the encoded bytes of a tensor. Raises ConfigError if the encoding cannot represent its values."""
    rows = tensor.reshape(-1, tensor.shape[-1])
    parts = rows.split(max(1, _ENCODED_VALUES // max(1, rows.shape[1])))
    encoded = np.concatenate([_encoded(name, part.float().cpu().contiguous(), encoding) for part in parts])
    return encoded.reshape(*tensor.shape[:-1], encoded.shape[-1])


def _encoded(name: str, values: torch.Tensor, encoding: Encoding) -> np.ndarray:
    if not values.isfinite().all():
        raise ConfigError(f"{name} contains NaN or infinite values; export another snapshot or model.")
    if encoding.name.lower() in FORMATS:
        return quantize_rows(values, FORMATS[encoding.name.lower()]).numpy()
    array = values.numpy()
    if encoding == Encoding.F16 and not np.all(np.abs(array) <= np.finfo(np.float16).max):
        raise ConfigError(f"{name} contains values that are too large for f16; choose --type bf16.")
    return np.asarray(gguf.quants.quantize(array, encoding))


# Limit for metadata values, array elements and tensors; a vocabulary of 262,144 tokens needs about 1.5 million.
MAX_VALUES = 1 << 23
MAX_STRING_BYTES = 1 << 28  # a tokenizer.json has up to 35 MB
MAX_DIMENSIONS = 8
VERSIONS = (2, 3)

_NUMPY_TYPES = {
    GGUFValueType.UINT8: "u1",
    GGUFValueType.INT8: "i1",
    GGUFValueType.UINT16: "u2",
    GGUFValueType.INT16: "i2",
    GGUFValueType.UINT32: "u4",
    GGUFValueType.INT32: "i4",
    GGUFValueType.FLOAT32: "f4",
    GGUFValueType.UINT64: "u8",
    GGUFValueType.INT64: "i8",
    GGUFValueType.FLOAT64: "f8",
    GGUFValueType.BOOL: "?",
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
    """A memory-mapped tensor of a file. `data` are raw bytes if numpy has no dtype for the encoding."""

    shape: tuple[int, ...]  # elements, not bytes, in numpy's order: GGUF's order is the reverse
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
        if version & 0xFFFF == 0:  # a big-endian file
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
            metadata[name] = self._value(GGUFValueType(self._number("u4")))
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

    def _number(self, code: str) -> Any:
        return self._numbers(code, 1)[0]

    def _numbers(self, code: str, count: int) -> list[Any]:
        dtype = np.dtype(self._order + code)
        numbers: list[Any] = np.frombuffer(self._next(count * dtype.itemsize).tobytes(), dtype).tolist()
        return numbers

    def _string(self) -> str:
        size = self._number("u8")
        if size > MAX_STRING_BYTES:
            raise ValueError(f"a string of {size:,} bytes is too long")
        return self._next(size).tobytes().decode()

    def _strings(self, count: int) -> list[str]:
        """Reads an array, which may have hundreds of thousands of strings, so that each takes little work."""
        content: Any = memoryview(cast(Any, self._content))
        order: Literal["little", "big"] = "little" if self._order == "<" else "big"
        strings, offset, end = list[str](), self._offset, len(content)
        for _ in range(count):
            size = int.from_bytes(content[offset : offset + 8], order)
            offset += 8 + size
            if offset > end:
                raise ValueError(f"the file ends before byte {offset:,}")
            strings.append(str(content[offset - size : offset], "utf-8"))
        self._offset = offset
        return strings

    def _count(self, added: int) -> None:
        self._values += added
        if self._values > MAX_VALUES:
            raise ValueError(f"the file has more than {MAX_VALUES:,} metadata values and tensors")

    def _value(self, value_type: GGUFValueType) -> Any:
        if value_type in _NUMPY_TYPES:
            return self._number(_NUMPY_TYPES[value_type])
        if value_type == GGUFValueType.STRING:
            return self._string()
        inner, count = GGUFValueType(self._number("u4")), self._number("u8")
        self._count(count)
        if inner in _NUMPY_TYPES:
            return self._numbers(_NUMPY_TYPES[inner], count)
        if inner == GGUFValueType.STRING:
            return self._strings(count)
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
