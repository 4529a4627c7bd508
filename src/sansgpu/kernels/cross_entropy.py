"""Head projection and cross-entropy in one pass that never holds all logits.

N tokens, D width, V vocabulary.
"""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.nn.functional as F

CHUNK_ROWS = 512  # tokens at once: with fewer, adding each chunk to the (V, D) gradient outweighs the products


def reference_cross_entropy(
    hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, ignore_index: int = -100
) -> torch.Tensor:
    """Summed cross-entropy of all logits at once. hidden (N, D), weight (V, D), targets (N,); returns ()."""
    return F.cross_entropy((hidden @ weight.T), targets, ignore_index=ignore_index, reduction="sum")


def linear_cross_entropy(
    hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, ignore_index: int = -100
) -> torch.Tensor:
    """Cross-entropy summed over the targets, in fp32, of hidden (N, D) against weight (V, D); returns ().

    Products run in the dtype of `hidden`, or autocast's where it is on; sums in fp32 (fp64 for fp64). Gradients are
    computed in the forward pass, chunk by chunk, as in Liger Kernel (arXiv 2410.10989).
    """
    device = hidden.device.type
    if torch.is_autocast_enabled(device):
        hidden = hidden.to(torch.get_autocast_dtype(device))
    with torch.autocast(device, enabled=False):
        kept = targets != ignore_index
        if not bool(kept.all()):
            hidden, targets = hidden[kept], targets[kept]
        return cast(torch.Tensor, _LinearCrossEntropy.apply(hidden, weight, targets))


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        accurate = torch.promote_types(hidden.dtype, torch.float32)
        head = weight.to(hidden.dtype)
        with_gradients = ctx.needs_input_grad[0] or ctx.needs_input_grad[1]
        hidden_grad = torch.empty_like(hidden) if with_gradients else None
        weight_grad = torch.zeros(weight.shape, dtype=accurate, device=weight.device) if with_gradients else None
        total = torch.zeros((), dtype=accurate, device=hidden.device)
        for start in range(0, len(hidden), CHUNK_ROWS):
            stop = min(start + CHUNK_ROWS, len(hidden))
            here, target = hidden[start:stop], targets[start:stop, None]
            logits = (here @ head.T).to(accurate)
            logits.sub_(logits.amax(dim=1, keepdim=True))  # in place throughout: a fresh copy costs more than the sums
            of_target = logits.gather(1, target)
            normaliser = logits.exp_().sum(dim=1, keepdim=True)
            total += (normaliser.log() - of_target).sum()
            if hidden_grad is None or weight_grad is None:
                continue
            # d loss / d logits = softmax - onehot
            logits.div_(normaliser).scatter_add_(1, target, torch.full_like(of_target, -1))
            logits_grad = logits.to(hidden.dtype)
            torch.mm(logits_grad, head, out=hidden_grad[start:stop])
            weight_grad += logits_grad.T @ here
        if with_gradients:
            ctx.save_for_backward(hidden_grad, weight_grad)
            ctx.weight_dtype = weight.dtype
        return total

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        hidden_grad, weight_grad = ctx.saved_tensors
        scale = grad_outputs[0]
        return (
            (hidden_grad * scale).to(hidden_grad.dtype) if ctx.needs_input_grad[0] else None,
            weight_grad.mul_(scale).to(ctx.weight_dtype) if ctx.needs_input_grad[1] else None,
            None,
        )
