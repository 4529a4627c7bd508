"""Linear layers with a frozen weight that stays quantized, with or without a LoRA adapter.

Each value of the weight is widened once for all rows of a product, so there is no copy of it in memory.
N rows, I inputs, O outputs, R rank.
"""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.nn.functional as F

from sansgpu.kernels import library
from sansgpu.kernels.block_quantization import QuantizedWeight, by_number, dequantize_rows
from sansgpu.kernels.lora import FrozenLayer, add_lora, native_lora_linear
from sansgpu.kernels.matmul import is_native


def quantized_linear(x: torch.Tensor, weight: QuantizedWeight, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Computes x W^T + bias for x (N, I), W (O, I) and bias (O,), which get no gradient; returns (N, O).

    The values of W are rounded to the dtype of x, unless the kernel multiplies only a few rows.
    """
    _require_fit(x, weight, bias)
    return cast(torch.Tensor, _FrozenLinearFunction.apply(x, weight.data, weight.format.number, bias))


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
    _require_fit(x, weight, bias)
    if is_native(x, dropped, first, second):
        frozen = FrozenLayer(weight.data, weight.format.number, bias)
        return native_lora_linear(x, dropped, frozen, first, second, scale)
    return add_lora(quantized_linear(x, weight, bias), dropped, first, second, scale)


class _FrozenLinearFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, data: torch.Tensor, format: int, bias: torch.Tensor | None) -> torch.Tensor:
        ctx.format = format
        ctx.save_for_backward(data)
        if not is_native(x):
            weight = dequantize_rows(data, by_number(format), x.dtype)
            return F.linear(x, weight, None if bias is None else bias.to(x.dtype))
        y = x.new_empty(len(x), len(data))
        bias = None if bias is None else bias.float().contiguous()
        _call("quantized_forward", x, data, format, (*x.shape, len(data)), bias, y)
        return y

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (grad,), (data,), stored = grad_outputs, ctx.saved_tensors, by_number(ctx.format)
        if not is_native(grad):
            return grad @ dequantize_rows(data, stored, grad.dtype), None, None, None
        x_grad = grad.new_empty(len(grad), data.shape[1] // stored.bytes * stored.block)
        _call("quantized_backward", grad, data, ctx.format, (*x_grad.shape, len(data)), x_grad)
        return x_grad, None, None, None


def _require_fit(x: torch.Tensor, weight: QuantizedWeight, bias: torch.Tensor | None) -> None:
    shape = (weight.outputs, weight.inputs)
    if x.ndim != 2 or x.shape[1] != weight.inputs or (bias is not None and bias.shape != (weight.outputs,)):
        raise RuntimeError(f"a quantized weight of {shape} and an input of {tuple(x.shape)} cannot be multiplied.")


def _call(
    name: str, rows: torch.Tensor, data: torch.Tensor, format: int, sizes: tuple[int, ...], *rest: torch.Tensor | None
) -> None:
    narrow = rows.dtype == torch.bfloat16
    library.call(name, narrow, format, *sizes, data.contiguous(), rows.contiguous(), *rest)
