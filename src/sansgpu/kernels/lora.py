"""Linear layers with a frozen weight and a trained LoRA adapter, y = x W^T + b + s (x A^T) B^T (arXiv 2106.09685).

The low-rank product is added while the other one is stored, forward and backward, so it takes no pass over memory.
N rows, I inputs, O outputs, R rank.
"""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch.utils.flop_counter import register_flop_formula

from sansgpu.kernels import native
from sansgpu.kernels.block_quantization import NOT_QUANTIZED, row_length
from sansgpu.kernels.matmul import is_native

MAX_RANK = 64  # above, adding products in fp32 takes longer than separate matmuls

_library = torch.library.Library("sansgpu", "FRAGMENT")
_library.define(
    "lora_forward(Tensor x, Tensor source, Tensor weight, int format, Tensor? bias, Tensor first, Tensor second, "
    "float scale) -> (Tensor, Tensor)"
)
_library.define(
    "lora_backward(Tensor grad, Tensor source, Tensor weight, int format, Tensor first, Tensor second, Tensor h, "
    "float scale, bool of_x, bool of_source) -> (Tensor, Tensor, Tensor, Tensor)"
)


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
    if is_native(x, dropped, weight, first, second):
        return native_lora_linear(x, dropped, weight, NOT_QUANTIZED, bias, first, second, scale)
    frozen = F.linear(x, weight.detach(), None if bias is None else bias.detach().to(x.dtype))
    return add_lora(frozen, dropped, first, second, scale)


def add_lora(
    frozen: torch.Tensor, dropped: torch.Tensor, first: torch.Tensor, second: torch.Tensor, scale: float
) -> torch.Tensor:
    """Adds scale (dropped A^T) B^T to the result of a frozen layer with torch's matmuls."""
    return frozen + F.linear(F.linear(dropped, first), second) * scale


def native_lora_linear(
    x: torch.Tensor,
    dropped: torch.Tensor,
    weight: torch.Tensor,
    format: int,
    bias: torch.Tensor | None,
    first: torch.Tensor,
    second: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """Computes `lora_linear` with our kernel; `weight` is the data of a block format's number, or NOT_QUANTIZED."""
    separate = None if dropped is x else dropped
    return cast(torch.Tensor, _LoraFunction.apply(x, separate, weight, format, bias, first, second, scale))


class _LoraFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        dropped: torch.Tensor | None,
        weight: torch.Tensor,
        format: int,
        bias: torch.Tensor | None,
        first: torch.Tensor,
        second: torch.Tensor,
        scale: float,
    ) -> torch.Tensor:
        source = x if dropped is None else dropped
        y, h = torch.ops.sansgpu.lora_forward(x, source, weight, format, bias, first, second, scale)
        ctx.format, ctx.scale, ctx.separate = format, scale, dropped is not None
        ctx.save_for_backward(source, weight, first, second, h)
        return cast(torch.Tensor, y)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        of_x, of_source = ctx.needs_input_grad[0], ctx.separate
        source, weight, *adapter = ctx.saved_tensors
        x_grad, source_grad, first_grad, second_grad = torch.ops.sansgpu.lora_backward(
            grad_outputs[0], source, weight, ctx.format, *adapter, ctx.scale, of_x, of_source
        )
        found = x_grad if of_x else None, source_grad if of_source else None
        return *found, None, None, None, first_grad, second_grad, None


