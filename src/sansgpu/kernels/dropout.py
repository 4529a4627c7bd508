"""Dropout with a random mask that is cheaper to compute than the input is to read."""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.nn.functional as F

from sansgpu.kernels import library


def draw_seed(p: float) -> torch.Tensor:
    """Draws a seed for dropout with probability `p` from torch's generator, (1,) int64; zero if nothing is dropped."""
    return torch.randint(1 << 31, (1,)) if p else torch.zeros(1, dtype=torch.int64)


def seed_number(p: float) -> int:
    """Returns `draw_seed` as a number, without a tensor if nothing is dropped."""
    return int(draw_seed(p)) if p else 0


def dropout(x: torch.Tensor, p: float, training: bool) -> torch.Tensor:
    """Computes F.dropout, seeded from torch's generator; x of any shape.

    torch draws one number at a time, which takes longer than the norms and activations of a block.
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
