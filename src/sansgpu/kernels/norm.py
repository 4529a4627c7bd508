"""LayerNorm and RMSNorm, fused with the residual addition and the dropout before them.

The C++ kernels compute in fp32 and round once, in one pass over memory. D width.
"""

from __future__ import annotations

from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import nn

from sansgpu.kernels import library
from sansgpu.kernels.linear import autocast_dtype
from sansgpu.kernels.pointwise import dropout, seed_number


def residual(x: torch.Tensor, y: torch.Tensor, p: float, training: bool) -> torch.Tensor:
    """Computes x + dropout(y), both (..., D)."""
    if library.takes(x, y) and x.dtype == torch.float32 and x.shape == y.shape:
        p = p if training else 0.0
        return cast(torch.Tensor, _Residual.apply(x, y, p, seed_number(p)))
    return x + dropout(y, p, training)


class FusedNorm(nn.Module):
    """The methods that all norms share. `_plain` is used for devices and dtypes that the kernel does not support."""

    weight: Any
    bias: Any
    eps: float

    @property
    def scale(self) -> Any:
        """The factors (D,) of the normalized features."""
        return self.weight

    def fill_scale(self, value: float) -> None:
        """Sets all factors of the normalized features to a value."""
        self.weight.fill_(value)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalizes (..., D)."""
        return self._run(x, None, 0.0, None)[1]

    def after(self, x: torch.Tensor, y: torch.Tensor, p: float) -> torch.Tensor:
        """Computes norm(x + dropout(y)), with dropout of probability `p` in training."""
        return self._run(x, y, p, None)[1]

    def branch(
        self, x: torch.Tensor, y: torch.Tensor | None = None, p: float = 0.0
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns x + dropout(y), or x if y is None, and its norm, which is the input of attention or feed-forward.

        Under autocast, the kernel returns the norm in autocast's dtype, as the matmuls need it.
        """
        return self._run(x, y, p, autocast_dtype(x))

    def _run(
        self, x: torch.Tensor, y: torch.Tensor | None, p: float, dtype: torch.dtype | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if not self._uses_kernel(x, y):
            x = x if y is None else x + dropout(y, p, self.training)
            return x, self._plain(x)
        p = p if self.training and y is not None else 0.0
        centered = isinstance(self, nn.LayerNorm)
        options = _NormOptions(self.eps, centered, p, seed_number(p), dtype or (x.dtype if centered else torch.float32))
        both = _Norm.apply(x, y, self.scale, self.bias, options)
        return cast(tuple[torch.Tensor, torch.Tensor], both)

    def _uses_kernel(self, x: torch.Tensor, y: torch.Tensor | None) -> bool:
        if self.weight is None or self.weight.ndim != 1 or self.weight.dtype != torch.float32:
            return False
        added = y is None or (x.dtype == torch.float32 and x.shape == y.shape and library.takes(y))
        return added and library.takes(x, self.weight)

    def _plain(self, x: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError


class LayerNorm(FusedNorm, nn.LayerNorm):
    """nn.LayerNorm with our kernel: returns the dtype of its input."""

    def _plain(self, x: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(x, self.normalized_shape, self.weight, self.bias, self.eps)


class RMSNorm(FusedNorm):
    """Root mean square normalization (arXiv 1910.07467), computed in fp32 as in Llama; returns fp32."""

    bias = None

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(width)), eps

    def _plain(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x.to(self.weight.dtype), self.weight.shape, self.scale, self.eps)


class OffsetRMSNorm(RMSNorm):
    """RMSNorm that multiplies by 1 + weight, as in Gemma and Qwen3.5."""

    @property
    def scale(self) -> Any:
        return 1.0 + self.weight

    def fill_scale(self, value: float) -> None:
        self.weight.fill_(value - 1.0)


def _rows(x: torch.Tensor) -> tuple[int, int]:
    """Returns the number of rows and the width of x (..., D)."""
    width = x.shape[-1]
    return x.numel() // width, width


def _narrow(x: torch.Tensor | None) -> bool:
    return x is not None and x.dtype == torch.bfloat16


class _Residual(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, y: torch.Tensor, p: float, seed: int) -> torch.Tensor:
        x, y = x.contiguous(), y.contiguous()
        ctx.dtype, ctx.dropout = y.dtype, (p, seed)
        total = torch.empty_like(x)
        library.call("residual", x, y, _narrow(y), total, *_rows(x), *ctx.dropout)
        return total

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        grad = grad_outputs[0].contiguous()
        if not ctx.dropout[0]:
            return grad, grad.to(ctx.dtype), None, None
        y_grad = torch.empty_like(grad, dtype=ctx.dtype)
        library.call("residual_gradient", grad, y_grad, _narrow(y_grad), *_rows(grad), *ctx.dropout)
        return grad, y_grad, None, None


class _NormOptions(NamedTuple):
    eps: float
    centered: bool  # LayerNorm, otherwise RMSNorm
    p: float  # probability of dropout
    seed: int
    dtype: torch.dtype  # output dtype


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        y: torch.Tensor | None,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        options: _NormOptions,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns x + dropout(y), or x, and its norm."""
        ctx.set_materialize_grads(False)
        rows, width = _rows(x)
        if weight.numel() != width:
            raise ValueError(f"norm expects {weight.numel()} features, got {width}.")
        source = x.contiguous()
        y = None if y is None else y.contiguous()
        total = source if y is None else torch.empty_like(source)
        out = torch.empty_like(source, dtype=options.dtype)
        ctx.options, ctx.dtype = (rows, width, *options[:4]), None if y is None else y.dtype
        library.call("norm", source, _narrow(x), y, _narrow(y), total, weight, bias, out, _narrow(out), *ctx.options)
        ctx.save_for_backward(total, weight, bias)
        return x if y is None else total, out

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        x, weight, bias = ctx.saved_tensors
        sum_grad, grad = grad_outputs
        grad = torch.zeros_like(x) if grad is None else grad.contiguous()
        sum_grad = None if sum_grad is None else sum_grad.contiguous().float()
        _, has_y, has_weight, has_bias, *_ = ctx.needs_input_grad
        x_grad, y_grad = torch.empty_like(x), torch.empty_like(x, dtype=ctx.dtype) if has_y else None
        weight_grad = torch.empty_like(weight) if has_weight else None
        bias_grad = torch.empty_like(bias) if has_bias else None
        inputs = (grad, _narrow(grad), sum_grad, x, _narrow(x), weight)
        outputs = (x_grad, y_grad, _narrow(y_grad), weight_grad, bias_grad)
        library.call("norm_gradient", *inputs, *outputs, *ctx.options)
        return x_grad, y_grad, weight_grad, bias_grad, None
