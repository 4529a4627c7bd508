"""Dropout with a random mask that is cheaper to compute than the input is to read."""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.nn.functional as F

from sansgpu.kernels import native

_library = torch.library.Library("sansgpu", "FRAGMENT")
_library.define("dropout(Tensor x, float p, Tensor seed) -> Tensor")


def draw_seed(p: float) -> torch.Tensor:
    """Draws a seed for dropout with probability `p` from torch's generator, (1,) int64; zero if nothing is dropped."""
    return torch.randint(1 << 31, (1,)) if p else torch.zeros(1, dtype=torch.int64)


def seed_number(p: float) -> int:
    """Returns `draw_seed` as a number, without a tensor if nothing is dropped."""
    return int(draw_seed(p)) if p else 0


def dropout(x: torch.Tensor, p: float, training: bool) -> torch.Tensor:
    """Computes F.dropout, seeded from torch's generator; x of any shape.

    torch draws one number at a time, compiled or not, which takes longer than the norms and activations of a block.
    """
    if not training or p == 0:
        return x
    if native.takes(x):
        return cast(torch.Tensor, torch.ops.sansgpu.dropout(x.contiguous(), p, draw_seed(p)))
    return F.dropout(x, p)


def _dropout(x: torch.Tensor, p: float, seed: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(x)
    native.call("dropout", x.dtype == torch.bfloat16, x, out, x.numel(), p, seed)
    return out


def _output_shape(x: torch.Tensor, p: float, seed: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


def _setup_context(ctx: Any, inputs: tuple[torch.Tensor, float, torch.Tensor], output: torch.Tensor) -> None:
    _, ctx.p, seed = inputs
    ctx.save_for_backward(seed)


def _backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
    return torch.ops.sansgpu.dropout(grad.contiguous(), ctx.p, ctx.saved_tensors[0]), None, None


torch.library.register_fake("sansgpu::dropout", _output_shape)
_library.impl("dropout", _dropout, "CPU")
torch.library.register_autograd("sansgpu::dropout", _backward, setup_context=_setup_context)
