"""Losses of preference optimization from the log-probabilities of answers. B examples with two answers each.

The two answers are the chosen and the rejected one. For KTO, they are the rated answer and an answer to a different
prompt, from which the KL divergence is estimated.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from sansgpu.tasks.preference.settings import PreferenceConfig
from sansgpu.tasks.task import Sums

LARGEST_MEAN = -1e-6  # upper limit of mean log-probabilities, because an answer of probability 1 has infinite odds


@dataclass(frozen=True)
class Scores:
    """Log-probabilities of answers, each (B, 2)."""

    policy: torch.Tensor
    reference: torch.Tensor  # log-probabilities under the reference model, which is the model before training
    tokens: torch.Tensor  # number of target tokens

    @property
    def ratios(self) -> torch.Tensor:
        return self.policy - self.reference


def pair_losses(settings: PreferenceConfig, scores: Scores) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the losses (B,) and the rewards (B, 2) of pairs of a chosen and a rejected answer."""
    beta, tokens = settings.scale, scores.tokens.clamp(min=1)
    if settings.loss == "dpo":  # arXiv 2305.18290; with label smoothing: conservative DPO
        rewards = beta * scores.ratios
    elif settings.loss in ("dpo_norm", "ipo"):  # Tülu 3, arXiv 2411.15124; IPO, arXiv 2310.12036, per token as in TRL
        rewards = beta * scores.ratios / tokens
    else:  # SimPO, arXiv 2405.14734, and ORPO, arXiv 2403.07691
        rewards = beta * scores.policy / tokens
    margins = rewards[:, 0] - rewards[:, 1]
    if settings.loss == "ipo":
        return (margins / beta - 1 / (2 * beta)).square(), rewards
    if settings.loss == "orpo":
        means = (scores.policy / tokens).clamp(max=LARGEST_MEAN)
        log_odds = means - torch.log(-torch.expm1(means))
        return -means[:, 0] - beta * F.logsigmoid(log_odds[:, 0] - log_odds[:, 1]), rewards
    if settings.loss == "simpo":
        margins = margins - settings.gamma
    wrong = settings.label_smoothing  # assumed share of pairs in which the rejected answer is the better one
    return -(1 - wrong) * F.logsigmoid(margins) - wrong * F.logsigmoid(-margins), rewards


def kl_divergence(scores: Scores) -> torch.Tensor:
    """Estimates the KL divergence from the reference model, (), without a gradient (arXiv 2402.01306).

    The estimate comes from the second answers, which belong to other prompts.
    """
    return scores.ratios[:, 1].detach().mean().clamp(min=0)


def kto_losses(
    settings: PreferenceConfig, scores: Scores, is_good: torch.Tensor, kl: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the losses and the rewards, (B,) each, of rated answers; `is_good` (B,) are the ratings."""
    rewards = settings.scale * scores.ratios[:, 0]
    sign = torch.where(is_good, 1.0, -1.0)
    weights = torch.where(is_good, settings.desirable_weight, settings.undesirable_weight)
    return weights * (1 - torch.sigmoid(sign * (rewards - settings.scale * kl))), rewards


def reward_metrics(sums: Sums) -> dict[str, float]:
    """Computes mean metrics from the sums of `PreferenceObjective.measured`."""
    count = sums["examples"]
    chosen = sums["chosen"] / max(1.0, sums["rated_good"])
    rejected = sums["rejected"] / max(1.0, sums["rated_bad"])
    means: dict[str, float] = {name: sums[name] / count for name in ("accuracy", "nll", "kl") if name in sums}
    return {**means, "margin": chosen - rejected, "chosen_reward": chosen, "rejected_reward": rejected}
