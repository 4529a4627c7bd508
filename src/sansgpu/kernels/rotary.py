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


def rotate_joined(
    qkv: torch.Tensor, heads: int, kv_heads: int, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Splits qkv (B, T, H + 2 K, d) into q, k and v, rotates q and k, and transposes all to (B, H or K, T, d).

    cos and sin are as for `rotate_heads`.
    """
    if library.takes(qkv, cos, sin) and cos.dtype == torch.float32:
        angles = cos.contiguous(), sin.contiguous()
        q, k, v = cast(tuple[torch.Tensor, ...], _JoinedRotary.apply(qkv, heads, kv_heads, angles))
    else:
        q, k, v = qkv.split([heads, kv_heads, kv_heads], dim=2)
        q, k = (rotate(x.transpose(1, 2), cos, sin).to(x.dtype).transpose(1, 2) for x in (q, k))
    return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)


def _check_angles(q: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    """Raises ValueError unless cos and sin (1 or B, 1, T, d) match q (B, T, H, d)."""
    batch, time, _, dim = q.shape
    if cos.shape != sin.shape or cos.shape[1:] != (1, time, dim) or cos.shape[0] not in (1, batch) or dim % 2:
        raise ValueError(f"rotary angles of shape {tuple(cos.shape)} do not match queries of shape {tuple(q.shape)}.")


class _JoinedRotary(torch.autograd.Function):
    """Saves only the angles. Its results take no more memory than qkv, which autograd frees."""

    @staticmethod
    def forward(
        ctx: Any, qkv: torch.Tensor, heads: int, kv_heads: int, angles: tuple[torch.Tensor, torch.Tensor]
    ) -> tuple[torch.Tensor, ...]:
        qkv, (cos, sin) = qkv.contiguous(), angles
        q, k, v = qkv.split([heads, kv_heads, kv_heads], dim=2)
        _check_angles(q, cos, sin)
        batch, time, every, dim = qkv.shape
        ctx.heads, periods = (heads, kv_heads, kv_heads), max(1, cos.shape[0] * time)
        ctx.sizes = (batch * time, periods, heads, kv_heads, dim, every * dim, every * dim, 0.0)
        ctx.save_for_backward(cos, sin)
        q_out, k_out = q.new_empty(q.shape), k.new_empty(k.shape)
        library.call("rotary", qkv.dtype == torch.bfloat16, q, k, None, None, cos, sin, q_out, k_out, *ctx.sizes)
        return q_out, k_out, v.clone(memory_format=torch.contiguous_format)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (cos, sin), (q_grad, k_grad, v_grad) = ctx.saved_tensors, grad_outputs
        q_grad, k_grad = q_grad.contiguous(), k_grad.contiguous()
        grad = q_grad.new_empty(*q_grad.shape[:2], sum(ctx.heads), q_grad.shape[-1])
        to_q, to_k, to_v = grad.split(ctx.heads, dim=2)
        to_v.copy_(v_grad)
        unused = (None,) * 4  # q, k and the weights of their norms
        narrow = grad.dtype == torch.bfloat16
        library.call("rotary_gradient", narrow, q_grad, k_grad, *unused, cos, sin, to_q, to_k, None, None, *ctx.sizes)
        return grad, None, None, None


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
        _check_angles(q, cos, sin)
        strides = heads * dim, k.shape[2] * dim
        ctx.sizes = (batch * time, max(1, cos.shape[0] * time), heads, k.shape[2], dim, *strides, eps)
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
