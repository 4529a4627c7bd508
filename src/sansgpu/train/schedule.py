"""Learning rate and length of a run, as pure functions."""

from __future__ import annotations

import math

from sansgpu.config import TrainingConfig

WARMUP_PART = 10
UNKNOWN = 1 << 40  # steps of a run that ends by the clock, before any was timed


def learning_rate(training: TrainingConfig, step: int, total_steps: int) -> float:
    """The learning rate of step 0 .. total_steps - 1: linear warm-up, then as `lr_scheduler` says."""
    peak, low, warmup = training.learning_rate, training.min_lr_ratio, warmup_steps(training, total_steps)
    if step < warmup:
        return peak * (step + 1) / (warmup + 1)
    progress = (step - warmup) / max(1, total_steps - warmup)
    match training.lr_scheduler:
        case "constant":
            return peak
        case "linear":
            height = 1 - progress
        case "cosine":
            height = (1 + math.cos(math.pi * progress)) / 2
        case "wsd":  # warm-up, stable, decay (arXiv 2405.18392)
            left = (total_steps - step) / max(1.0, training.decay_ratio * total_steps)
            height = min(1.0, left)
    return peak * (low + (1 - low) * max(0.0, height))


def warmup_steps(training: TrainingConfig, total_steps: int) -> int:
    """Steps of the warm-up: at most a tenth of a run whose length is an amount of time."""
    most = total_steps // WARMUP_PART if training.time_limited else training.warmup_steps
    return min(training.warmup_steps, most)


def total_steps(training: TrainingConfig, steps_per_epoch: int, tokens_per_epoch: int) -> int:
    """Steps until the first of num_epochs, max_steps and max_tokens; one epoch where nothing limits the run, UNKNOWN
    where only time does.
    """
    limits = []
    if training.max_steps is not None:
        limits.append(training.max_steps)
    if training.max_tokens is not None:
        limits.append(math.ceil(training.max_tokens * steps_per_epoch / tokens_per_epoch))
    if training.num_epochs is not None:
        limits.append(math.ceil(training.num_epochs * steps_per_epoch))
    return max(1, min(limits, default=UNKNOWN if training.time_limited else steps_per_epoch))
