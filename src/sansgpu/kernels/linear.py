"""Linear layers that multiply with our kernel, forward and backward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import nn

from sansgpu.kernels.gradient_sum import GradientSum, gradient_sum, weight_gradient
from sansgpu.kernels.matmul import is_native, matmul, sum_of_matmuls

MIN_ROWS = 256  # for fewer, packing the weight costs more than our kernel gains; generation has one row at a time


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
    """Returns True if our kernel multiplies x, in the dtype of autocast, with the weights of these layers."""
    return x.numel() >= MIN_ROWS * layers[0].in_features and is_native(x, *(layer.weight for layer in layers))


def linear_each(x: torch.Tensor, *layers: Linear) -> tuple[torch.Tensor, ...]:
    """Applies several linear layers to the same input."""
    x = autocasted(x)
    return _apply(x, *layers) if use_kernel(x, *layers) else tuple(layer(x) for layer in layers)


def parameters_of(layers: Sequence[Linear]) -> list[torch.Tensor | None]:
    """Returns the weight and the bias of each layer, the arguments of our autograd functions."""
    return [parameter for layer in layers for parameter in (layer.weight, layer.bias)]


def gradient_sums(layers: Sequence[Linear]) -> list[GradientSum | None]:
    """Returns where backward passes add the gradients of the weights."""
    return [gradient_sum(layer.weight) for layer in layers]


@dataclass(frozen=True)
class TrainedParts:
    """Which parameters of some linear layers are trained, for their backward function."""

    weights: Sequence[bool]
    biases: Sequence[torch.dtype | None]  # dtypes of those trained
    targets: Sequence[GradientSum | None]  # where the gradient of each weight is added; None: returned to autograd

    @staticmethod
    def of(
        parameters: Sequence[torch.Tensor | None], needed: Sequence[bool], targets: Sequence[GradientSum | None]
    ) -> TrainedParts:
        """Takes `parameters_of` the layers and which of them need gradients."""
        dtypes = [bias.dtype if bias is not None else None for bias in parameters[1::2]]
        biases = [dtype if of_bias else None for dtype, of_bias in zip(dtypes, needed[1::2], strict=True)]
        return TrainedParts(needed[::2], biases, targets)

    def gradients(self, grads: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
        """Returns the gradients of all parameters from those of the layers' results (N, outputs) and their inputs."""
        found: list[torch.Tensor | None] = []
        for layer in zip(grads, inputs, self.weights, self.biases, self.targets, strict=True):
            grad, x, of_weight, bias_dtype, target = layer
            weight_grad = bias_grad = None
            if of_weight:
                weight_grad, bias_grad = weight_gradient(grad.T, x, target, row_sums=bias_dtype is not None)
            elif bias_dtype is not None:
                bias_grad = grad.sum(0, dtype=torch.float32)
            found += [weight_grad, None if bias_grad is None or bias_dtype is None else bias_grad.to(bias_dtype)]
        return found


def _apply(x: torch.Tensor, *layers: Linear) -> tuple[torch.Tensor, ...]:
    results = _LinearFunction.apply(x, gradient_sums(layers), *parameters_of(layers))
    return cast(tuple[torch.Tensor, ...], results)


class _LinearFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, targets: list[GradientSum | None], *parameters: torch.Tensor | None
    ) -> tuple[torch.Tensor, ...]:
        weights, biases = cast(tuple[torch.Tensor, ...], parameters[::2]), parameters[1::2]
        rows = x.reshape(-1, x.shape[-1])
        ctx.trained, ctx.shape = TrainedParts.of(parameters, ctx.needs_input_grad[2:], targets), x.shape
        ctx.save_for_backward(rows if any(ctx.trained.weights) else None, *(weights if ctx.needs_input_grad[0] else ()))
        outputs = [matmul(rows, weight.T, bias) for weight, bias in zip(weights, biases, strict=True)]
        return tuple(y.view(*x.shape[:-1], y.shape[-1]) for y in outputs)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, *weights = ctx.saved_tensors
        grads = [grad.reshape(-1, grad.shape[-1]) for grad in grad_outputs]
        gradients = ctx.trained.gradients(grads, [x] * len(grads))
        x_grad = sum_of_matmuls(list(zip(grads, weights, strict=True))).view(ctx.shape) if weights else None
        return x_grad, None, *gradients
