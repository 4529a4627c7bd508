"""Output projection and cross-entropy fused, so that the full (N, V) logits are never in memory.

N tokens, D width, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch

from sansgpu.kernels import native
from sansgpu.kernels.linear import autocasted
from sansgpu.kernels.matmul import matmul_into

CHUNK_ROWS = 1024  # tokens per chunk; with fewer, accumulating the (V, D) gradient takes longer than the matmuls

_library = torch.library.Library("sansgpu", "FRAGMENT")
_library.define(
    "cross_entropy_(Tensor(a!) logits, Tensor targets, float smoothing, float z_loss, float softcap, bool gradient) "
    "-> Tensor"
)


def _cross_entropy(
    logits: torch.Tensor, targets: torch.Tensor, smoothing: float, z_loss: float, softcap: float, gradient: bool
) -> torch.Tensor:
    rows, vocabulary = logits.shape
    if rows and not 0 <= int(targets.min()) <= int(targets.max()) < vocabulary:
        raise IndexError(f"a target is out of bounds: targets must lie in 0 to {vocabulary - 1}.")
    losses = logits.new_empty(rows, dtype=torch.float32)
    sizes, options = (rows, vocabulary), (float(smoothing), float(z_loss), float(softcap))
    native.call("cross_entropy", logits.dtype == torch.bfloat16, logits, targets, losses, *sizes, *options, gradient)
    return losses


_library.impl("cross_entropy_", _cross_entropy, "CPU")


@dataclass(frozen=True)
class LossOptions:
    """Options of the cross-entropy loss; the defaults give plain cross-entropy."""

    label_smoothing: float = 0.0  # probability mass spread evenly over the vocabulary (arXiv 1512.00567)
    z_loss: float = 0.0  # coefficient of log(sum(exp(logits)))^2, which keeps logits from drifting (arXiv 2204.02311)
    softcap: float = 0.0  # logits become softcap * tanh(logits / softcap) (arXiv 2408.00118); 0 disables it


DEFAULT_LOSS_OPTIONS = LossOptions()


def reference_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    options: LossOptions = DEFAULT_LOSS_OPTIONS,
    ignore_index: int = -100,
) -> torch.Tensor:
    """Computes the summed loss from all logits at once. hidden (N, D), weight (V, D), targets (N,); returns ()."""
    has_target = targets != ignore_index
    logits = hidden[has_target] @ weight.T
    if options.softcap:
        logits = options.softcap * torch.tanh(logits / options.softcap)
    log_probabilities = torch.log_softmax(logits, dim=1)
    of_target = log_probabilities.gather(1, targets[has_target, None]).sum()
    smooth = log_probabilities.mean(dim=1).sum()
    z_loss = torch.logsumexp(logits, dim=1).square().sum()
    return -(1 - options.label_smoothing) * of_target - options.label_smoothing * smooth + options.z_loss * z_loss


def linear_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    options: LossOptions = DEFAULT_LOSS_OPTIONS,
    ignore_index: int = -100,
) -> torch.Tensor:
    """Computes `reference_cross_entropy` chunk by chunk, skipping positions without a target.

    Matmuls run in the dtype of `hidden`, or in autocast's if enabled; sums run in fp32 (fp64 for fp64). Unless
    gradients are disabled, the forward pass computes them as well, as in Liger Kernel (arXiv 2410.10989).
    """
    return linear_cross_entropy_and_hits(hidden, weight, targets, options, ignore_index, count_hits=False)[0]


def linear_cross_entropy_and_hits(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    options: LossOptions = DEFAULT_LOSS_OPTIONS,
    ignore_index: int = -100,
    count_hits: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns `linear_cross_entropy` and the number of targets that have the largest logit: () and () int64.

    The number is 0 without `count_hits`.
    """
    device = hidden.device.type
    hidden = autocasted(hidden)
    with torch.autocast(device, enabled=False):
        has_target = targets != ignore_index
        if not bool(has_target.all()):
            hidden, targets = hidden[has_target], targets[has_target]
        if not torch.is_grad_enabled():  # needs_input_grad is true even under no_grad
            hidden, weight = hidden.detach(), weight.detach()
        sums = _LinearCrossEntropy.apply(hidden, weight, targets, options, count_hits)
        return cast(tuple[torch.Tensor, torch.Tensor], sums)


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, options: LossOptions, count: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        accurate = torch.promote_types(hidden.dtype, torch.float32)
        head = weight.to(hidden.dtype)
        with_gradients, of_weight = any(ctx.needs_input_grad[:2]), ctx.needs_input_grad[1]
        hidden_grad = torch.empty_like(hidden) if with_gradients else None
        weight_grad = torch.empty_like(weight, dtype=accurate) if of_weight and len(hidden) else None
        total = torch.zeros((), dtype=accurate, device=hidden.device)
        hits = torch.zeros((), dtype=torch.int64, device=hidden.device)
        # Chunks share one buffer: allocating and freeing large blocks would fragment the heap.
        buffer = hidden.new_empty(min(CHUNK_ROWS, len(hidden)), len(head))
        for start in range(0, len(hidden), CHUNK_ROWS):
            chunk = hidden[start : start + CHUNK_ROWS]
            logits = buffer[: len(chunk)]
            matmul_into(logits, chunk, head.T)
            if count:  # before the logits become their gradients
                hits += (logits.argmax(dim=1) == targets[start : start + CHUNK_ROWS]).sum()
            losses, logits_grad = _losses(logits, targets[start : start + CHUNK_ROWS], options, with_gradients)
            total += losses.sum()
            if hidden_grad is not None:
                matmul_into(hidden_grad[start : start + CHUNK_ROWS], logits_grad, head)
            if weight_grad is not None:
                matmul_into(weight_grad, logits_grad.T, chunk, add=start > 0)
        if of_weight and weight_grad is None:
            weight_grad = torch.zeros_like(weight)
        ctx.save_for_backward(hidden_grad, weight_grad)
        ctx.mark_non_differentiable(hits)
        return total, hits

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        hidden_grad, weight_grad = ctx.saved_tensors
        scale = grad_outputs[0]
        return hidden_grad.mul_(scale), None if weight_grad is None else weight_grad.mul_(scale), None, None, None


