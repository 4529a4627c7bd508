"""Linear layers that multiply with our kernel, forward and backward.

The gradients of weights may be added in place to their fp32 sums over micro-batches.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, cast

import torch
import torch.nn.functional as F
from torch import nn

from sansgpu.kernels.matmul import Matmul, is_native, multiply, sum_of_matmuls

# For fewer rows, as in generation, torch is faster. For others it compiles a matmul for each new number of rows, which
# packed examples have in each micro-batch: that takes milliseconds, and the compiled code stays in memory.
MIN_ROWS = 16


class GradientSum(Protocol):
    """The sum of a weight's gradients: the attribute `gradient_sum` of a parameter, which an optimizer sets.

    The backward function of a kernel may add to it and return no gradient of the weight. The weight's
    post-accumulate-grad hooks run after the last such function all the same.
    """

    summed: bool  # False: return gradients to autograd
    gradient: torch.Tensor | None  # fp32 and contiguous once there is a gradient


def gradient_sum(weight: torch.Tensor) -> GradientSum | None:
    """Returns the sum to which backward passes add gradients of this weight, or None if autograd gets them."""
    return getattr(weight, "gradient_sum", None)


def weight_gradient(
    a: torch.Tensor, b: torch.Tensor, target: GradientSum | None, row_sums: torch.Tensor | None
) -> tuple[Matmul, torch.Tensor | None]:
    """Returns a matmul that computes a gradient a (M, K) times b (K, N), and the sums of the rows of a.

    Returns the gradient, too, or None if the matmul adds it to `target`.
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
    """nn.Linear with our matmuls where they are at least as fast: (..., inputs) -> (..., outputs)."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        x = autocasted(input)
        if not use_kernel(x, self):
            return super().forward(input)
        return _apply(x, self)[0]


def linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Computes F.linear with our kernel, whose results do not depend on the number of threads; x (N, inputs)."""
    if not is_native(x, weight):
        return F.linear(x, weight)
    product: torch.Tensor = _LinearFunction.apply(x, [None], weight, None)[0]
    return product


def use_kernel(x: torch.Tensor, *layers: Linear) -> bool:
    """Returns True if our kernel multiplies x, in the dtype of autocast, with the weights of these layers.

    The weight of a layer that stores it quantized is None.
    """
    weights: list[torch.Tensor | None] = [layer.weight for layer in layers]
    plain = [weight for weight in weights if weight is not None]
    large = x.numel() >= MIN_ROWS * layers[0].in_features
    return large and len(plain) == len(weights) and is_native(x, *plain)


def linear_each(x: torch.Tensor, *layers: Linear) -> tuple[torch.Tensor, ...]:
    """Applies several linear layers to the same input."""
    x = autocasted(x)
    return _apply(x, *layers) if use_kernel(x, *layers) else tuple(layer(x) for layer in layers)


def parameters_of(layers: Sequence[Linear]) -> list[torch.Tensor | None]:
    """Returns the weight and the bias of each layer, the arguments of our autograd functions."""
    return [parameter for layer in layers for parameter in (layer.weight, layer.bias)]


def gradient_sums(parameters: Sequence[torch.Tensor | None]) -> list[GradientSum | None]:
    """Returns where backward passes add the gradients of the weights among `parameters_of` layers."""
    return [gradient_sum(cast(torch.Tensor, weight)) for weight in parameters[::2]]


def multiply_each(
    x: torch.Tensor, weights: Sequence[torch.Tensor], biases: Sequence[torch.Tensor | None]
) -> tuple[list[Matmul], list[torch.Tensor]]:
    """Returns the results of layers with the input x (N, inputs), and the matmuls that compute them."""
    results = [x.new_empty(x.shape[0], weight.shape[0]) for weight in weights]
    layers = zip(weights, results, biases, strict=True)
    return [Matmul(x, weight.T, result, bias) for weight, result, bias in layers], results


def parameter_gradients(
    grads: Sequence[torch.Tensor],
    inputs: Sequence[torch.Tensor | None],
    needed: Sequence[bool],
    targets: Sequence[GradientSum | None],
) -> tuple[list[Matmul], list[torch.Tensor | None]]:
    """Returns the gradients of `parameters_of` layers, those that are `needed`, and the matmuls that compute them.

    `grads` (N, outputs) are the gradients of the layers' results. A gradient that is added to its target is None. The
    inputs (N, inputs) of layers with frozen weights are not read.
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
    results = _LinearFunction.apply(x, gradient_sums(parameters), *parameters)
    return cast(tuple[torch.Tensor, ...], results)


class _LinearFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, targets: list[GradientSum | None], *parameters: torch.Tensor | None
    ) -> tuple[torch.Tensor, ...]:
        weights, biases = cast(tuple[torch.Tensor, ...], parameters[::2]), parameters[1::2]
        rows = x.reshape(-1, x.shape[-1])
        of_x, _, *ctx.needed = ctx.needs_input_grad
        ctx.targets, ctx.shape = targets, x.shape
        ctx.save_for_backward(rows if any(ctx.needed[::2]) else None, *(weights if of_x else ()))
        matmuls, results = multiply_each(rows, weights, biases)
        multiply(x.dtype, *matmuls)
        return tuple(y.view(*x.shape[:-1], y.shape[-1]) for y in results)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, *weights = ctx.saved_tensors
        grads = [grad.reshape(-1, grad.shape[-1]) for grad in grad_outputs]
        matmuls, found = parameter_gradients(grads, [x] * len(grads), ctx.needed, ctx.targets)
        x_grad = None
        if weights:
            x_grad = grads[0].new_empty(ctx.shape)
            matmuls += sum_of_matmuls([*zip(grads, weights, strict=True)], x_grad.view(-1, ctx.shape[-1]))
        multiply(grads[0].dtype, *matmuls)
        return x_grad, None, *found