def _forward(
    x: torch.Tensor,
    source: torch.Tensor,
    weight: torch.Tensor,
    format: int,
    bias: torch.Tensor | None,
    first: torch.Tensor,
    second: torch.Tensor,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns y (N, O) and scale dropped A^T (N, R)."""
    sizes = _sizes(x, weight, format, first, second)
    if source.shape != x.shape or (bias is not None and bias.shape != (len(weight),)):
        raise RuntimeError(f"a layer of {tuple(weight.shape)} and its inputs cannot be multiplied.")
    y, h = _forward_shapes(x, source, weight, format, bias, first)
    bias = None if bias is None else bias.float().contiguous()
    layer = (tensor.contiguous() for tensor in (weight, first, second))
    inputs = (tensor.contiguous() for tensor in (x, source))
    native.call("lora_forward", x.dtype == torch.bfloat16, format, sizes, *layer, scale, *inputs, bias, h, y)
    return y, h


def _forward_shapes(
    x: torch.Tensor, source: Any, weight: torch.Tensor, format: int, bias: Any, first: torch.Tensor, *_: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    rows = x.shape[0]  # `len` would make the compiler expect this number of rows only
    return x.new_empty(rows, weight.shape[0]), x.new_empty(rows, first.shape[0])


def _backward(
    grad: torch.Tensor,
    source: torch.Tensor,
    weight: torch.Tensor,
    format: int,
    first: torch.Tensor,
    second: torch.Tensor,
    h: torch.Tensor,
    scale: float,
    of_x: bool,
    of_source: bool,
) -> tuple[torch.Tensor, ...]:
    """Returns the gradients of x and dropped, empty unless they are asked for, and those of A and B."""
    sizes = _sizes(source, weight, format, first, second)
    grads = _new_gradients(source, first, second, of_x, of_source)
    layer = (tensor.contiguous() for tensor in (weight, first, second))
    inputs = (tensor.contiguous() for tensor in (grad, source, h))
    outputs = (grads[0] if of_x else None, grads[1] if of_source else None, *grads[2:])
    native.call("lora_backward", grad.dtype == torch.bfloat16, format, sizes, *layer, scale, *inputs, *outputs)
    return grads


def _new_gradients(
    source: torch.Tensor, first: torch.Tensor, second: torch.Tensor, of_x: bool, of_source: bool
) -> tuple[torch.Tensor, ...]:
    rows = source.shape[0]
    inputs = (source.new_empty(rows if wanted else 0, source.shape[1]) for wanted in (of_x, of_source))
    return *inputs, first.new_empty(first.shape), second.new_empty(second.shape)


def _sizes(
    x: torch.Tensor, weight: torch.Tensor, format: int, first: torch.Tensor, second: torch.Tensor
) -> tuple[int, ...]:
    """Returns N, I, O, R. Raises RuntimeError if the adapter does not fit the layer, or the layer its input."""
    (rows, inputs), (outputs, rank) = x.shape, second.shape
    if weight.shape != (outputs, row_length(inputs, format)) or first.shape != (rank, inputs):
        raise RuntimeError(f"a layer of {tuple(weight.shape)} and its adapter or input cannot be multiplied.")
    return rows, inputs, outputs, rank


_library.impl("lora_forward", _forward, "CPU")
_library.impl("lora_backward", _backward, "CPU")
torch.library.register_fake("sansgpu::lora_forward", _forward_shapes)
torch.library.register_fake(
    "sansgpu::lora_backward",
    lambda grad, source, weight, format, first, second, h, scale, *wanted: _new_gradients(
        source, first, second, *wanted
    ),
)


@register_flop_formula(torch.ops.sansgpu.lora_forward)
def _forward_flops(
    x: tuple[int, int], source: Any, weight: tuple[int, int], format: int, bias: Any, first: tuple[int, int],
    *_: Any, **__: Any,
) -> int:  # fmt: skip
    (rows, inputs), outputs, rank = x, weight[0], first[0]
    return 2 * rows * (outputs * inputs + rank * (inputs + outputs))


@register_flop_formula(torch.ops.sansgpu.lora_backward)
def _backward_flops(
    grad: tuple[int, int], source: tuple[int, int], weight: Any, format: int, first: tuple[int, int], *_: Any, **__: Any
) -> int:
    (rows, outputs), inputs, rank = grad, source[1], first[0]
    return 2 * rows * (outputs * inputs + 2 * rank * (inputs + outputs))