def _losses(
    logits: torch.Tensor, targets: torch.Tensor, options: LossOptions, with_gradients: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the loss of each row and the gradient of the logits, which are overwritten."""
    smoothing, z_loss, softcap = options.label_smoothing, options.z_loss, options.softcap
    if native.takes(logits):
        return torch.ops.sansgpu.cross_entropy_(logits, targets, smoothing, z_loss, softcap, with_gradients), logits
    dtype, targets = logits.dtype, targets[:, None]
    # Operates in place: another copy of the logits costs more than the arithmetic.
    logits = logits.to(torch.promote_types(dtype, torch.float32))
    slope = None
    if softcap:
        logits.div_(softcap).tanh_()
        slope = 1 - logits.square() if with_gradients else None
        logits.mul_(softcap)
    row_max = logits.amax(dim=1, keepdim=True)
    of_target, mean = logits.gather(1, targets), logits.mean(dim=1, keepdim=True) if smoothing else 0.0
    normalizer = logits.sub_(row_max).exp_().sum(dim=1, keepdim=True)
    lse = normalizer.log() + row_max
    losses = lse - (1 - smoothing) * of_target - smoothing * mean + z_loss * lse.square()
    if with_gradients:
        logits.mul_((1 + 2 * z_loss * lse) / normalizer).sub_(smoothing / logits.shape[1])
        logits.scatter_add_(1, targets, torch.full_like(of_target, smoothing - 1))
        if slope is not None:
            logits.mul_(slope)
    return losses, logits.to(dtype)
