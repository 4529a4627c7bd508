"""Linear layers that multiply with our kernel, forward and backward."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import nn

from sansgpu.kernels.matmul import is_native, matmul, matmul_with_row_sums

MIN_ROWS = 256  # for fewer, packing the weight costs more than our kernel gains; generation has one row at a time


def autocast_dtype(x: torch.Tensor) -> torch.dtype | None:
    """Returns the dtype to which autocast converts the inputs of matmuls, or None if autocast is disabled."""
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None


def autocasted(x: torch.Tensor) -> torch.Tensor:
    """Returns x in autocast's dtype if autocast is enabled; several linear layers can then share one copy."""
    return x.to(autocast_dtype(x) or x.dtype)


class _LinearFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        of_x, of_weight, _ = ctx.needs_input_grad
        ctx.save_for_backward(x if of_weight else None, weight if of_x else None)
        ctx.bias_dtype = None if bias is None else bias.dtype
        return matmul(x, weight.T, bias)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        grad, (of_x, of_weight, of_bias) = grad_outputs[0], ctx.needs_input_grad
        weight_grad = bias_grad = None
        if of_weight and of_bias:
            weight_grad, bias_grad = matmul_with_row_sums(grad.T, x)
        elif of_weight:
            weight_grad = matmul(grad.T, x)
        elif of_bias:
            bias_grad = grad.sum(0, dtype=torch.float32)
        bias_grad = None if bias_grad is None else bias_grad.to(ctx.bias_dtype)
        return matmul(grad, weight) if of_x else None, weight_grad, bias_grad


class Linear(nn.Linear):
    """nn.Linear with our matmuls where they are at least as fast: (..., inputs) -> (..., outputs)."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        weight, x = self.weight, autocasted(input)
        if x.numel() < MIN_ROWS * self.in_features or not is_native(x, weight):
            return super().forward(input)
        y = cast(torch.Tensor, _LinearFunction.apply(x.reshape(-1, self.in_features), weight, self.bias))
        return y.view(*x.shape[:-1], self.out_features)
