"""Linear layers that use our matmul kernel, forward and backward.

Weight gradients can be accumulated over micro-batches in fp32, in place.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, cast

import torch
import torch.nn.functional as F
from torch import nn

from sansgpu.kernels.matmul import Integer, Matmul, MatmulPrecision, is_native, multiply, sum_of_matmuls

# With fewer rows, as in generation, torch is faster. With more rows, torch compiles a matmul for each new number of
# rows, and packed examples have a new one in every micro-batch. Compiling takes milliseconds, and the code stays in
# memory.
MIN_ROWS = 16


class GradientSum(Protocol):
    """The accumulated gradient of a weight, which an optimizer attaches to the parameter as `gradient_sum`.

    A kernel's backward function may add to it instead of returning the weight's gradient. Autograd still calls the
    weight's post-accumulate-grad hooks, after the last such function.
    """

    summed: bool  # False: kernels return gradients to autograd
    gradient: torch.Tensor | None  # fp32 and contiguous once there is a gradient


def gradient_sum(weight: torch.Tensor) -> GradientSum | None:
    """Returns the GradientSum of a weight, or None if its gradients are returned to autograd."""
    return getattr(weight, "gradient_sum", None)


def weight_gradient(
    a: torch.Tensor, b: torch.Tensor, target: GradientSum | None, row_sums: torch.Tensor | None
) -> tuple[Matmul, torch.Tensor | None]:
    """Returns the matmul for a weight gradient a (M, K) times b (K, N), and the tensor that it stores the gradient in.

    The tensor is None if the matmul adds the gradient to `target`. The matmul also stores the sums of the rows of a in
    `row_sums`, if given.
    """
    shape = a.shape[0], b.shape[1]
    if target is None or not target.summed:
        gradient = a.new_empty(shape)
        return Matmul(a, b, gradient, row_sums=row_sums), gradient
    add = target.gradient is not None
    if target.gradient is None:
        target.gradient = a.new_empty(shape, dtype=torch.float32)
    return Matmul(a, b, target.gradient, add=add, row_sums=row_sums), None


def autocast_dtype(x: torch.Tensor) -> torch.dtype | None:
    """Returns the dtype to which autocast converts the inputs of matmuls, or None if autocast is disabled."""
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None


def autocasted(x: torch.Tensor) -> torch.Tensor:
    """Returns x in autocast's dtype if autocast is enabled; several linear layers can then share one copy."""
    return x.to(autocast_dtype(x) or x.dtype)


class Linear(nn.Linear):
    """nn.Linear with our matmuls where they are at least as fast: (..., inputs) -> (..., outputs).

    With `integer`, matmuls are computed in integers, forward and backward; see MatmulPrecision. Muon
    orthogonalizes each of `row_blocks` blocks of the weight's rows separately, such as those of each attention head.
    """

    integer: Integer | None = None
    row_blocks = 1
    head_blocks = (1, 1)  # blocks of rows and of columns, one per attention head, which Muon updates separately

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        x = autocasted(input)
        if not use_kernel(x, self):
            return super().forward(input)
        return _apply(x, self)[0]


def linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Computes F.linear with our kernel, whose results do not depend on the number of threads; x (N, inputs)."""
    if not is_native(x, weight):
        return F.linear(x, weight)
    product: torch.Tensor = _LinearFunction.apply(x, MatmulPrecision.of(x.dtype), [None], weight, None)[0]
    return product


def use_kernel(x: torch.Tensor, *layers: Linear) -> bool:
    """Returns True if our kernel supports x, already in autocast's dtype, with the weights of these layers.

    Returns False for layers with a quantized weight, whose `weight` is None.
    """
    weights: list[torch.Tensor | None] = [layer.weight for layer in layers]
    plain = [weight for weight in weights if weight is not None]
    large = x.numel() >= MIN_ROWS * layers[0].in_features
    return large and len(plain) == len(weights) and is_native(x, *plain)


def precision_of(x: torch.Tensor, layer: Linear) -> MatmulPrecision:
    """Returns the precision in which a layer, like its whole model, multiplies x, already in autocast's dtype."""
    return MatmulPrecision.of(x.dtype, layer.integer)


