"""Gradient accumulation, gradient norm and AdamW, each in one pass over memory."""

from __future__ import annotations

import math

import torch

from sansgpu.kernels import native


def _use_native(*tensors: torch.Tensor | None) -> bool:
    return native.available() and all(
        t is None or (t.device.type == "cpu" and t.is_contiguous() and t.dtype in (torch.float32, torch.bfloat16))
        for t in tensors
    )


def add_product(total: torch.Tensor, product: torch.Tensor) -> torch.Tensor:
    """Adds `product`, of the same or a narrower dtype, to `total` in place; returns `total`."""
    if total.dtype == torch.float32 and product.dtype == torch.bfloat16 and _use_native(total, product):
        require_size(total.numel(), product)
        native.call("accumulate", total, product, total.numel())
        return total
    return total.add_(product)


def global_norm(gradients: list[torch.Tensor]) -> float:
    """Returns the 2-norm of all gradients concatenated."""
    if _use_native(*gradients):
        return math.sqrt(math.fsum(map(_squared_norm, gradients)))
    norms = [float(torch.linalg.vector_norm(g, dtype=torch.promote_types(g.dtype, torch.float32))) for g in gradients]
    return math.hypot(*norms)


def _squared_norm(x: torch.Tensor) -> float:
    total = torch.empty(1, dtype=torch.float64)
    native.call("squared_norm", x.dtype == torch.bfloat16, x, x.numel(), total)
    return float(total)


def require_size(size: int, *tensors: torch.Tensor | None) -> None:
    """Raises RuntimeError if a tensor has another size, because a kernel would read or write out of bounds."""
    if any(tensor is not None and tensor.numel() != size for tensor in tensors):
        raise RuntimeError(f"all tensors of an update must have the same size, here {size}.")


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
    fp32_moments = first.dtype == second.dtype == torch.float32
    if fp32_moments and _use_native(weight, first, second, gradient, working):
        require_size(weight.numel(), first, second, gradient, working)
        narrow_weight, narrow_gradient = weight.dtype == torch.bfloat16, gradient.dtype == torch.bfloat16
        settings = (*map(float, (lr, *betas, eps, weight_decay)), step, float(scale), seed)
        native.call(
            "adamw", narrow_weight, weight, first, second, narrow_gradient, gradient, working, weight.numel(), *settings
        )
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
