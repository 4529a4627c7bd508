"""Linear layers with a frozen weight that stays quantized, with or without a LoRA adapter.

N rows, I inputs, O outputs, R rank.
"""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.nn.functional as F

from sansgpu.kernels.block_quantization import QuantizedWeight


def quantized_linear(x: torch.Tensor, weight: QuantizedWeight, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Computes x W^T + bias for x (N, I), W (O, I) and bias (O,), which get no gradient; returns (N, O).

    The values of W are rounded to the dtype of x.
    """
    _require_fit(x, weight, bias)
    return cast(torch.Tensor, _LinearFunction.apply(x, weight, bias))


def quantized_lora_linear(
    x: torch.Tensor,
    dropped: torch.Tensor,
    weight: QuantizedWeight,
    bias: torch.Tensor | None,
    first: torch.Tensor,
    second: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """Computes `lora.lora_linear` with a quantized weight: x W^T + bias + scale (dropped A^T) B^T.

    x and dropped (N, I), weight W (O, I), bias (O,), first A (R, I), second B (O, R); returns (N, O).
    """
    return quantized_linear(x, weight, bias) + F.linear(F.linear(dropped, first), second) * scale


class _LinearFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: QuantizedWeight, bias: torch.Tensor | None) -> torch.Tensor:
        ctx.weight = weight
        return F.linear(x, weight.dequantized(x.dtype), None if bias is None else bias.detach().to(x.dtype))

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        grad = grad_outputs[0]
        return grad @ ctx.weight.dequantized(grad.dtype), None, None


def _require_fit(x: torch.Tensor, weight: QuantizedWeight, bias: torch.Tensor | None) -> None:
    shape = (weight.outputs, weight.inputs)
    if x.ndim != 2 or x.shape[1] != weight.inputs or (bias is not None and bias.shape != (weight.outputs,)):
        raise RuntimeError(f"a quantized weight of {shape} and an input of {tuple(x.shape)} cannot be multiplied.")
