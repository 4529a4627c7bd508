"""Weights quantized in blocks of a row, byte for byte as in GGUF files (github.com/ggml-org/ggml, ggml-common.h).

A matrix (outputs, inputs) is stored as uint8 (outputs, bytes of a row). `quantized_linear` dequantizes it on the fly.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch

from sansgpu.kernels import library
from sansgpu.kernels.c_functions import constants

if TYPE_CHECKING:  # gguf is optional, and only some conversions need it
    from gguf import GGMLQuantizationType as Encoding

Precision = Literal["int8", "int4"]
QUANTIZED_AT_ONCE = 1 << 24  # while a matrix is quantized, at most this many values are in memory as fp32
_CACHED_BLOCKS = 1 << 13  # blocks of 32 values that are quantized at a time, so that they stay in a core's cache
NOT_QUANTIZED = constants()["NOT_QUANTIZED"]  # the format number of matrices of fp32 or bf16


@dataclass(frozen=True)
class BlockFormat:
    """A format of GGUF that stores `block` consecutive values of a row in `bytes` bytes."""

    name: str
    number: int  # identifies the format in C++
    block: int
    bytes: int

    @classmethod
    def declared(cls, name: str) -> BlockFormat:
        """Returns the format that native.h declares under this name."""
        return cls(name, *(constants()[f"{name.upper()}_{field}"] for field in ("NUMBER", "VALUES", "BYTES")))

    @property
    def encoding(self) -> Encoding:
        """The name of this format in gguf-py."""
        from gguf import GGMLQuantizationType as Encoding

        return Encoding[self.name.upper()]

    def row_bytes(self, inputs: int) -> int:
        """Returns the bytes of a row. Raises RuntimeError if `inputs` is not a multiple of the block."""
        if inputs % self.block:
            raise RuntimeError(f"{self.name} requires rows whose length is a multiple of {self.block}, got {inputs}.")
        return inputs // self.block * self.bytes


WRITTEN = ("q4_0", "q4_1", "q8_0", "q4_k", "q6_k")  # the formats in which sansgpu writes weights
READ = ("q5_0", "q5_1", "q5_k", "q3_k", "q2_k", "iq4_nl", "iq4_xs")  # the others, which some files have
FORMATS = {name: BlockFormat.declared(name) for name in (*WRITTEN, *READ)}

# Replacements for formats with blocks of 256 values, used if the row length is not a multiple of 256.
SMALLER_BLOCKS = {"q4_k": "q4_1", "q6_k": "q8_0"}


def by_number(number: int) -> BlockFormat:
    """Returns the format with this `number`."""
    return next(format for format in FORMATS.values() if format.number == number)


@dataclass(frozen=True)
class QuantizedWeight:
    """A frozen matrix (outputs, inputs) in a block format; `data` is uint8 (outputs, bytes of a row).

    `data` may be read-only memory, such as a mapped file.
    """

    data: torch.Tensor
    format: BlockFormat

    def __post_init__(self) -> None:
        """Raises RuntimeError if `data` cannot be rows of this format."""
        shape, dtype = tuple(self.data.shape), self.data.dtype
        if dtype != torch.uint8 or len(shape) != 2 or shape[1] % self.format.bytes:
            raise RuntimeError(f"a {self.format.name} weight cannot have shape {shape} and dtype {dtype}.")

    @property
    def outputs(self) -> int:
        return self.data.shape[0]

    @property
    def inputs(self) -> int:
        return self.data.shape[1] // self.format.bytes * self.format.block

    def dequantized(self, dtype: torch.dtype) -> torch.Tensor:
        """Returns the values (outputs, inputs)."""
        return dequantize_rows(self.data, self.format, dtype)


Matrix = torch.Tensor | QuantizedWeight


def stored(matrix: Matrix) -> tuple[torch.Tensor, int]:
    """Returns the tensor that kernels read and the number of its format, which may be NOT_QUANTIZED."""
    return (matrix.data, matrix.format.number) if isinstance(matrix, QuantizedWeight) else (matrix, NOT_QUANTIZED)


def row_length(inputs: int, format: int) -> int:
    """Returns how many elements of the stored tensor hold a row of `inputs` values in the format with this number."""
    return inputs if format == NOT_QUANTIZED else by_number(format).row_bytes(inputs)


def as_values(data: torch.Tensor, format: int, dtype: torch.dtype) -> torch.Tensor:
    """Returns the matrix (outputs, inputs) that `data` stores, in `dtype`."""
    return data.to(dtype) if format == NOT_QUANTIZED else dequantize_rows(data, by_number(format), dtype)


def format_for(precision: Precision, inputs: int, is_table: bool = False) -> BlockFormat | None:
    """Returns the format for rows of `inputs` values, or None if `inputs` is not a multiple of any block size.

    For int4, tables (token embeddings and output heads) get more bits, as in llama.cpp, because their errors affect
    every logit.
    """
    wanted = "q8_0" if precision == "int8" else "q6_k" if is_table else "q4_k"
    names = (wanted, SMALLER_BLOCKS.get(wanted, wanted))
    return next((FORMATS[name] for name in names if inputs % FORMATS[name].block == 0), None)


def quantize_rows(values: torch.Tensor, format: BlockFormat) -> torch.Tensor:
    """Rounds a matrix (outputs, inputs) to a format; returns uint8 (outputs, bytes of a row).

    q4_0, q4_1 and q8_0 give the same bytes as gguf-py. For q4_k and q6_k, the kernel searches for the scales with the
    least squared error; without the kernel, scales cover the range of each group. Raises RuntimeError if a value is not
    finite or the row length is not a multiple of the block size.
    """
    outputs, inputs = values.shape
    data = torch.empty(outputs, format.row_bytes(inputs), dtype=torch.uint8)
    at_once = max(1, QUANTIZED_AT_ONCE // inputs)
    for start in range(0, outputs, at_once):
        rows = values[start : start + at_once].detach().float().cpu()
        data[start : start + at_once] = _quantized(rows.reshape(-1, format.block), format).view(len(rows), -1)
    return data


def _quantized(blocks: torch.Tensor, format: BlockFormat) -> torch.Tensor:
    """Returns the bytes (N, bytes of a block) of blocks (N, values of a block)."""
    if not blocks.isfinite().all():
        raise RuntimeError(f"NaN and infinite values cannot be quantized to {format.name}.")
    if format.name == "q8_0":
        return torch.cat([_quantize_q8_0(part) for part in blocks.split(_CACHED_BLOCKS)])
    if format.name not in _PLAIN:
        import gguf

        return torch.from_numpy(gguf.quants.quantize(blocks.numpy(), format.encoding))
    if not library.takes(blocks):
        return _PLAIN[format.name](blocks)
    data = torch.empty(len(blocks), format.bytes, dtype=torch.uint8)
    library.call(f"quantize_{format.name}", len(blocks), blocks, data)
    return data


def dequantize_rows(data: torch.Tensor, format: BlockFormat, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Returns the values (outputs, inputs) that uint8 `data` (outputs, bytes of a row) stores."""
    outputs, inputs = data.shape[0], data.shape[1] // format.bytes * format.block
    values = torch.empty(outputs, inputs, dtype=dtype, device=data.device)
    if library.takes(values):
        narrow = dtype == torch.bfloat16
        library.call("dequantize_rows", narrow, format.number, outputs, inputs, data.contiguous(), values)
        return values
    import gguf

    return values.copy_(torch.from_numpy(gguf.quants.dequantize(data.cpu().numpy(), format.encoding)))


