"""Rows of a table. B batch, T time, D width, V rows of the table."""

from __future__ import annotations

from typing import Any, cast

import torch

FEW = 8  # times as many rows as tokens: then a dense gradient is mostly zeros


def embed(indices: torch.Tensor, table: torch.Tensor, sparse: bool = False) -> torch.Tensor:
    """Rows of `table` (V, D) at `indices` (B, T), in fp32 (B, T, D); gradients are summed in fp32 as well.

    With `sparse` the gradient is a sparse tensor where most of it would be zeros.
    A bf16 table through F.embedding would add up the gradient of a frequent token in bf16.
    """
    return cast(torch.Tensor, _Embed.apply(indices, table, sparse))


class _Embed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, indices: torch.Tensor, table: torch.Tensor, sparse: bool) -> torch.Tensor:
        ctx.save_for_backward(indices)
        ctx.rows, ctx.sparse = len(table), sparse and len(table) > FEW * indices.numel()
        return table[indices].to(torch.promote_types(table.dtype, torch.float32))

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[None, torch.Tensor, None]:
        (indices,) = ctx.saved_tensors
        grad = grad_outputs[0].contiguous()
        if ctx.sparse:
            places, values = indices.expand(grad.shape[:-1]).reshape(1, -1), grad.flatten(0, -2)
            size = (ctx.rows, grad.shape[-1])
            return None, torch.sparse_coo_tensor(places, values, size, check_invariants=False), None
        dense = torch.ops.aten.embedding_dense_backward(grad, indices.expand(grad.shape[:-1]), ctx.rows, -1, False)
        return None, dense, None
