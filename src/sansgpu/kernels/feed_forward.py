"""Feed-forward networks of linear layers with an activation in between. N tokens, D width, F inner width."""

from __future__ import annotations

from typing import Any, cast

import torch

from sansgpu.kernels import library
from sansgpu.kernels.linear import (
    GradientSum,
    Linear,
    autocasted,
    gradient_sums,
    multiply_each,
    parameter_gradients,
    parameters_of,
    precision_of,
    use_kernel,
)
from sansgpu.kernels.matmul import Matmul, MatmulPrecision, sum_of_matmuls
from sansgpu.kernels.pointwise import Activation, activate


def feed_forward(
    x: torch.Tensor, activation: Activation, up: Linear, down: Linear, gate: Linear | None = None
) -> torch.Tensor:
    """Computes down(activation(up(x))), with SwiGLU down(silu(gate(x)) * up(x)): (..., D) -> (..., D)."""
    x, inner = autocasted(x), [up] if gate is None else [gate, up]
    if not use_kernel(x, *inner, down):
        out: torch.Tensor = down(activate(activation, *[layer(x) for layer in inner]))
        return out
    parameters, precision = parameters_of([*inner, down]), precision_of(x, down)
    result = _FeedForwardFunction.apply(x, precision, activation, gradient_sums(parameters), *parameters)
    return cast(torch.Tensor, result)


class _FeedForwardFunction(torch.autograd.Function):
    """Saves the inputs of the activation; backward computes its result (N, F) again, together with its gradients."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        precision: MatmulPrecision,
        activation: Activation,
        targets: list[GradientSum | None],
        *parameters: torch.Tensor | None,
    ) -> torch.Tensor:
        weights, biases = cast(tuple[torch.Tensor, ...], parameters[::2]), parameters[1::2]
        rows = x.reshape(-1, x.shape[-1])
        ups, inputs = multiply_each(rows, weights[:-1], biases[:-1])
        first, second = inputs[0], inputs[1] if len(inputs) > 1 else None
        activated = torch.empty_like(first)
        down, (out,) = multiply_each(activated, weights[-1:], biases[-1:])
        _call("feed_forward", precision, activation, ups, down, first, second, activated)
        ctx.of_x, _, _, _, *ctx.needed = ctx.needs_input_grad
        ctx.precision, ctx.activation, ctx.shape, ctx.targets = precision, activation, x.shape, targets
        ctx.save_for_backward(rows if any(ctx.needed[:-2:2]) else None, first, second, *weights)
        return out.view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, first, second, *weights, down = ctx.saved_tensors
        grad = grad_outputs[0].reshape(-1, grad_outputs[0].shape[-1])
        activated, activated_grad = torch.empty_like(first), torch.empty_like(first)
        grads = [torch.empty_like(first) for _ in weights]
        of_weights, gradients = parameter_gradients(
            [*grads, grad], [*[x] * len(grads), activated], ctx.needed, ctx.targets
        )
        of_inputs, x_grad = [], None
        if ctx.of_x:
            x_grad = first.new_empty(ctx.shape)
            of_inputs = sum_of_matmuls([*zip(grads, weights, strict=True)], x_grad.view(-1, ctx.shape[-1]))
        inputs, outputs = (activated_grad, first, second), (grads[0], grads[1] if second is not None else None)
        of_activated = [Matmul(grad, down, activated_grad)]
        options = ctx.precision, ctx.activation
        after = [*of_weights, *of_inputs]
        _call("feed_forward_gradient", *options, of_activated, after, *inputs, *outputs, activated)
        return x_grad, None, None, None, *gradients


def _call(
    kernel: str,
    precision: MatmulPrecision,
    activation: Activation,
    before: list[Matmul],
    after: list[Matmul],
    *tensors: torch.Tensor | None,
) -> None:
    """Calls a kernel of native/feed_forward.cpp; the last of the activation's tensors is its result."""
    activated = cast(torch.Tensor, tensors[-1])
    first, second = (tuple(matmul.struct for matmul in matmuls) for matmuls in (before, after))
    lists = (first, len(first), second, len(second))
    library.call(kernel, int(precision), *lists, int(activation), *tensors, activated.numel())
