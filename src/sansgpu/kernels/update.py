"""Gradient accumulation, gradient norm and AdamW, each in one pass over memory."""

from __future__ import annotations

import math

import torch

from sansgpu.kernels import native

_library = torch.library.Library("sansgpu", "FRAGMENT")
_library.define("accumulate_(Tensor(a!) sum, Tensor addend) -> ()")
_library.define("squared_norm(Tensor x) -> float")
_library.define(
    "adamw_(Tensor(a!) weight, Tensor(b!) first, Tensor(c!) second, Tensor grad, Tensor(d!)? working, float lr, "
    "float beta1, float beta2, float eps, float decay, int step, float scale, int seed) -> ()"
)


def _use_native(*tensors: torch.Tensor | None) -> bool:
    return native.available() and all(
        t is None or (t.device.type == "cpu" and t.is_contiguous() and t.dtype in (torch.float32, torch.bfloat16))
        for t in tensors
    )


def add_product(total: torch.Tensor, product: torch.Tensor) -> torch.Tensor:
    """Adds `product`, of the same or a narrower dtype, to `total` in place; returns `total`."""
    if total.dtype == torch.float32 and product.dtype == torch.bfloat16 and _use_native(total, product):
        torch.ops.sansgpu.accumulate_(total, product)
        return total
    return total.add_(product)


def global_norm(gradients: list[torch.Tensor]) -> float:
    """Returns the 2-norm of all gradients concatenated."""
    if _use_native(*gradients):
        return math.sqrt(math.fsum(torch.ops.sansgpu.squared_norm(gradient) for gradient in gradients))
    norms = [float(torch.linalg.vector_norm(g, dtype=torch.promote_types(g.dtype, torch.float32))) for g in gradients]
    return math.hypot(*norms)


def adamw(
    weight: torch.Tensor,
    first: torch.Tensor,
    second: torch.Tensor,
    gradient: torch.Tensor,
    working: torch.Tensor | None,
    *,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    step: int,
    scale: float,
    seed: int = 0,
) -> None:
    """Applies step number `step` (1, 2, ...) of AdamW (arXiv 1711.05101) in place, with `gradient` times `scale`.

    All tensors have one shape; the moments are fp32. `working`, a copy of the weight in the compute dtype, is updated
    too. A bf16 weight has no copy and is rounded stochastically from `seed` (63 bits), which must change every step.
    """
    if _use_native(weight, first, second, gradient, working):
        settings = (lr, *betas, eps, weight_decay, step, scale, seed)
        torch.ops.sansgpu.adamw_(weight, first, second, gradient, working, *settings)
        return
    steps = torch.tensor(float(step), device=weight.device)
    dtype = torch.promote_types(weight.dtype, torch.float32)
    wide, m, v, g = (t.to(dtype).contiguous() for t in (weight, first, second, gradient))  # the kernel ignores strides
    torch._fused_adamw_(
        [wide], [g * scale], [m], [v], [], [steps],
        lr=lr, beta1=betas[0], beta2=betas[1], weight_decay=weight_decay, eps=eps, amsgrad=False, maximize=False,
    )  # fmt: skip
    weight.copy_(_stochastic_round(wide, seed) if weight.dtype == torch.bfloat16 else wide)
    first.copy_(m)
    second.copy_(v)
    if working is not None:
        working.copy_(wide)


def _stochastic_round(wide: torch.Tensor, seed: int) -> torch.Tensor:
    """Rounds fp32 to bf16 stochastically, so that the result is unbiased.

    Rounding to nearest would lose every update smaller than half a unit in the last place.
    """
    generator = torch.Generator(wide.device).manual_seed(seed)
    noise = torch.randint(1 << 16, wide.shape, generator=generator, dtype=torch.int32, device=wide.device)
    rounded = (wide.view(torch.int32) + noise) & -(1 << 16)
    return torch.where(wide.isfinite(), rounded.view(torch.float32), wide).bfloat16()
