"""Feed-forward networks of linear layers with an activation in between. N tokens, D width, F inner width."""

from __future__ import annotations

from typing import Any, cast

import torch

from sansgpu.kernels.activation import Kind, activate, activate_rows, differentiate_rows
from sansgpu.kernels.gradient_sum import GradientSum
from sansgpu.kernels.linear import Linear, TrainedParts, autocasted, gradient_sums, parameters_of, use_kernel
from sansgpu.kernels.matmul import matmul, sum_of_matmuls


def feed_forward(x: torch.Tensor, kind: Kind, up: Linear, down: Linear, gate: Linear | None = None) -> torch.Tensor:
    """Computes down(activation(up(x))), with SwiGLU down(silu(gate(x)) * up(x)): (..., D) -> (..., D)."""
    x, inner = autocasted(x), [up] if gate is None else [gate, up]
    if torch.compiler.is_compiling() or not use_kernel(x, *inner, down):
        out: torch.Tensor = down(activate(kind, *[layer(x) for layer in inner]))
        return out
    layers = [*inner, down]
    return cast(torch.Tensor, _FeedForwardFunction.apply(x, kind, gradient_sums(layers), *parameters_of(layers)))


class _FeedForwardFunction(torch.autograd.Function):
    """Saves the inputs of the activation; backward computes its result (N, F) again, together with its gradients."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, kind: Kind, targets: list[GradientSum | None], *parameters: torch.Tensor | None
    ) -> torch.Tensor:
        weights, biases = cast(tuple[torch.Tensor, ...], parameters[::2]), parameters[1::2]
        rows = x.reshape(-1, x.shape[-1])
        first, *second = [matmul(rows, w.T, b) for w, b in zip(weights[:-1], biases[:-1], strict=True)]
        inputs = (first, second[0] if second else None)
        ctx.kind, ctx.shape, ctx.of_x = kind, x.shape, ctx.needs_input_grad[0]
        ctx.trained = TrainedParts.of(parameters, ctx.needs_input_grad[3:], targets)
        ctx.save_for_backward(rows if any(ctx.trained.weights[:-1]) else None, *inputs, *weights)
        return matmul(activate_rows(kind, *inputs), weights[-1].T, biases[-1]).view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, first, second, *weights, down = ctx.saved_tensors
        grad = grad_outputs[0].reshape(-1, grad_outputs[0].shape[-1])
        activated = torch.empty_like(first)
        both = differentiate_rows(ctx.kind, matmul(grad, down), first, second, activated)
        grads = [each for each in both if each is not None]
        gradients = ctx.trained.gradients([*grads, grad], [*[x] * len(grads), activated])
        x_grad = sum_of_matmuls(list(zip(grads, weights, strict=True))).view(ctx.shape) if ctx.of_x else None
        return x_grad, None, None, *gradients
