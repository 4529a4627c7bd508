"""Embedding lookup. B batch, T time, D width, V rows of the table."""

from __future__ import annotations

from typing import Any, cast

import torch

from sansgpu.kernels import library

SPARSE_RATIO = 8  # rows of the table per token above which the gradient is sparse: a dense one would be mostly zeros


def embed(indices: torch.Tensor, table: torch.Tensor, sparse: bool = False, padding: int | None = None) -> torch.Tensor:
    """Looks up rows of `table` (V, D) at `indices` (B, T); returns (B, T, D) fp32.

    Gradients are summed in fp32, because F.embedding would sum those of a bf16 table in bf16. With `sparse` the
    gradient is a sparse tensor if most of its rows would be zero. The row at index `padding` has no gradient.
    """
    return cast(torch.Tensor, _Embed.apply(indices, table, sparse, padding))


def add_rows(
    total: torch.Tensor, indices: torch.Tensor, rows: torch.Tensor, factors: torch.Tensor | None = None
) -> None:
    """Adds `rows` (N, D), each times its factor (N,), to the rows of `total` (V, D) at `indices` (N,), in order."""
    if library.takes(total, rows) and total.dtype == torch.float32 and total.is_contiguous():
        sizes = (*rows.shape, len(total))
        narrow = rows.dtype == torch.bfloat16
        library.call(
            "add_rows", narrow, *sizes, indices.to(torch.int64).contiguous(), rows.contiguous(), factors, total
        )
    else:
        wide = rows.to(total.dtype)
        total.index_add_(0, indices, wide if factors is None else wide * factors[:, None])


class _Embed(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, indices: torch.Tensor, table: torch.Tensor, sparse: bool, padding: int | None
    ) -> torch.Tensor:
        ctx.save_for_backward(indices)
        ctx.padding = padding
        ctx.rows, ctx.sparse = len(table), sparse and len(table) > SPARSE_RATIO * indices.numel()
        return table[indices].to(torch.promote_types(table.dtype, torch.float32))

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[None, torch.Tensor, None, None]:
        (indices,) = ctx.saved_tensors
        grad = grad_outputs[0].contiguous()
        if ctx.padding is not None:
            grad = grad.masked_fill((indices == ctx.padding)[..., None], 0.0)
        if ctx.sparse:
            rows, values = indices.expand(grad.shape[:-1]).reshape(1, -1), grad.flatten(0, -2)
            size = (ctx.rows, grad.shape[-1])
            return None, torch.sparse_coo_tensor(rows, values, size, check_invariants=False), None, None
        dense = grad.new_zeros(ctx.rows, grad.shape[-1])
        add_rows(dense, indices.expand(grad.shape[:-1]).flatten(), grad.flatten(0, -2))
        return None, dense, None, None
