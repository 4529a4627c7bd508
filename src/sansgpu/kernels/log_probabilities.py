"""Log-probabilities of targets, computed from hidden states without holding the full (N, V) logits in memory.

N tokens, D width, V vocabulary.
"""

from __future__ import annotations

from functools import partial
from typing import Any, cast

import torch
from torch.utils.checkpoint import checkpoint

from sansgpu.kernels import cross_entropy
from sansgpu.kernels.block_quantization import Matrix, as_values, stored
from sansgpu.kernels.cross_entropy import Chunk, LossOptions, chunks_of, head_operands, native_chunks, reference_logits
from sansgpu.kernels.linear import autocasted


def target_log_probabilities(
    hidden: torch.Tensor, weight: Matrix, targets: torch.Tensor, softcap: float = 0.0
) -> torch.Tensor:
    """Returns the log-probability (N,) of each target, from hidden (N, D), weight (V, D) and targets (N,).

    Runs chunk by chunk like `linear_cross_entropy`. The backward pass recomputes the logits, because the gradients
    depend on how the loss uses the results.
    """
    device = hidden.device.type
    hidden = autocasted(hidden)
    with torch.autocast(device, enabled=False):
        data, format = stored(weight)
        head = head_operands(hidden, data, format, targets, of_hidden=False, of_weight=False)
        if head.is_native:
            return cast(torch.Tensor, _TargetLogProbabilities.apply(hidden, data, format, targets, softcap))
        values = as_values(data, format, hidden.dtype)
        parts = [
            checkpoint(_reference_log_probabilities, hidden[part], values, targets[part], softcap, use_reentrant=False)
            for part in chunks_of(head, cross_entropy.PLAIN_ROWS)
        ]
        return torch.cat(parts)


def log_probabilities_and_hits(
    hidden: torch.Tensor, weight: Matrix, targets: torch.Tensor, options: LossOptions
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the log-probability of each target (N,), and whether it has the largest logit (N,), without gradients."""
    hidden = autocasted(hidden)
    with torch.no_grad(), torch.autocast(hidden.device.type, enabled=False):
        head = head_operands(hidden, *stored(weight), targets, of_hidden=False, of_weight=False)
        if head.is_native:
            chunks = list(native_chunks(head, options, count=True))
            above = [chunk.above for chunk in chunks if chunk.above is not None]
            return -torch.cat([chunk.losses for chunk in chunks]), torch.cat(above) == 0
        values, found, best = as_values(head.weight, head.format, hidden.dtype), [], []
        for part in chunks_of(head, cross_entropy.PLAIN_ROWS):
            found.append(_reference_log_probabilities(hidden[part], values, targets[part], options.softcap))
            best.append(reference_logits(hidden[part], values, options.softcap).argmax(dim=1))
        return torch.cat(found), torch.cat(best) == targets


def _reference_log_probabilities(
    hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, softcap: float
) -> torch.Tensor:
    log_probabilities = torch.log_softmax(reference_logits(hidden, weight, softcap), dim=1)
    return log_probabilities.gather(1, targets[:, None])[:, 0]


class _TargetLogProbabilities(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, format: int, targets: torch.Tensor, softcap: float
    ) -> torch.Tensor:
        head = head_operands(hidden, weight, format, targets, of_hidden=False, of_weight=False)
        ctx.save_for_backward(hidden, weight, targets)
        ctx.format, ctx.options = format, LossOptions(softcap=softcap)
        return -torch.cat([chunk.losses for chunk in native_chunks(head, ctx.options)])

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        hidden, weight, targets = ctx.saved_tensors
        head = head_operands(hidden, weight, ctx.format, targets, *ctx.needs_input_grad[:2])
        for _ in native_chunks(head, ctx.options, revise=partial(_scaled, -grad_outputs[0])):
            pass
        return head.hidden_grad, head.weight_grad, None, None, None


def _scaled(scale: torch.Tensor, chunk: Chunk) -> Chunk:
    """Multiplies the gradients of a chunk by `scale` (N,), the gradients of the losses of all tokens."""
    part = scale[chunk.rows]
    return chunk._replace(shares=chunk.shares.mul_(part), at_target=chunk.at_target.mul_(part))
