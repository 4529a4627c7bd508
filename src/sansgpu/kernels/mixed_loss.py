"""Distillation loss, fused with the output head: the student learns targets and the teacher's most likely tokens.

N tokens, D width, V vocabulary, K most likely tokens of the teacher.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import torch

from sansgpu.kernels import library
from sansgpu.kernels.block_quantization import Matrix, stored
from sansgpu.kernels.cross_entropy import (
    DEFAULT_LOSS_OPTIONS,
    Chunk,
    HeadOperands,
    LossOptions,
    head_operands,
    native_chunks,
    plain_sums,
    reference_logits,
)
from sansgpu.kernels.linear import autocasted

LEAST_REST = 1e-7  # lower bound of the student's probability of all other tokens, which is computed as a difference
LEAST_SHARE = 1e-6  # minimum absolute value of a factor that gradients are divided by and later multiplied by


@dataclass(frozen=True)
class SoftTargets:
    """A teacher's K most likely tokens for each target, and their weight in the loss.

    The loss of a token is (1 - weight) * cross-entropy + weight * temperature^2 * KL(teacher || student). The KL
    divergence has K + 1 classes: the K tokens, and one for all other tokens. Without the last class, the student would
    learn probabilities that are too large, because those of the K tokens sum to less than 1 (arXiv 2503.16870).
    The temperature divides the log-probabilities of these classes.
    """

    ids: torch.Tensor  # (N, K) int64, distinct within a row
    log_probabilities: torch.Tensor  # (N, K + 1); the last is that of all other tokens
    weight: float
    temperature: float = 1.0

    def rows(self, chosen: torch.Tensor | slice) -> SoftTargets:
        return replace(self, ids=self.ids[chosen], log_probabilities=self.log_probabilities[chosen])

    def mix(
        self,
        logits: torch.Tensor,
        of_target: torch.Tensor,
        cross_entropy: torch.Tensor,
        targets: torch.Tensor,
        z_loss: float,
    ) -> MixedLoss:
        """Computes the loss of each row from the student's logits of the K tokens (N, K) and of the target (N,)."""
        own, at_temperature = 1 - self.weight, self.temperature
        lse = cross_entropy + of_target
        known = logits - lse[:, None]
        probabilities = known.exp()
        rest = (1 - probabilities.sum(dim=1)).clamp(min=LEAST_REST)
        student = torch.log_softmax(torch.cat((known, rest.log()[:, None]), dim=1) / at_temperature, dim=1)
        teacher = torch.log_softmax(self.log_probabilities.float() / at_temperature, dim=1)
        kl = (teacher.exp() * (teacher - student)).sum(dim=1)
        # `grad`: gradients of the classes' log-probabilities. `pull`: a logit's gradient from the z-loss, divided by
        # its token's probability.
        grad = self.weight * at_temperature * (student.exp() - teacher.exp())
        pull = 2 * z_loss * lse
        share = own + pull + grad[:, -1] / rest
        share = torch.where(share.abs() < LEAST_SHARE, LEAST_SHARE, share)
        at_ids = (own + pull)[:, None] * probabilities + grad[:, :-1]
        is_target = self.ids == targets[:, None]
        of_other = torch.where(is_target.any(dim=1), pull, share - own) * torch.exp(-cross_entropy)
        return MixedLoss(
            losses=own * cross_entropy + self.weight * at_temperature**2 * kl + z_loss * lse.square(),
            kl=kl,
            share=share,
            at_ids=at_ids,
            at_target=own * torch.expm1(-cross_entropy) + of_other + (grad[:, :-1] * is_target).sum(dim=1),
        )


@dataclass(frozen=True)
class MixedLoss:
    """The loss of each row, and the gradients of its logits.

    The gradient of a logit is the student's probability times `share`. For the teacher's tokens it is `at_ids` instead,
    and for the target `at_target`.
    """

    losses: torch.Tensor  # (N,)
    kl: torch.Tensor  # (N,): the KL divergence
    share: torch.Tensor  # (N,)
    at_ids: torch.Tensor  # (N, K)
    at_target: torch.Tensor  # (N,)


