"""Matmuls of matrices, which sum in fp32 and give the same results with any number of threads.

M rows, N columns, K terms of each sum. As in torch, a matrix may be a transposed view of one in memory.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils.flop_counter import register_flop_formula

from sansgpu.kernels import native

_library = torch.library.Library("sansgpu", "FRAGMENT")
_library.define("matmul(Tensor a, Tensor b, Tensor? bias) -> Tensor")
_library.define("matmul_with_row_sums(Tensor a, Tensor b) -> (Tensor, Tensor)")
_library.define("matmul_into(Tensor(a!) out, Tensor a, Tensor b, bool add, Tensor(b!)? row_sums) -> ()")


def is_native(*matrices: torch.Tensor) -> bool:
    """Returns True if our kernel multiplies these matrices; otherwise torch does."""
    dtype = matrices[0].dtype
    return native.takes(*matrices) and all(m.dtype == dtype and m.numel() > 0 for m in matrices)


def matmul(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Returns a (M, K) times b (K, N), plus bias (N,)."""
    if is_native(a, b):
        # Only the compiler needs an operation of torch, whose dispatch takes as long as the rest of the call.
        product: torch.Tensor = (torch.ops.sansgpu.matmul if torch.compiler.is_compiling() else _matmul)(a, b, bias)
        return product
    return a @ b if bias is None else torch.addmm(bias.to(a.dtype), a, b)


def matmul_with_row_sums(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns a (M, K) times b (K, N), and the sums of the rows of a, in fp32 or wider."""
    if is_native(a, b):
        compiling = torch.compiler.is_compiling()
        product, sums = (torch.ops.sansgpu.matmul_with_row_sums if compiling else _matmul_with_row_sums)(a, b)
        return product, sums
    return a @ b, a.sum(1, dtype=torch.promote_types(a.dtype, torch.float32))


def sum_of_matmuls(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
    """Returns the sum of products a (M, K) times b (K, N), rounded once."""
    *others, last = pairs
    if not others or torch.compiler.is_compiling() or not is_native(*last):
        products = [matmul(a, b) for a, b in pairs]
        return functools.reduce(torch.add, products)
    total = last[0].new_empty(last[0].shape[0], last[1].shape[1], dtype=torch.float32)
    for place, (a, b) in enumerate(others):
        _multiply(a, b, total, add=place > 0)
    if total.dtype == last[0].dtype:
        _multiply(*last, total, add=True)
        return total
    out = torch.empty_like(total, dtype=last[0].dtype)
    _multiply(*last, total, add=True, rounded=out)
    return out


def matmul_into(
    out: torch.Tensor, a: torch.Tensor, b: torch.Tensor, add: bool = False, row_sums: torch.Tensor | None = None
) -> None:
    """Stores a (M, K) times b (K, N) in out (M, N), or adds it, which needs an `out` in fp32 or wider.

    `row_sums` (M,), in fp32 or wider, becomes the sums of the rows of a.
    """
    if is_native(a, b) and out.is_contiguous() and (out.dtype == torch.float32 or (out.dtype == a.dtype and not add)):
        torch.ops.sansgpu.matmul_into(out, a, b, add, row_sums)
        return
    if out.dtype == a.dtype:
        torch.addmm(out, a, b, beta=int(add), out=out)
    else:
        product = a @ b
        out.add_(product) if add else out.copy_(product)
    if row_sums is not None:
        torch.sum(a, 1, dtype=row_sums.dtype, out=row_sums)


def _multiply(
    a: torch.Tensor,
    b: torch.Tensor,
    to: torch.Tensor,
    bias: torch.Tensor | None = None,
    add: bool = False,
    row_sums: torch.Tensor | None = None,
    rounded: torch.Tensor | None = None,
) -> None:
    """Calls the kernel, whose arguments native/matmul.cpp explains."""
    sizes = (rows, columns, terms) = (a.shape[0], b.shape[1], a.shape[1])
    if (*b.shape, *to.shape) != (terms, columns, rows, columns) or (bias is not None and bias.shape != (columns,)):
        raise RuntimeError(f"matrices of the shapes {tuple(a.shape)} and {tuple(b.shape)} cannot be multiplied.")
    bias = None if bias is None else bias.float().contiguous()
    direct = to.dtype == torch.float32 and bias is None  # sums need no other place in memory
    a, *left = _stored(a)
    b, *right = _stored(b)
    if row_sums is not None and not left[1]:  # the kernel sums columns in memory
        a, left = a.T.contiguous(), [rows, True]
    out, total = (rounded, to) if direct else (to, None)
    native.call("matmul", a.dtype == torch.bfloat16, *sizes, a, *left, b, *right, bias, out, total, add, row_sums)


def _stored(matrix: torch.Tensor) -> tuple[torch.Tensor, int, bool]:
    """Returns a matrix, copied unless its rows or columns are contiguous, its stride, and if the columns are."""
    rows, columns = matrix.shape
    if matrix.stride(1) == 1 and matrix.stride(0) >= columns:
        return matrix, matrix.stride(0), False
    if matrix.stride(0) == 1 and matrix.stride(1) >= rows:
        return matrix, matrix.stride(1), True
    return matrix.contiguous(), columns, False


def _new(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    return a.new_empty(a.shape[0], b.shape[1])


def _new_with_row_sums(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return _new(a, b), a.new_empty(a.shape[0], dtype=torch.float32)


def _matmul(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    out = _new(a, b)
    _multiply(a, b, out, bias)
    return out


def _matmul_with_row_sums(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    out, sums = _new_with_row_sums(a, b)
    _multiply(a, b, out, row_sums=sums)
    return out, sums


def _matmul_into(out: torch.Tensor, a: torch.Tensor, b: torch.Tensor, add: bool, row_sums: torch.Tensor | None) -> None:
    _multiply(a, b, out, add=add, row_sums=row_sums)


_library.impl("matmul", _matmul, "CPU")
_library.impl("matmul_with_row_sums", _matmul_with_row_sums, "CPU")
_library.impl("matmul_into", _matmul_into, "CPU")
torch.library.register_fake("sansgpu::matmul", _new)
torch.library.register_fake("sansgpu::matmul_with_row_sums", _new_with_row_sums)
torch.library.register_fake("sansgpu::matmul_into", lambda out, a, b, add, row_sums: None)


@register_flop_formula([torch.ops.sansgpu.matmul, torch.ops.sansgpu.matmul_with_row_sums])
def _flops(a: tuple[int, int], b: tuple[int, int], *args: Any, **kwargs: Any) -> int:
    return 2 * a[0] * a[1] * b[1]


@register_flop_formula(torch.ops.sansgpu.matmul_into)
def _flops_into(out: tuple[int, int], a: tuple[int, int], b: tuple[int, int], *args: Any, **kwargs: Any) -> int:
    return _flops(a, b)
