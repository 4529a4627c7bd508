"""The loss of a student that learns from a teacher's most likely tokens, row by row.

N tokens, K most likely tokens of the teacher, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

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
        self, logits: torch.Tensor, of_target: torch.Tensor, cross_entropy: torch.Tensor, targets: torch.Tensor,
        z_loss: float,
    ) -> MixedLoss:  # fmt: skip
        """Computes the loss of each row from the student's logits of the K tokens (N, K) and of the target (N,)."""
        own, at_temperature = 1 - self.weight, self.temperature
        lse = cross_entropy + of_target
        known = logits - lse[:, None]
        probabilities = known.exp()
        rest = (1 - probabilities.sum(dim=1)).clamp(min=LEAST_REST)
        student = torch.log_softmax(torch.cat((known, rest.log()[:, None]), dim=1) / at_temperature, dim=1)
        teacher = torch.log_softmax(self.log_probabilities.to(logits.dtype) / at_temperature, dim=1)
        kl = (teacher.exp() * (teacher - student)).sum(dim=1)
        grad = self.weight * at_temperature * (student.exp() - teacher.exp())  # of the classes' log-probabilities
        pull = 2 * z_loss * lse  # of the z-loss, per probability
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


def reference_mixed_loss(logits: torch.Tensor, targets: torch.Tensor, soft: SoftTargets, z_loss: float) -> torch.Tensor:
    """Computes the summed loss of `SoftTargets` from all logits (N, V), ()."""
    log_probabilities = torch.log_softmax(logits, dim=1)
    known = log_probabilities.gather(1, soft.ids)
    rest = log_probabilities.scatter(1, soft.ids, -torch.inf).logsumexp(dim=1, keepdim=True)
    student = torch.log_softmax(torch.cat((known, rest), dim=1) / soft.temperature, dim=1)
    teacher = torch.log_softmax(soft.log_probabilities.to(logits.dtype) / soft.temperature, dim=1)
    kl = (teacher.exp() * (teacher - student)).sum()
    cross_entropy = -log_probabilities.gather(1, targets[:, None]).sum()
    z_term = z_loss * torch.logsumexp(logits, dim=1).square().sum()
    return (1 - soft.weight) * cross_entropy + soft.weight * soft.temperature**2 * kl + z_term
