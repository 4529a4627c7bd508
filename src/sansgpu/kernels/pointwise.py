"""Element-wise functions: activations and dropout.

The C++ kernels of activations compute in fp32, round once, and save only their inputs. Dropout saves only its seed:
computing the random mask again is cheaper than reading it from memory.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum
from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F

from sansgpu.kernels import library
from sansgpu.kernels.c_functions import constants


class Activation(IntEnum):
    """The functions of activation.cpp."""

    SWIGLU = constants()["SWIGLU"]
    GELU_TANH = constants()["GELU_TANH"]
    GELU = constants()["GELU"]
    RELU_SQUARED = constants()["RELU_SQUARED"]
    RELU = constants()["RELU"]
    GEGLU = constants()["GEGLU"]
    GEGLU_TANH = constants()["GEGLU_TANH"]


def activate(activation: Activation, x: torch.Tensor, y: torch.Tensor | None = None) -> torch.Tensor:
    """Computes an activation; if it is gated, x is the gate and y the values that it multiplies."""
    return _FUNCTIONS[activation](x) if y is None else gated(activation, x, y)


def swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Computes silu(gate) * up (arXiv 2002.05202); both have the same shape."""
    return gated(Activation.SWIGLU, gate, up)


def gated(activation: Activation, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Computes activation(gate) * up, where the activation is SiLU, GELU or its tanh approximation."""
    if library.takes(gate, up) and gate.dtype == up.dtype and gate.shape == up.shape:
        return cast(torch.Tensor, _ActivationFunction.apply(activation, gate, up))
    return GATES[activation](gate) * up


def gated_half(activation: Activation, joined: torch.Tensor) -> torch.Tensor:
    """Computes `gated` where both inputs are the halves of one tensor, the gate first: (..., 2F) -> (..., F)."""
    if library.takes(joined):
        return cast(torch.Tensor, _GatedHalf.apply(activation, joined))
    gate, up = joined.chunk(2, dim=-1)
    return GATES[activation](gate) * up


def gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    """Computes GELU in the tanh approximation (arXiv 1606.08415), as in GPT-2."""
    if library.takes(x):
        return cast(torch.Tensor, _ActivationFunction.apply(Activation.GELU_TANH, x, None))
    return F.gelu(x, approximate="tanh")


def gelu(x: torch.Tensor) -> torch.Tensor:
    """Computes exact GELU, as in BERT."""
    if library.takes(x):
        return cast(torch.Tensor, _ActivationFunction.apply(Activation.GELU, x, None))
    return F.gelu(x)


def relu(x: torch.Tensor) -> torch.Tensor:
    if library.takes(x):
        return cast(torch.Tensor, _ActivationFunction.apply(Activation.RELU, x, None))
    return F.relu(x)


def relu_squared(x: torch.Tensor) -> torch.Tensor:
    """Computes relu(x) ** 2 (arXiv 2109.08668)."""
    if library.takes(x):
        return cast(torch.Tensor, _ActivationFunction.apply(Activation.RELU_SQUARED, x, None))
    return F.relu(x).square()


_FUNCTIONS: dict[Activation, Callable[[torch.Tensor], torch.Tensor]] = {
    Activation.GELU_TANH: gelu_tanh,
    Activation.GELU: gelu,
    Activation.RELU_SQUARED: relu_squared,
    Activation.RELU: relu,
}
GATES: dict[Activation, Callable[[torch.Tensor], torch.Tensor]] = {
    Activation.SWIGLU: F.silu,
    Activation.GEGLU: F.gelu,
    Activation.GEGLU_TANH: partial(F.gelu, approximate="tanh"),
}


class _ActivationFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, activation: Activation, x: torch.Tensor, y: torch.Tensor | None) -> torch.Tensor:
        x, y = x.contiguous(), None if y is None else y.contiguous()
        ctx.activation = activation
        ctx.save_for_backward(x, y)
        out = torch.empty_like(x)
        library.call("activation", int(activation), x.dtype == torch.bfloat16, x, y, out, *[x.numel()] * 3)
        return out

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, y = ctx.saved_tensors
        x_grad, y_grad = torch.empty_like(x), None if y is None else torch.empty_like(y)
        inputs = (int(ctx.activation), x.dtype == torch.bfloat16, grad_outputs[0].contiguous(), x, y)
        library.call("activation_gradient", *inputs, x_grad, y_grad, None, *[x.numel()] * 3)
        return None, x_grad, y_grad


class _GatedHalf(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, activation: Activation, joined: torch.Tensor) -> torch.Tensor:
        joined = joined.contiguous()
        ctx.activation = activation
        ctx.save_for_backward(joined)
        gate, up = joined.chunk(2, dim=-1)
        out = torch.empty_like(gate, memory_format=torch.contiguous_format)
        sizes = out.numel(), out.shape[-1], joined.shape[-1]
        library.call("activation", int(activation), joined.dtype == torch.bfloat16, gate, up, out, *sizes)
        return out

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (joined,) = ctx.saved_tensors
        grad, joined_grad = grad_outputs[0].contiguous(), torch.empty_like(joined)
        inputs = (int(ctx.activation), joined.dtype == torch.bfloat16, grad, *joined.chunk(2, dim=-1))
        sizes = grad.numel(), grad.shape[-1], joined.shape[-1]
        library.call("activation_gradient", *inputs, *joined_grad.chunk(2, dim=-1), None, *sizes)
        return None, joined_grad


def draw_seed(p: float) -> torch.Tensor:
    """Draws a seed for dropout with probability `p` from torch's generator, (1,) int64; zero if nothing is dropped."""
    return torch.randint(1 << 31, (1,)) if p else torch.zeros(1, dtype=torch.int64)


def seed_number(p: float) -> int:
    """Returns the result of `draw_seed` as an int; allocates no tensor if nothing is dropped."""
    return int(draw_seed(p)) if p else 0


def dropout(x: torch.Tensor, p: float, training: bool) -> torch.Tensor:
    """Computes F.dropout, seeded from torch's generator; x of any shape.

    torch's own dropout draws one random number at a time, which takes longer than a block's norms and activations.
    """
    if not training or p == 0:
        return x
    if library.takes(x):
        return cast(torch.Tensor, _DropoutFunction.apply(x, p, draw_seed(p)))
    return F.dropout(x, p)


class _DropoutFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, p: float, seed: torch.Tensor) -> torch.Tensor:
        ctx.p, ctx.seed = p, seed
        return _dropped(x, p, seed)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return _dropped(grad_outputs[0], ctx.p, ctx.seed), None, None


def _dropped(x: torch.Tensor, p: float, seed: torch.Tensor) -> torch.Tensor:
    x = x.contiguous()
    out = torch.empty_like(x)
    library.call("dropout", x.dtype == torch.bfloat16, x, out, x.numel(), p, seed)
    return out
