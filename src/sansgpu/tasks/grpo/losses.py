"""Advantages and losses of Group Relative Policy Optimization (arXiv 2402.03300). K target tokens."""

from __future__ import annotations

from typing import Literal

import torch

MIN_DEVIATION = 1e-4  # added to standard deviations, as in TRL


def advantages(rewards: torch.Tensor, scale: Literal["group", "batch", "none"]) -> torch.Tensor:
    """Returns how much better each completion is than the mean of its group, (P, G), from `rewards` (P, G)."""
    found = rewards - rewards.mean(dim=1, keepdim=True)
    found[rewards.amax(dim=1) == rewards.amin(dim=1)] = 0  # exactly, because the mean is rounded
    if scale == "none":
        return found
    deviations = rewards.std(dim=1, keepdim=True) if scale == "group" else rewards.std()
    return found / (deviations + MIN_DEVIATION)


def token_losses(policy: torch.Tensor, gains: torch.Tensor) -> torch.Tensor:
    """Returns the loss of each token (K,) from its log-probability and from what its completion gains, both (K,).

    `gains` are advantages, minus the weighted KL divergence if there is a reference. The completions come from the
    current weights, so the ratio of probabilities is 1, and clipping has no effect.
    """
    return -torch.exp(policy - policy.detach()) * gains


def kl_divergences(policy: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """Estimates the KL divergence from the reference at each token (K,); the estimate k3 of arXiv 2402.03300.

    `token_losses` multiplies it by the ratio of probabilities, so that its gradient is unbiased (arXiv 2512.02556).
    """
    difference = reference - policy
    return torch.exp(difference) - difference - 1
