"""Linear layers with a frozen weight, which may be quantized, and an optional trained LoRA adapter.

With an adapter, y = x W^T + b + s (x A^T) B^T (arXiv 2106.09685). Forward and backward, the kernel adds the low-rank
product while it stores the main one, which saves a pass over memory. A quantized weight is dequantized on the fly, once
per product, so no dequantized copy is in memory. N rows, I inputs, O outputs, R rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F

from sansgpu.kernels import library
from sansgpu.kernels.block_quantization import NOT_QUANTIZED, QuantizedWeight, by_number, dequantize_rows, row_length
from sansgpu.kernels.c_functions import constants, structs
from sansgpu.kernels.matmul import Integer, MatmulPrecision, is_native
from sansgpu.machine.allocator import memory_in_huge_pages
from sansgpu.machine.probe import available_memory

PACKED_RATIO = 0.25  # maximum share of the available memory for packed copies of the weights
MAX_RANK = 64  # above this, adding products in fp32 takes longer than separate matmuls


class _FrozenLayer(NamedTuple):
    """The parameters of a linear layer that get no gradient."""

    weight: torch.Tensor  # (O, I), or the data of a quantized weight
    format: int  # the number of the block format of the data, or NOT_QUANTIZED
    bias: torch.Tensor | None  # (O,)
    integer: Integer | None  # multiplies inputs with it in integers

    def precision(self, x: torch.Tensor) -> MatmulPrecision:
        """Returns the precision of the products of x with the weight; those of an adapter are in the dtype of x."""
        return MatmulPrecision.of(x.dtype, self.integer)


class Adapter(NamedTuple):
    """A LoRA adapter, which adds scale (x A^T) B^T."""

    first: torch.Tensor  # A (R, I)
    second: torch.Tensor  # B (O, R)
    scale: float


def lora_linear(
    x: torch.Tensor,
    dropped: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    adapter: Adapter,
    integer: Integer | None = None,
) -> torch.Tensor:
    """Computes x W^T + bias + scale (dropped A^T) B^T; W and bias get no gradient. `dropped` is x after dropout, or x.

    x and dropped (N, I), weight W (O, I), bias (O,), adapter A (R, I) and B (O, R); returns (N, O). With `integer`,
    inputs are multiplied with W in integers; see MatmulPrecision.
    """
    if is_native(x, dropped, weight, adapter.first, adapter.second):
        return _native_lora_linear(x, dropped, _FrozenLayer(weight, NOT_QUANTIZED, bias, integer), adapter)
    frozen = F.linear(x, weight.detach(), None if bias is None else bias.detach().to(x.dtype))
    return _add_lora(frozen, dropped, adapter)


def _add_lora(frozen: torch.Tensor, dropped: torch.Tensor, adapter: Adapter) -> torch.Tensor:
    """Adds an adapter's product to the result of a frozen layer with torch's matmuls."""
    return frozen + F.linear(F.linear(dropped, adapter.first), adapter.second) * adapter.scale


def _native_lora_linear(x: torch.Tensor, dropped: torch.Tensor, frozen: _FrozenLayer, adapter: Adapter) -> torch.Tensor:
    """Computes `lora_linear` with our kernel."""
    separate = None if dropped is x else dropped
    first, second, scale = adapter
    return cast(torch.Tensor, _LoraFunction.apply(x, separate, first, second, frozen, scale))


class _LoraFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        dropped: torch.Tensor | None,
        first: torch.Tensor,
        second: torch.Tensor,
        frozen: _FrozenLayer,
        scale: float,
    ) -> torch.Tensor:
        source = x if dropped is None else dropped
        sizes = _sizes(x, frozen, first, second)
        if source.shape != x.shape or (frozen.bias is not None and frozen.bias.shape != (len(frozen.weight),)):
            raise RuntimeError(f"the inputs do not match a layer with weights of shape {tuple(frozen.weight.shape)}.")
        y, h = x.new_empty(len(x), len(frozen.weight)), x.new_empty(len(x), len(first))
        ctx.save_for_backward(source, frozen.weight, first, second, h)
        ctx.format, ctx.scale, ctx.separate, ctx.sizes = frozen.format, scale, dropped is not None, sizes
        ctx.precision = frozen.precision(x)
        bias = None if frozen.bias is None else frozen.bias.float().contiguous()
        layer = (tensor.contiguous() for tensor in (frozen.weight, first, second))
        inputs = (tensor.contiguous() for tensor in (x, source))
        library.call("lora_forward", int(ctx.precision), frozen.format, sizes, *layer, scale, *inputs, bias, h, y)
        return y

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        source, weight, first, second, h = ctx.saved_tensors
        x_grad = source.new_empty(source.shape) if ctx.needs_input_grad[0] else None
        source_grad = source.new_empty(source.shape) if ctx.separate else None
        grads = x_grad, source_grad, first.new_empty(first.shape), second.new_empty(second.shape)
        layer = (tensor.contiguous() for tensor in (weight, first, second))
        inputs = (tensor.contiguous() for tensor in (grad_outputs[0], source, h))
        library.call("lora_backward", int(ctx.precision), ctx.format, ctx.sizes, *layer, ctx.scale, *inputs, *grads)
        return *grads, None, None


def _sizes(x: torch.Tensor, frozen: _FrozenLayer, first: torch.Tensor, second: torch.Tensor) -> Any:
    """Returns the struct LoraSizes of native.h.

    Raises RuntimeError if the adapter does not fit the layer, or the layer its input.
    """
    weight, (rows, inputs), (outputs, rank) = frozen.weight, x.shape, second.shape
    if weight.shape != (outputs, row_length(inputs, frozen.format)) or first.shape != (rank, inputs):
        raise RuntimeError(
            f"the adapter or the input does not match a layer with weights of shape {tuple(weight.shape)}."
        )
    return structs()["LoraSizes"](N=rows, I=inputs, O=outputs, R=rank)


def quantized_linear(
    x: torch.Tensor, weight: QuantizedWeight, bias: torch.Tensor | None = None, integer: Integer | None = None
) -> torch.Tensor:
    """Computes x W^T + bias for x (N, I), W (O, I) and bias (O,); returns (N, O). W and bias get no gradient.

    W is dequantized to the dtype of x, or to fp32 if the kernel multiplies only a few rows. With `integer`, more rows
    are multiplied in integers; see MatmulPrecision.
    """
    _require_fit(x, weight, bias)
    frozen = _FrozenLayer(weight.data, weight.format.number, bias, integer)
    return cast(torch.Tensor, _FrozenLinearFunction.apply(x, frozen))


def quantized_lora_linear(
    x: torch.Tensor,
    dropped: torch.Tensor,
    weight: QuantizedWeight,
    bias: torch.Tensor | None,
    adapter: Adapter,
    integer: Integer | None = None,
) -> torch.Tensor:
    """Computes `lora_linear` with a quantized weight: x W^T + bias + scale (dropped A^T) B^T.

    x and dropped (N, I), weight W (O, I), bias (O,), adapter A (R, I) and B (O, R); returns (N, O).
    """
    _require_fit(x, weight, bias)
    if is_native(x, dropped, adapter.first, adapter.second):
        frozen = _FrozenLayer(weight.data, weight.format.number, bias, integer)
        return _native_lora_linear(x, dropped, frozen, adapter)
    return _add_lora(quantized_linear(x, weight, bias, integer), dropped, adapter)


class _FrozenLinearFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, frozen: _FrozenLayer) -> torch.Tensor:
        data, format, bias, _ = frozen
        ctx.format, ctx.precision = format, frozen.precision(x)
        ctx.save_for_backward(data)
        if not is_native(x):
            weight = dequantize_rows(data, by_number(format), x.dtype)
            return F.linear(x, weight, None if bias is None else bias.to(x.dtype))
        y = x.new_empty(len(x), len(data))
        bias = None if bias is None else bias.float().contiguous()
        operands = data.contiguous(), x.contiguous(), bias, y
        library.call("quantized_forward", int(ctx.precision), format, *x.shape, len(data), *operands)
        return y

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (grad,), (data,), stored = grad_outputs, ctx.saved_tensors, by_number(ctx.format)
        if not is_native(grad):
            return grad @ dequantize_rows(data, stored, grad.dtype), None
        x_grad = grad.new_empty(len(grad), data.shape[1] // stored.bytes * stored.block)
        operands = data.contiguous(), grad.contiguous(), x_grad
        library.call("quantized_backward", int(ctx.precision), ctx.format, *x_grad.shape, len(data), *operands)
        return x_grad, None


class PackedCodes:
    """Packed copies of quantized weights, one after another in the same memory, so that huge pages hold them.

    Products with a packed copy do not dequantize the weight, but multiply its codes (native/code_tiles.cpp).
    """

    def __init__(self, weights: Sequence[QuantizedWeight]) -> None:
        self._memory, self._used = torch.frombuffer(memory_in_huge_pages(bytes_of_codes(weights)), dtype=torch.uint8), 0

    def pack(self, weight: QuantizedWeight) -> torch.Tensor:
        """Returns the copy of one of the weights."""
        packed = self._memory[self._used :][: bytes_of_codes([weight])]
        self._used += len(packed)
        library.call("pack_codes", weight.format.number, weight.data, weight.outputs, weight.inputs, packed)
        return packed


def bytes_of_codes(weights: Sequence[QuantizedWeight]) -> int:
    """Returns the bytes of packed copies of weights."""
    tile = constants()["STEP_TILE"]
    return sum(
        -(-weight.outputs // tile) * int(library.call("code_bytes_per_tile", weight.format.number, weight.inputs))
        for weight in weights
    )


def memory_for_copies(may_fill_memory: bool) -> float:
    """Returns how many bytes packed copies of the weights of a model may have; any number with `may_fill_memory`."""
    return inf if may_fill_memory else PACKED_RATIO * available_memory(torch.device("cpu"))


def code_linear(
    x: torch.Tensor, weight: QuantizedWeight, codes: torch.Tensor, bias: torch.Tensor | None, integer: Integer | None
) -> torch.Tensor:
    """Computes `quantized_linear` with the packed copy of a weight, whose codes it multiplies by 16-bit integers.

    With `integer` int8, by 8-bit integers. A row of the result does not depend on the others. x has no gradient.
    """
    _require_fit(x, weight, bias)
    y = x.new_empty(len(x), weight.outputs)
    sizes = weight.format.number, 1 if integer == "int8" else 2, *y.shape, weight.inputs
    bias = None if bias is None else bias.detach().float().contiguous()
    library.call("code_product", x.dtype == torch.bfloat16, *sizes, x.contiguous(), codes, bias, y)
    return y


def _require_fit(x: torch.Tensor, weight: QuantizedWeight, bias: torch.Tensor | None) -> None:
    shape = (weight.outputs, weight.inputs)
    if x.ndim != 2 or x.shape[1] != weight.inputs or (bias is not None and bias.shape != (weight.outputs,)):
        raise RuntimeError(f"an input of shape {tuple(x.shape)} does not match a quantized weight of shape {shape}.")