def linear_each(x: torch.Tensor, *layers: Linear) -> tuple[torch.Tensor, ...]:
    """Applies several linear layers to the same input."""
    x = autocasted(x)
    return _apply(x, *layers) if use_kernel(x, *layers) else tuple(layer(x) for layer in layers)


def parameters_of(layers: Sequence[Linear]) -> list[torch.Tensor | None]:
    """Returns the weight and the bias of each layer, in the order that our autograd functions take."""
    return [parameter for layer in layers for parameter in (layer.weight, layer.bias)]


def gradient_sums(parameters: Sequence[torch.Tensor | None]) -> list[GradientSum | None]:
    """Returns the `gradient_sum` of each weight in `parameters`, a result of `parameters_of`."""
    return [gradient_sum(cast(torch.Tensor, weight)) for weight in parameters[::2]]


def multiply_each(
    x: torch.Tensor, weights: Sequence[torch.Tensor], biases: Sequence[torch.Tensor | None]
) -> tuple[list[Matmul], list[torch.Tensor]]:
    """Returns the matmuls of layers with the input x (N, inputs), and the tensors that they store the results in."""
    results = [x.new_empty(x.shape[0], weight.shape[0]) for weight in weights]
    layers = zip(weights, results, biases, strict=True)
    return [Matmul(x, weight.T, result, bias) for weight, result, bias in layers], results


def parameter_gradients(
    grads: Sequence[torch.Tensor],
    inputs: Sequence[torch.Tensor | None],
    needed: Sequence[bool],
    targets: Sequence[GradientSum | None],
) -> tuple[list[Matmul], list[torch.Tensor | None]]:
    """Returns the matmuls for the gradients of a result of `parameters_of`, and the tensors that they store them in.

    `grads` (N, outputs) are the gradients of the layers' results. A tensor is None if its gradient is not `needed` or
    is added to its target. The inputs (N, inputs) of layers with frozen weights are not read.
    """
    matmuls: list[Matmul] = []
    found: list[torch.Tensor | None] = []
    for grad, x, of_weight, of_bias, target in zip(grads, inputs, needed[::2], needed[1::2], targets, strict=True):
        weight_grad, bias_grad = None, grad.new_empty(grad.shape[1], dtype=torch.float32) if of_bias else None
        if of_weight and x is not None:
            matmul, weight_grad = weight_gradient(grad.T, x, target, bias_grad)
            matmuls.append(matmul)
        elif bias_grad is not None:
            matmuls.append(Matmul(grad.T, grad.new_ones(grad.shape[0], 1), bias_grad[:, None]))
        found += [weight_grad, bias_grad]
    return matmuls, found


def _apply(x: torch.Tensor, *layers: Linear) -> tuple[torch.Tensor, ...]:
    parameters = parameters_of(layers)
    results = _LinearFunction.apply(x, precision_of(x, layers[0]), gradient_sums(parameters), *parameters)
    return cast(tuple[torch.Tensor, ...], results)


class _LinearFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        precision: MatmulPrecision,
        targets: list[GradientSum | None],
        *parameters: torch.Tensor | None,
    ) -> tuple[torch.Tensor, ...]:
        weights, biases = cast(tuple[torch.Tensor, ...], parameters[::2]), parameters[1::2]
        rows = x.reshape(-1, x.shape[-1])
        of_x, _, _, *ctx.needed = ctx.needs_input_grad
        ctx.precision, ctx.targets, ctx.shape = precision, targets, x.shape
        ctx.save_for_backward(rows if any(ctx.needed[::2]) else None, *(weights if of_x else ()))
        matmuls, results = multiply_each(rows, weights, biases)
        multiply(precision, *matmuls)
        return tuple(y.view(*x.shape[:-1], y.shape[-1]) for y in results)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, *weights = ctx.saved_tensors
        grads = [grad.reshape(-1, grad.shape[-1]) for grad in grad_outputs]
        matmuls, found = parameter_gradients(grads, [x] * len(grads), ctx.needed, ctx.targets)
        of_inputs, x_grad = [], None
        if weights:
            x_grad = grads[0].new_empty(ctx.shape)
            of_inputs = sum_of_matmuls([*zip(grads, weights, strict=True)], x_grad.view(-1, ctx.shape[-1]))
        multiply(ctx.precision, *matmuls, *of_inputs)
        return x_grad, None, None, *found
