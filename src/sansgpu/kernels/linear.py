"""Linear layers whose weight gradient avoids oneDNN's slow transposition."""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import nn

from sansgpu.kernels import native

MIN_NATIVE_FEATURES = 512  # inputs and outputs above which our kernel is 1.1 to 1.7 times faster, measured on AMX

_library = torch.library.Library("sansgpu", "FRAGMENT")
_library.define("linear_gradients(Tensor grad, Tensor input, bool with_bias) -> (Tensor, Tensor)")


def _shapes(grad: torch.Tensor, x: torch.Tensor, with_bias: bool) -> tuple[torch.Tensor, torch.Tensor]:
    outputs = grad.shape[1]
    return grad.new_empty(outputs, x.shape[1]), grad.new_empty(outputs if with_bias else 0, dtype=torch.float32)


def _linear_gradients(grad: torch.Tensor, x: torch.Tensor, with_bias: bool) -> tuple[torch.Tensor, torch.Tensor]:
    weight_grad, bias_grad = _shapes(grad, x, with_bias)
    if len(grad) == 0:
        return weight_grad.zero_(), bias_grad.zero_()
    sizes = (len(grad), *weight_grad.shape)
    bias = bias_grad if with_bias else None
    native.call("linear_gradients", grad.contiguous(), x.contiguous(), weight_grad, bias, *sizes)
    return weight_grad, bias_grad


_library.impl("linear_gradients", _linear_gradients, "CPU")
torch.library.register_fake("sansgpu::linear_gradients", _shapes)


class _LinearFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.with_bias = bias is not None
        narrow = None if bias is None else bias.to(weight.dtype)
        if narrow is None or not torch.compiler.is_compiling():
            return F.linear(x, weight, narrow)
        return F.linear(x, weight) + narrow  # torch.compile fuses this addition into the next operation

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        grad = grad_outputs[0]
        weight_grad, bias_grad = torch.ops.sansgpu.linear_gradients(
            grad.flatten(0, -2), x.flatten(0, -2), ctx.with_bias
        )
        return grad @ weight, weight_grad, bias_grad if ctx.with_bias else None


def _use_native(weight: torch.Tensor) -> bool:
    return (
        native.has_amx()
        and weight.requires_grad
        and weight.dtype == torch.bfloat16
        and weight.device.type == "cpu"
        and min(weight.shape) >= MIN_NATIVE_FEATURES
    )


class Linear(nn.Linear):
    """nn.Linear with our kernel for the weight gradient, on processors with AMX: (..., inputs) -> (..., outputs)."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not _use_native(self.weight):
            return super().forward(x)
        return cast(torch.Tensor, _LinearFunction.apply(x.to(self.weight.dtype), self.weight, self.bias))
