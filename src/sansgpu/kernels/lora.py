"""Linear layers with a frozen weight and a trained LoRA adapter, y = x W^T + b + s (x A^T) B^T (arXiv 2106.09685).

The low-rank product is added while the other one is stored, forward and backward, so it takes no pass over memory.
N rows, I inputs, O outputs, R rank.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch.utils.flop_counter import register_flop_formula

from sansgpu.kernels import native
from sansgpu.kernels.matmul import is_native, matmul

MAX_RANK = 64  # above, adding products in fp32 takes longer than separate matmuls

_library = torch.library.Library("sansgpu", "FRAGMENT")
_library.define("lora_matmul(Tensor a, Tensor b, bool transposed, Tensor? bias, Tensor h, Tensor d) -> Tensor")


def lora_linear(
    x: torch.Tensor,
    dropped: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    first: torch.Tensor,
    second: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """Computes x W^T + bias + scale (dropped A^T) B^T; W and bias get no gradient. `dropped` is x after dropout, or x.

    x and dropped (N, I), weight W (O, I), bias (O,), first A (R, I), second B (O, R); returns (N, O).
    """
    separate = None if dropped is x else dropped
    return cast(torch.Tensor, _LoraFunction.apply(x, separate, weight, bias, first, second, scale))


class _LoraFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        dropped: torch.Tensor | None,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        first: torch.Tensor,
        second: torch.Tensor,
        scale: float,
    ) -> torch.Tensor:
        source = x if dropped is None else dropped
        h = matmul(source, first.T) * scale
        ctx.scale, ctx.separate = scale, dropped is not None
        ctx.save_for_backward(source, weight, first, second, h)
        return _lora_matmul(x, weight, True, bias, h, second)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        source, weight, first, second, h = ctx.saved_tensors
        grad = grad_outputs[0].contiguous()
        h_grad = matmul(grad, second) * ctx.scale
        x_grad = dropped_grad = None
        if ctx.separate:
            x_grad = matmul(grad, weight) if ctx.needs_input_grad[0] else None
            dropped_grad = matmul(h_grad, first) if ctx.needs_input_grad[1] else None
        elif ctx.needs_input_grad[0]:
            x_grad = _lora_matmul(grad, weight, False, None, h_grad, first)
        return x_grad, dropped_grad, None, None, matmul(h_grad.T, source), matmul(grad.T, h), None


def _lora_matmul(
    a: torch.Tensor, b: torch.Tensor, transposed: bool, bias: torch.Tensor | None, h: torch.Tensor, d: torch.Tensor
) -> torch.Tensor:
    """Returns a b + bias + h d, with the transposes of b and d if `transposed`."""
    if is_native(a, b, h, d):
        product: torch.Tensor = torch.ops.sansgpu.lora_matmul(a, b, transposed, bias, h, d)
        return product
    b, d = (b.T, d.T) if transposed else (b, d)
    return matmul(a, b, bias) + h @ d


def _multiply(
    a: torch.Tensor, b: torch.Tensor, transposed: bool, bias: torch.Tensor | None, h: torch.Tensor, d: torch.Tensor
) -> torch.Tensor:
    out = _new(a, b, transposed)
    (rows, columns), terms, rank = out.shape, a.shape[1], h.shape[1]
    shapes = [(columns, terms), (columns, rank)] if transposed else [(terms, columns), (rank, columns)]
    if [b.shape, d.shape] != shapes or len(h) != rows or (bias is not None and bias.shape != (columns,)):
        raise RuntimeError(f"a layer of {tuple(b.shape)} and an adapter of {tuple(d.shape)} cannot be multiplied.")
    a, b, h, d = (matrix.contiguous() for matrix in (a, b, h, d))
    bias = None if bias is None else bias.float().contiguous()
    narrow = a.dtype == torch.bfloat16
    native.call("lora_matmul", narrow, rows, columns, terms, rank, a, b, transposed, bias, h, d, out)
    return out


def _new(a: torch.Tensor, b: torch.Tensor, transposed: bool, *rest: Any) -> torch.Tensor:
    return a.new_empty(a.shape[0], b.shape[0 if transposed else 1])


_library.impl("lora_matmul", _multiply, "CPU")
torch.library.register_fake("sansgpu::lora_matmul", _new)


@register_flop_formula(torch.ops.sansgpu.lora_matmul)
def _flops(
    a: tuple[int, int], b: tuple[int, int], transposed: bool, bias: Any, h: Any, d: tuple[int, int], **kwargs: Any
) -> int:
    return 2 * a[0] * (b[0] * b[1] + d[0] * d[1])