def reference_mixed_loss(
    hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, soft: SoftTargets, options: LossOptions
) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes `linear_mixed_loss` from all logits at once; every row must have a target."""
    return mixed_loss_of_logits(reference_logits(hidden, weight, options.softcap), targets, soft, options.z_loss)


def mixed_loss_of_logits(
    logits: torch.Tensor, targets: torch.Tensor, soft: SoftTargets, z_loss: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes `linear_mixed_loss` from logits (N, V); every row must have a target."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    log_probabilities = torch.log_softmax(logits, dim=1)
    rest = log_probabilities.scatter(1, soft.ids, -torch.inf).logsumexp(dim=1, keepdim=True)
    classes = torch.cat((log_probabilities.gather(1, soft.ids), rest), dim=1)
    student = torch.log_softmax(classes / soft.temperature, dim=1)
    teacher = torch.log_softmax(soft.log_probabilities.to(logits.dtype) / soft.temperature, dim=1)
    kl = (teacher.exp() * (teacher - student)).sum()
    cross_entropy = -log_probabilities.gather(1, targets[:, None]).sum()
    z_term = z_loss * torch.logsumexp(logits, dim=1).square().sum()
    loss = (1 - soft.weight) * cross_entropy + soft.weight * soft.temperature**2 * kl + z_term
    return loss, torch.stack((cross_entropy, kl)).detach()


def linear_mixed_loss(
    hidden: torch.Tensor,
    weight: Matrix,
    targets: torch.Tensor,
    soft: SoftTargets,
    options: LossOptions = DEFAULT_LOSS_OPTIONS,
    ignore_index: int = -100,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes the loss of `SoftTargets` from hidden (N, D), weight (V, D) and targets (N,), skipping `ignore_index`.

    Like `linear_cross_entropy`, it computes the logits chunk by chunk, once. Returns the summed loss, (), and the
    unweighted sums (2,) of the cross-entropy and of the KL divergence. Label smoothing is not supported.
    """
    hidden = autocasted(hidden)
    data, format = stored(weight)
    with torch.autocast(hidden.device.type, enabled=False):
        has_target = targets != ignore_index
        hidden, targets, soft = hidden[has_target], targets[has_target], soft.rows(has_target)
        if len(targets) and not 0 <= int(soft.ids.min()) <= int(soft.ids.max()) < len(data):
            raise IndexError(f"a teacher's token is out of bounds: token ids must be from 0 to {len(data) - 1}.")
        if not torch.is_grad_enabled():  # needs_input_grad is true even under no_grad
            hidden, data = hidden.detach(), data.detach()
        sums = _LinearMixedLoss.apply(hidden, data, format, targets, soft, options)
        return cast(tuple[torch.Tensor, torch.Tensor], sums)


class _LinearMixedLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        format: int,
        targets: torch.Tensor,
        soft: SoftTargets,
        options: LossOptions,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        head = head_operands(hidden, weight, format, targets, *ctx.needs_input_grad[:2])
        loss, parts = (_native_sums if head.is_native else _plain_sums)(head, soft, options)
        ctx.save_for_backward(head.hidden_grad, head.weight_grad)
        ctx.mark_non_differentiable(parts)
        return loss, parts

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        scale = grad_outputs[0]
        return *(None if grad is None else grad.mul_(scale) for grad in ctx.saved_tensors), None, None, None, None


def _plain_sums(head: HeadOperands, soft: SoftTargets, options: LossOptions) -> tuple[torch.Tensor, torch.Tensor]:
    def loss_of(hidden: torch.Tensor, weight: torch.Tensor, part: slice) -> tuple[torch.Tensor, torch.Tensor]:
        return reference_mixed_loss(hidden, weight, head.targets[part], soft.rows(part), options)

    return plain_sums(head, loss_of)


def _native_sums(head: HeadOperands, soft: SoftTargets, options: LossOptions) -> tuple[torch.Tensor, torch.Tensor]:
    sums = torch.zeros(3)
    revise = partial(_revise, head, soft, options, sums)
    for _ in native_chunks(head, LossOptions(softcap=options.softcap, integer=options.integer), revise=revise):
        pass
    return sums[0].clone(), sums[1:].clone()


def _revise(head: HeadOperands, soft: SoftTargets, options: LossOptions, sums: torch.Tensor, chunk: Chunk) -> Chunk:
    """Adds a chunk's loss, cross-entropy and KL divergence to `sums` (3,); returns the chunk with the loss's gradients.

    For the teacher's tokens, replaces the exponentials with the gradients divided by the row's share. A correction
    added to a large exponential would be lost in rounding.
    """
    targets, soft, softcap = head.targets[chunk.rows, None], soft.rows(chunk.rows), options.softcap
    logits = _logits_at(head, chunk.rows, torch.cat((soft.ids, targets), dim=1), softcap)
    mixed = soft.mix(logits[:, :-1], logits[:, -1], chunk.losses, targets[:, 0], options.z_loss)
    sums += torch.stack((mixed.losses.sum(), chunk.losses.sum(), mixed.kl.sum()))
    slope = 1 - (logits / softcap).square() if softcap else torch.ones_like(logits)
    shares, exponentials = chunk.shares * mixed.share, chunk.exponentials
    if exponentials is not None:
        at_ids = mixed.at_ids * slope[:, :-1] / shares[:, None]
        exponentials.scatter_(1, soft.ids, at_ids.to(exponentials.dtype)).scatter_(1, targets, 0.0)
    return chunk._replace(shares=shares, at_target=mixed.at_target * slope[:, -1])


def _logits_at(head: HeadOperands, part: slice, places: torch.Tensor, softcap: float) -> torch.Tensor:
    """Returns the logits (N, K) of the token ids `places` (N, K), for a part of the rows."""
    hidden = head.hidden[part]
    logits = hidden.new_empty(places.shape, dtype=torch.float32)
    sizes = (*hidden.shape, places.shape[1])
    narrow = hidden.dtype == torch.bfloat16
    operands = hidden, head.weight, places
    library.call("head_logits_at", narrow, head.format, *sizes, *operands, softcap, logits)
    return logits
