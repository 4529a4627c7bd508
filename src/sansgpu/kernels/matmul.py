"""Matmuls that accumulate in fp32 and give the same results with any number of threads.

a (M, K) times b (K, N). As in torch, a matrix may be a transposed view.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import Literal, get_args

import torch

from sansgpu.kernels import library
from sansgpu.kernels.c_functions import constants, structs

Integer = Literal["int16", "int8"]
INTEGERS: tuple[Integer, ...] = get_args(Integer)


def integer_of(precision: str) -> Integer | None:
    """Returns the integers that a value of `training.precision` multiplies, or None if it multiplies floats."""
    return next((integer for integer in INTEGERS if integer == precision), None)


class MatmulPrecision(IntEnum):
    """The number format in which a matmul multiplies: its operands' own, or integers to which it converts them.

    The integers are block floating point (native/block_floats.h). In INT16, 512 consecutive terms of a row share a
    scale, and each has 12 bits. In INT8, terms are rotated (native/rotation.h), 256 share a scale, and each has 8 bits.
    The operands are fp32, but bf16 for BF16 and INT8_OF_BF16.
    """

    FP32 = constants()["FP32"]
    BF16 = constants()["BF16"]
    INT16 = constants()["INT16"]
    INT8 = constants()["INT8"]
    INT8_OF_BF16 = constants()["INT8_OF_BF16"]

    @classmethod
    def of(cls, dtype: torch.dtype, integer: Integer | None = None) -> MatmulPrecision:
        """Returns the precision that multiplies operands of this dtype, as integers if `integer` is not None.

        bf16 operands have more digits than int8 and are multiplied faster than int16, so int16 leaves them as they are.
        """
        if dtype == torch.bfloat16:
            return cls.INT8_OF_BF16 if integer == "int8" else cls.BF16
        if integer is None or dtype != torch.float32:
            return cls.FP32
        return cls.INT8 if integer == "int8" else cls.INT16


def is_native(*matrices: torch.Tensor) -> bool:
    """Returns True if our kernel supports these matrices; otherwise torch must multiply them."""
    dtype = matrices[0].dtype
    return library.takes(*matrices) and all(m.dtype == dtype and m.numel() > 0 for m in matrices)


class Matmul:
    """A matmul to pass to `multiply`: stores a (M, K) times b (K, N), plus bias (N,), in `to`.

    `to` has the dtype of a and b, or fp32. With `add`, the product is added to `to`, which must be fp32. `rounded`
    receives a copy of an fp32 result, rounded to the dtype of a and b. `row_sums` (M,) fp32 receives the row sums of a.
    """

    def __init__(
        self,
        a: torch.Tensor,
        b: torch.Tensor,
        to: torch.Tensor,
        bias: torch.Tensor | None = None,
        add: bool = False,
        row_sums: torch.Tensor | None = None,
        rounded: torch.Tensor | None = None,
    ) -> None:
        sizes = (rows, columns, terms) = (a.shape[0], b.shape[1], a.shape[1])
        if (*b.shape, *to.shape) != (terms, columns, rows, columns) or (bias is not None and bias.shape != (columns,)):
            raise RuntimeError(f"matrices of shapes {tuple(a.shape)} and {tuple(b.shape)} cannot be multiplied.")
        a, *left = _stored(a)
        b, *right = _stored(b)
        if row_sums is not None and not left[1]:  # the kernel sums columns of a row-major matrix
            a, left = a.T.contiguous(), [rows, True]
        if bias is not None:
            bias = bias.float().contiguous()
        direct = to.dtype == torch.float32 and bias is None  # the kernel accumulates in `to` itself
        out, total = (rounded, to) if direct else (to, None)
        self.tensors = a, b, bias, out, total, row_sums
        pointers = [None if tensor is None else tensor.data_ptr() for tensor in self.tensors]
        self.struct = structs()["Matmul"](
            *sizes, pointers[0], *left, pointers[1], *right, *pointers[2:5], add, pointers[5]
        )


def multiply(precision: MatmulPrecision, *matmuls: Matmul) -> None:
    """Computes matmuls whose operands are bf16 for BF16, otherwise fp32. No matmul may read the output of another."""
    library.call("matmuls", int(precision), tuple(matmul.struct for matmul in matmuls), len(matmuls))


def sum_of_matmuls(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], out: torch.Tensor) -> list[Matmul]:
    """Returns matmuls that store the sum of the products of all pairs a (M, K), b (K, N) in `out`, rounded once."""
    if len(pairs) == 1:
        return [Matmul(*pairs[0], out)]
    wide = out.dtype == torch.float32
    total = out if wide else torch.empty_like(out, dtype=torch.float32)
    *others, last = pairs
    added = [Matmul(*pair, total, add=place > 0) for place, pair in enumerate(others)]
    return [*added, Matmul(*last, total, add=True, rounded=None if wide else out)]


def matmul_into(out: torch.Tensor, a: torch.Tensor, b: torch.Tensor, add: bool = False) -> None:
    """Stores a (M, K) times b (K, N) in the contiguous `out` (M, N); with `add`, adds it to `out`, which is fp32."""
    multiply(MatmulPrecision.of(a.dtype), Matmul(a, b, out, add=add))


def _stored(matrix: torch.Tensor) -> tuple[torch.Tensor, int, bool]:
    """Returns (matrix, stride, is_transposed); copies the matrix unless its rows or its columns are contiguous."""
    (rows, columns), (down, across) = matrix.shape, matrix.stride()
    if across == 1 and down >= columns:
        return matrix, down, False
    if down == 1 and across >= rows:
        return matrix, across, True
    return matrix.contiguous(), columns, False
