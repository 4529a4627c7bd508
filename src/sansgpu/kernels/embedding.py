"""Rows of a table. B batch, T time, D width, V rows of the table."""

from __future__ import annotations

from typing import Any, cast

import torch


def embed(indices: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """Rows of `table` (V, D) at `indices` (B, T), in fp32 (B, T, D); gradients are summed in fp32 as well.

    A bf16 table through F.embedding would add up the gradient of a frequent token in bf16.
    """
    return cast(torch.Tensor, _Embed.apply(indices, table))


class _Embed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, indices: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(indices)
        ctx.rows = len(table)
        return table[indices].to(torch.promote_types(table.dtype, torch.float32))

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[None, torch.Tensor]:
        (indices,) = ctx.saved_tensors
        grad = grad_outputs[0].contiguous()
        return None, torch.ops.aten.embedding_dense_backward(grad, indices.expand(grad.shape[:-1]), ctx.rows, -1, False)
