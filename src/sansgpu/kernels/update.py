"""What happens to gradients between backward and the next step, each in one pass over memory."""

from __future__ import annotations

import math

import torch

from sansgpu.kernels import native

_library = torch.library.Library("sansgpu", "FRAGMENT")
_library.define("accumulate_(Tensor(a!) sum, Tensor addend) -> ()")
_library.define("squared_norm(Tensor x) -> float")
_library.define(
    "adamw_(Tensor(a!) weight, Tensor(b!) first, Tensor(c!) second, Tensor grad, Tensor(d!)? working, float lr, "
    "float beta1, float beta2, float eps, float decay, int step, float scale) -> ()"
)


def _takes(*tensors: torch.Tensor | None) -> bool:
    return native.available() and all(
        t is None or (t.device.type == "cpu" and t.is_contiguous() and t.dtype in (torch.float32, torch.bfloat16))
        for t in tensors
    )


def add_product(total: torch.Tensor, product: torch.Tensor) -> torch.Tensor:
    """`total` += `product` of the same or a narrower dtype; returns `total`."""
    if total.dtype == torch.float32 and product.dtype == torch.bfloat16 and _takes(total, product):
        torch.ops.sansgpu.accumulate_(total, product)
        return total
    return total.add_(product)


def global_norm(gradients: list[torch.Tensor]) -> float:
    """The 2-norm over all of them together."""
    if _takes(*gradients):
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
) -> None:
    """Update `step` (1, 2, ...) of AdamW (arXiv 1711.05101) in place, of `gradient` x `scale`.

    weight, moments fp32; `working`, the weight in the dtype of products, is written along. All of one shape.
    """
    if _takes(weight, first, second, gradient, working):
        settings = (lr, *betas, eps, weight_decay, step, scale)
        torch.ops.sansgpu.adamw_(weight, first, second, gradient, working, *settings)
        return
    steps = torch.tensor(float(step - 1), device=weight.device)
    gradient = gradient.to(weight.dtype) * scale
    torch._fused_adamw_(
        [weight], [gradient], [first], [second], [], [steps + 1],
        lr=lr, beta1=betas[0], beta2=betas[1], weight_decay=weight_decay, eps=eps, amsgrad=False, maximize=False,
    )  # fmt: skip
    if working is not None:
        working.copy_(weight)
