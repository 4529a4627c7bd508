"""Runs optimizer kernels on a single weight."""

from typing import Any

import torch

from sansgpu.kernels import update
from sansgpu.kernels.update import AdamWStep, WeightUpdate


def adamw(
    weight: torch.Tensor, first: torch.Tensor, second: torch.Tensor, gradient: torch.Tensor,
    working: torch.Tensor | None, *, step: int, weight_decay: float, seed: int = 0, **settings: Any,
) -> None:  # fmt: skip
    one = WeightUpdate(weight, (first, second), gradient, working, weight_decay, seed)
    update.adamw([one], AdamWStep(number=step, **settings))


def adamw8(
    weight: torch.Tensor, first_codes: torch.Tensor, first_scales: torch.Tensor, second_codes: torch.Tensor,
    second_scales: torch.Tensor, gradient: torch.Tensor, working: torch.Tensor | None, *, step: int,
    weight_decay: float, seed: int = 0, **settings: Any,
) -> None:  # fmt: skip
    moments = (first_codes, first_scales, second_codes, second_scales)
    one = WeightUpdate(weight, moments, gradient, working, weight_decay, seed)
    update.adamw8([one], AdamWStep(number=step, **settings))
