"""Dropout whose randomness costs less than reading the numbers."""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.nn.functional as F

from sansgpu.kernels import native

_library = torch.library.Library("sansgpu", "FRAGMENT")
_library.define("dropout(Tensor x, float p, Tensor seed) -> Tensor")


def dropout(x: torch.Tensor, p: float, training: bool) -> torch.Tensor:
    """F.dropout, its randomness drawn from torch's generator; x of any shape.

    torch draws one number at a time, compiled or not, which takes longer than a block's norms and activations.
    """
    if not training or p == 0:
        return x
    if native.available() and x.device.type == "cpu" and x.dtype in (torch.float32, torch.bfloat16):
        return cast(torch.Tensor, torch.ops.sansgpu.dropout(x.contiguous(), p, torch.randint(1 << 31, (1,))))
    return F.dropout(x, p)


def _same_shape(x: torch.Tensor, p: float, seed: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


def _keep(ctx: Any, inputs: tuple[torch.Tensor, float, torch.Tensor], output: torch.Tensor) -> None:
    _, ctx.p, seed = inputs
    ctx.save_for_backward(seed)


def _backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
    return torch.ops.sansgpu.dropout(grad.contiguous(), ctx.p, ctx.saved_tensors[0]), None, None


torch.library.register_fake("sansgpu::dropout", _same_shape)
torch.library.register_autograd("sansgpu::dropout", _backward, setup_context=_keep)
