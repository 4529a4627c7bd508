"""Rotary position embedding (arXiv 2104.09864) of queries and keys, after an optional RMSNorm of each head.

B batch, T time, H query heads, K key-value heads, d head dim.
"""

from __future__ import annotations

from typing import Any, cast

import torch

from sansgpu.kernels import library
from sansgpu.kernels.norm import RMSNorm


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Applies rotary position embedding to x (B, H, T, d), in the half-split form of Llama."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


def rotate_heads(
    q: torch.Tensor,
    k: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    q_norm: RMSNorm | None = None,
    k_norm: RMSNorm | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Normalizes, rotates and transposes q (B, T, H, d) and k (B, T, K, d) to (B, H, T, d) and (B, K, T, d).

    cos and sin are (1 or B, 1, T, d) fp32. Results have the dtypes of q and k.
    """
    norms = [norm for norm in (q_norm, k_norm) if norm is not None]
    uniform = q.dtype == k.dtype and q.shape[:2] == k.shape[:2] and all(n.weight.dtype == cos.dtype for n in norms)
    if library.takes(q, k, cos, sin) and uniform and cos.dtype == torch.float32 and len(norms) in (0, 2):
        weights = (None, None) if q_norm is None or k_norm is None else (q_norm.scale, k_norm.scale)
        eps = norms[0].eps if norms else 0.0
        rotated = _Rotary.apply(q, k, *weights, (cos.contiguous(), sin.contiguous()), eps)
        q, k = cast(tuple[torch.Tensor, torch.Tensor], rotated)
        return q.transpose(1, 2), k.transpose(1, 2)
    wide_q, wide_k = q if q_norm is None else q_norm(q), k if k_norm is None else k_norm(k)
    return (rotate(wide_q.transpose(1, 2), cos, sin).to(q.dtype), rotate(wide_k.transpose(1, 2), cos, sin).to(k.dtype))


class _Rotary(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        q_weight: torch.Tensor | None,
        k_weight: torch.Tensor | None,
        angles: tuple[torch.Tensor, torch.Tensor],
        eps: float,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        q, k, (cos, sin) = q.contiguous(), k.contiguous(), angles
        batch, time, heads, dim = q.shape
        if cos.shape != sin.shape or cos.shape[1:] != (1, time, dim) or cos.shape[0] not in (1, batch) or dim % 2:
            raise ValueError(
                f"rotary angles of shape {tuple(cos.shape)} do not match queries of shape {tuple(q.shape)}."
            )
        ctx.sizes = (batch * time, max(1, cos.shape[0] * time), heads, k.shape[2], dim, eps)
        # The gradients of the norms need q and k. Rotation alone is linear, so its gradient does not.
        ctx.save_for_backward(*(None, None) if q_weight is None else (q, k), cos, sin, q_weight, k_weight)
        q_out, k_out = torch.empty_like(q), torch.empty_like(k)
        narrow = q.dtype == torch.bfloat16
        library.call("rotary", narrow, q, k, q_weight, k_weight, cos, sin, q_out, k_out, *ctx.sizes)
        return q_out, k_out

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q, k, cos, sin, q_weight, k_weight = ctx.saved_tensors
        grads = [grad.contiguous() for grad in grad_outputs]
        to_q, to_k = (torch.empty_like(grad) for grad in grads)
        q_sum, k_sum = (
            torch.empty_like(weight) if weight is not None and ctx.needs_input_grad[place] else None
            for place, weight in ((2, q_weight), (3, k_weight))
        )
        narrow = grads[0].dtype == torch.bfloat16
        inputs = (q, k, q_weight, k_weight, cos, sin)
        library.call("rotary_gradient", narrow, *grads, *inputs, to_q, to_k, q_sum, k_sum, *ctx.sizes)
        return to_q, to_k, q_sum, k_sum, None, None
