"""Activations of feed-forward layers. Their C++ kernels compute in fp32, round once, and save only their inputs."""

from __future__ import annotations

from enum import IntEnum
from typing import Any, cast

import torch
import torch.nn.functional as F

from sansgpu.kernels import native


class _Kind(IntEnum):
    """The functions of activation.cpp."""

    SWIGLU = 0
    GELU_TANH = 1
    GELU = 2
    RELU_SQUARED = 3


def swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Computes silu(gate) * up (arXiv 2002.05202); both have one shape."""
    if native.usable(gate, up) and gate.dtype == up.dtype and gate.shape == up.shape:
        return cast(torch.Tensor, _Activation.apply(_Kind.SWIGLU, gate, up))
    return F.silu(gate) * up


def gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    """Computes GELU in the tanh approximation (arXiv 1606.08415), as in GPT-2.

    (1 + tanh(u)) / 2 equals sigmoid(2u), which takes a third of the time when compiled.
    """
    if native.usable(x):
        return cast(torch.Tensor, _Activation.apply(_Kind.GELU_TANH, x, None))
    if not torch.compiler.is_compiling():
        return F.gelu(x, approximate="tanh")
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return (wide * torch.sigmoid((8 / torch.pi) ** 0.5 * (wide + 0.044715 * wide * wide * wide))).to(x.dtype)


def gelu(x: torch.Tensor) -> torch.Tensor:
    """Computes exact GELU, as in BERT."""
    if native.usable(x):
        return cast(torch.Tensor, _Activation.apply(_Kind.GELU, x, None))
    return F.gelu(x)


def relu_squared(x: torch.Tensor) -> torch.Tensor:
    """Computes relu(x) ** 2 (arXiv 2109.08668)."""
    if native.usable(x):
        return cast(torch.Tensor, _Activation.apply(_Kind.RELU_SQUARED, x, None))
    return F.relu(x).square()


class _Activation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, kind: _Kind, x: torch.Tensor, y: torch.Tensor | None) -> torch.Tensor:
        x, y = x.contiguous(), None if y is None else y.contiguous()
        ctx.kind = kind
        ctx.save_for_backward(x, y)
        out = torch.empty_like(x)
        native.call("activation", int(kind), x.dtype == torch.bfloat16, x, y, out, x.numel())
        return out

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, y = ctx.saved_tensors
        grad = grad_outputs[0].contiguous()
        x_grad, y_grad = torch.empty_like(x), None if y is None else torch.empty_like(y)
        narrow = x.dtype == torch.bfloat16
        native.call("activation_gradient", int(ctx.kind), narrow, grad, x, y, x_grad, y_grad, x.numel())
        return None, x_grad, y_grad
