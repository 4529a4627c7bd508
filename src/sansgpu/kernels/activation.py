"""Activations of feed-forward layers. Their C++ kernels compute in fp32, round once, and save only their inputs."""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum
from typing import Any, cast

import torch
import torch.nn.functional as F

from sansgpu.kernels import library
from sansgpu.kernels.c_functions import constants


class Kind(IntEnum):
    """The functions of activation.cpp."""

    SWIGLU = constants()["SWIGLU"]
    GELU_TANH = constants()["GELU_TANH"]
    GELU = constants()["GELU"]
    RELU_SQUARED = constants()["RELU_SQUARED"]
    RELU = constants()["RELU"]


def activate(kind: Kind, x: torch.Tensor, y: torch.Tensor | None = None) -> torch.Tensor:
    """Computes an activation; with SwiGLU, x is the gate and y what it multiplies."""
    return _ACTIVATIONS[kind](x) if y is None else swiglu(x, y)


def swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Computes silu(gate) * up (arXiv 2002.05202); both have one shape."""
    if library.takes(gate, up) and gate.dtype == up.dtype and gate.shape == up.shape:
        return cast(torch.Tensor, _Activation.apply(Kind.SWIGLU, gate, up))
    return F.silu(gate) * up


def gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    """Computes GELU in the tanh approximation (arXiv 1606.08415), as in GPT-2."""
    if library.takes(x):
        return cast(torch.Tensor, _Activation.apply(Kind.GELU_TANH, x, None))
    return F.gelu(x, approximate="tanh")


def gelu(x: torch.Tensor) -> torch.Tensor:
    """Computes exact GELU, as in BERT."""
    if library.takes(x):
        return cast(torch.Tensor, _Activation.apply(Kind.GELU, x, None))
    return F.gelu(x)


def relu(x: torch.Tensor) -> torch.Tensor:
    if library.takes(x):
        return cast(torch.Tensor, _Activation.apply(Kind.RELU, x, None))
    return F.relu(x)


def relu_squared(x: torch.Tensor) -> torch.Tensor:
    """Computes relu(x) ** 2 (arXiv 2109.08668)."""
    if library.takes(x):
        return cast(torch.Tensor, _Activation.apply(Kind.RELU_SQUARED, x, None))
    return F.relu(x).square()


_ACTIVATIONS: dict[Kind, Callable[[torch.Tensor], torch.Tensor]] = {
    Kind.GELU_TANH: gelu_tanh,
    Kind.GELU: gelu,
    Kind.RELU_SQUARED: relu_squared,
    Kind.RELU: relu,
}


class _Activation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, kind: Kind, x: torch.Tensor, y: torch.Tensor | None) -> torch.Tensor:
        x, y = x.contiguous(), None if y is None else y.contiguous()
        ctx.kind = kind
        ctx.save_for_backward(x, y)
        out = torch.empty_like(x)
        library.call("activation", int(kind), x.dtype == torch.bfloat16, x, y, out, x.numel())
        return out

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, y = ctx.saved_tensors
        x_grad, y_grad = torch.empty_like(x), None if y is None else torch.empty_like(y)
        inputs = (int(ctx.kind), x.dtype == torch.bfloat16, grad_outputs[0].contiguous(), x, y)
        library.call("activation_gradient", *inputs, x_grad, y_grad, None, x.numel())
        return None, x_grad, y_grad
