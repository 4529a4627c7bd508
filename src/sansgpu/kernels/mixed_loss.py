"""The output head with the loss of a student, which learns a teacher's most likely tokens beside the targets.

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

LEAST_REST = 1e-7  # lower bound of the student's probability of all other tokens, which is a difference in fp32
LEAST_SHARE = 1e-6  # lower bound of the size of a factor by which gradients are divided and multiplied


@dataclass(frozen=True)
class SoftTargets:
    """A teacher's K most likely tokens for each target, and how much they count beside the targets themselves.

    The loss of a token is (1 - weight) * cross-entropy + weight * temperature^2 * KL(teacher || student). The KL
    divergence is that of K + 1 classes: the K tokens, and all others together. Without the last class, the student
    would learn probabilities that are too large, because those of the K tokens sum to less than 1 (arXiv 2503.16870).
    The temperature divides the log-probabilities of these classes.
    """

    ids: torch.Tensor  # (N, K) int64, different in each row
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
        # The gradients of the classes' log-probabilities, and that of the z-loss divided by the probability.
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
    """The loss of each row, and the gradient of its logits."""

    losses: torch.Tensor  # (N,)
    kl: torch.Tensor  # (N,): the KL divergence
    share: torch.Tensor  # (N,): the gradients are the student's probabilities times this, but
    at_ids: torch.Tensor  # (N, K): these at the teacher's tokens, and
    at_target: torch.Tensor  # (N,): this at the target


def reference_mixed_loss(
    hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, soft: SoftTargets, options: LossOptions
) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes what `linear_mixed_loss` returns from all logits at once; every row has a target."""
    return mixed_loss_of_logits(reference_logits(hidden, weight, options.softcap), targets, soft, options.z_loss)


def mixed_loss_of_logits(
    logits: torch.Tensor, targets: torch.Tensor, soft: SoftTargets, z_loss: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes what `linear_mixed_loss` returns from logits (N, V); every row has a target."""
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

    Like `linear_cross_entropy`, it needs one pass over the logits, which are never in memory as a whole. Returns the
    sum, (), and the sums of its parts without their factors, (2,): the cross-entropy and the KL divergence. Label
    smoothing is not supported.
    """
    hidden = autocasted(hidden)
    data, format = stored(weight)
    with torch.autocast(hidden.device.type, enabled=False):
        has_target = targets != ignore_index
        hidden, targets, soft = hidden[has_target], targets[has_target], soft.rows(has_target)
        if len(targets) and not 0 <= int(soft.ids.min()) <= int(soft.ids.max()) < len(data):
            raise IndexError(f"a teacher's token is out of bounds: tokens must lie in 0 to {len(data) - 1}.")
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
    for _ in native_chunks(head, LossOptions(softcap=options.softcap), revise=revise):
        pass
    return sums[0].clone(), sums[1:].clone()


def _revise(head: HeadOperands, soft: SoftTargets, options: LossOptions, sums: torch.Tensor, chunk: Chunk) -> Chunk:
    """Adds a chunk's mixed loss and its parts to `sums` (3,), and replaces what the gradients are computed from.

    The exponentials of the teacher's tokens become their gradients, divided by the share of the row. Differences from
    the gradients of other tokens would be lost in the rounding of large exponentials.
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
    """Returns the logits (N, K) of the tokens of the vocabulary at `places` (N, K), for a part of the rows."""
    hidden = head.hidden[part]
    logits = hidden.new_empty(places.shape, dtype=torch.float32)
    sizes = (*hidden.shape, places.shape[1])
    narrow = hidden.dtype == torch.bfloat16
    operands = hidden, head.weight, places
    library.call("head_logits_at", narrow, head.format, *sizes, *operands, softcap, logits)
    return logits