def _half_bytes(values: torch.Tensor) -> torch.Tensor:
    return values.half()[:, None].contiguous().view(torch.uint8)


def _inverse(x: torch.Tensor) -> torch.Tensor:
    return torch.where(x == 0, 0.0, 1 / x)


def _quantize_q8_0(blocks: torch.Tensor) -> torch.Tensor:
    """A value is d * code, with 8-bit code. Rounds halves away from zero, as gguf-py does in many times the time."""
    d = blocks.abs().amax(1).div_(127)
    scaled = blocks * _inverse(d)[:, None]
    fractions = scaled.abs()
    codes = fractions.floor()
    fractions.sub_(codes)
    codes.add_(fractions.ge(0.5)).copysign_(scaled)
    return torch.cat([_half_bytes(d), codes.to(torch.int8).view(torch.uint8)], 1)


def _quantize_q4_k(blocks: torch.Tensor) -> torch.Tensor:
    """A block has 8 groups of 32 values. A value is d * scale * code - dmin * min, with 6-bit scale and min."""
    x = blocks.view(-1, 8, 32)
    mins = -x.amin(-1).clamp(max=0)
    scales = (x.amax(-1).clamp(min=0) + mins) / 15
    d, dmin = (part.amax(1).div(63).half().float() for part in (scales, mins))
    scale_codes, min_codes = (
        (part * _inverse(unit)[:, None]).round().clamp(0, 63).to(torch.uint8)
        for part, unit in ((scales, d), (mins, dmin))
    )
    steps, offsets = d[:, None, None] * scale_codes[..., None], dmin[:, None, None] * min_codes[..., None]
    codes = ((x + offsets) * _inverse(steps)).round().clamp(0, 15).to(torch.uint8)
    low, high = codes.view(-1, 4, 2, 32).unbind(2)
    packed = [
        scale_codes[:, :4] | (scale_codes[:, 4:] >> 4) << 6,
        min_codes[:, :4] | (min_codes[:, 4:] >> 4) << 6,
        (scale_codes[:, 4:] & 15) | (min_codes[:, 4:] & 15) << 4,
    ]
    return torch.cat([_half_bytes(d), _half_bytes(dmin), *packed, (low | high << 4).flatten(1)], 1)


def _quantize_q6_k(blocks: torch.Tensor) -> torch.Tensor:
    """A block has 16 groups of 16 values. A value is d * scale * code, with 8-bit scale and code from -32 to 31."""
    x = blocks.view(-1, 16, 16)
    scales = x.gather(-1, x.abs().argmax(-1, keepdim=True))[..., 0] / -32
    d = (scales.abs().amax(1) / 127).half().float()
    scale_codes = (scales * _inverse(d)[:, None]).round().clamp(-127, 127)
    codes = (x * _inverse(d[:, None, None] * scale_codes[..., None])).round().clamp(-32, 31).to(torch.int8) + 32
    quarters = codes.view(-1, 2, 4, 32).to(torch.uint8)  # four quarters of each half of a block
    low = quarters[:, :, :2] & 15 | (quarters[:, :, 2:] & 15) << 4
    shifted = (quarters >> 4) << torch.tensor([0, 2, 4, 6], dtype=torch.uint8)[:, None]
    high = shifted.sum(2, dtype=torch.uint8)  # a bitwise or, because no two share a bit
    parts = [low.flatten(1), high.flatten(1), scale_codes.to(torch.int8).view(torch.uint8), _half_bytes(d)]
    return torch.cat(parts, 1)


_PLAIN = {"q4_k": _quantize_q4_k, "q6_k": _quantize_q6_k}  # formats that gguf-py can only dequantize
