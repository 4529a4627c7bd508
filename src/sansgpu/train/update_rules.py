"""The optimizers AdamW, 8-bit AdamW, Adam, SGD and Muon. To add one, write its rule and an entry in RULES."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby

import torch
from torch import nn

from sansgpu.config import TrainingConfig, derive_seed
from sansgpu.kernels.newton_schulz import newton_schulz
from sansgpu.kernels.update import (
    AdamWStep,
    WeightUpdate,
    adamw,
    adamw8,
    descend,
    nesterov,
    quantized_zeros,
)
from sansgpu.train.trained_weight import TrainedWeight, UpdateRule, UpdateStep

ADAM_EPS = 1e-8
MIN_QUANTIZED_ELEMENTS = 4096  # the moments of smaller weights are not quantized, as it would save nothing
MUON_MOMENTUM = 0.95
MUON_UPDATE_RMS = 0.2  # the typical update size of AdamW, so that both share one learning rate (arXiv 2502.16982)
MUON_CHUNK_ELEMENTS = 1 << 22  # elements orthogonalized at once, which takes about five times their memory


def _zeros(count: int) -> Callable[[torch.Tensor], Sequence[torch.Tensor]]:
    """Returns a function that allocates `count` zero moments for a weight, in fp32 or wider."""

    def zeros(weight: torch.Tensor) -> Sequence[torch.Tensor]:
        dtype = torch.promote_types(weight.dtype, torch.float32)
        return [torch.zeros_like(weight, dtype=dtype) for _ in range(count)]

    return zeros


def _with_l2(weight: TrainedWeight, step: UpdateStep) -> torch.Tensor:
    """Returns the clipped gradient of the loss plus L2 regularization, as torch's Adam and SGD compute it."""
    assert weight.gradient is not None
    gradient = weight.gradient.to(weight.master.dtype).mul_(step.scale)
    return gradient.add_(weight.master, alpha=weight.decay) if weight.decay else gradient


def _adamw_with(
    kernel: Callable[[Sequence[WeightUpdate], AdamWStep], None], l2: bool = False
) -> Callable[[Sequence[TrainedWeight], UpdateStep], None]:
    """Returns an update function that calls `kernel`. With `l2` it is Adam instead of AdamW."""

    def updated(weight: TrainedWeight, step: UpdateStep) -> WeightUpdate:
        gradient = _with_l2(weight, step) if l2 else weight.gradient
        assert gradient is not None
        rounds = weight.master.dtype == torch.bfloat16  # other weights need no random bits
        return WeightUpdate(
            weight.master,
            [weight.moments[kind] for kind in weight.rule.moments],
            gradient,
            weight.working,
            weight_decay=0.0 if l2 else weight.decay,
            seed=derive_seed(step.training.seed, "rounding", step.number, weight.number) if rounds else 0,
        )

    def update(weights: Sequence[TrainedWeight], step: UpdateStep) -> None:
        betas = step.training.beta1, step.training.beta2
        settings = AdamWStep(step.lr, betas, ADAM_EPS, step.number, 1.0 if l2 else step.scale)
        for some in [[weight] for weight in weights] if l2 else [weights]:  # Adam's gradients are copies: one at a time
            kernel([updated(weight, step) for weight in some], settings)

    return update


def _sgd(weights: Sequence[TrainedWeight], step: UpdateStep) -> None:
    """Updates weights by stochastic gradient descent with momentum beta1, without dampening."""
    for weight in weights:
        momentum = weight.moments["momentum_buffer"].mul_(step.training.beta1).add_(_with_l2(weight, step))
        weight.master.add_(momentum, alpha=-step.lr)
        if weight.working is not None:
            weight.working.copy_(weight.master)


def _muon(weights: Sequence[TrainedWeight], step: UpdateStep) -> None:
    """Updates weights along their orthogonalized momentum (Jordan et al. 2024), several of one shape together.

    Each weight is a matrix or a stack of matrices. torch.optim.Muon is not used because it processes one matrix at a
    time and always computes in bf16, which is slow if the processor emulates it.
    """
    # Grouped by unsharded shapes: ranks may have unequal numbers of rows but must gather in the same order.
    in_order = sorted(weights, key=lambda w: w.parameter.shape)
    for shape, group in groupby(in_order, key=lambda w: w.parameter.shape):
        same, together = list(group), max(1, MUON_CHUNK_ELEMENTS // shape.numel())
        for start in range(0, len(same), together):
            _muon_chunk(same[start : start + together], step)


def _muon_chunk(weights: list[TrainedWeight], step: UpdateStep) -> None:
    shape = weights[0].parameter.shape
    full = weights[0].master.new_empty(len(weights), *shape)
    averaged, gathered = [], []
    for weight, whole in zip(weights, full, strict=True):
        assert weight.gradient is not None
        local = weight.placement.shard(whole)
        averaged.append(WeightUpdate(weight.master, (weight.moments["momentum"], local), weight.gradient))
        gathered.append((whole, local))
    nesterov(averaged, MUON_MOMENTUM, step.scale)
    for weight, (whole, local) in zip(weights, gathered, strict=True):
        whole.copy_(weight.placement.all_gather(local, shape))  # copies nothing if this rank has the whole weight
    matrices = full.view(-1, *shape[-2:])
    pieces = matrices.split(max(1, MUON_CHUNK_ELEMENTS // matrices[0].numel()))
    directions = [newton_schulz(piece, step.compute_dtype) for piece in pieces]
    together = (directions[0] if len(directions) == 1 else torch.cat(directions)).view_as(full)
    moves = [
        WeightUpdate(weight.master, (), weight.placement.shard(direction), weight.working, weight.decay)
        for weight, direction in zip(weights, together, strict=True)
    ]
    descend(moves, step.lr, MUON_UPDATE_RMS * max(shape[-2:]) ** 0.5)


ADAMW = UpdateRule(("exp_avg", "exp_avg_sq"), _zeros(2), _adamw_with(adamw))
ADAMW8 = UpdateRule(  # 8-bit codes, and one scale per block
    ("exp_avg", "exp_avg_scale", "exp_avg_sq", "exp_avg_sq_scale"),
    lambda weight: [*quantized_zeros(weight), *quantized_zeros(weight)],
    _adamw_with(adamw8),
)
ADAM = UpdateRule(("exp_avg", "exp_avg_sq"), _zeros(2), _adamw_with(adamw, l2=True))
SGD = UpdateRule(("momentum_buffer",), _zeros(1), _sgd)
MUON = UpdateRule(("momentum",), _zeros(1), _muon)
RULES = {"adamw": ADAMW, "adam": ADAM, "sgd": SGD, "muon": MUON}  # by `training.optimizer`


def rule_for(parameter: nn.Parameter, is_matrix: bool, training: TrainingConfig) -> UpdateRule:
    """Returns the rule that updates a parameter: the configured optimizer, but AdamW where Muon cannot be used."""
    rule = RULES[training.optimizer]
    if rule is MUON and not is_matrix:
        rule = ADAMW
    if rule is ADAMW and training.optimizer_state == "8bit" and parameter.numel() >= MIN_QUANTIZED_ELEMENTS:
        return ADAMW8
    return rule
