"""Trained weights, and the optimizers AdamW, 8-bit AdamW, Adam, SGD and Muon that update them.

To add an optimizer, write its rule and an entry in RULES, its name in `config.training`, and its memory in
`models.costing`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import groupby

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from sansgpu.config import derive_seed
from sansgpu.config.training import TrainingConfig
from sansgpu.kernels.newton_schulz import newton_schulz
from sansgpu.kernels.update import (
    AdamWStep,
    WeightUpdate,
    adamw,
    adamw8,
    add_product,
    descend,
    nesterov,
    quantized_zeros,
)
from sansgpu.train.sharding import REPLICATED, Placement, RowSharded

ADAM_EPS = 1e-8
MIN_QUANTIZED_ELEMENTS = 4096  # the moments of smaller weights are not quantized, because it would save little
MUON_MOMENTUM, MOMENTUM_STEPS = 0.95, 2000  # its last value and the steps until then: short runs need less of it
MUON_UPDATE_RMS = 0.2  # the typical update size of AdamW, so that both share one learning rate (arXiv 2502.16982)
MUON_CHUNK_ELEMENTS = 1 << 22  # elements orthogonalized at once, which takes about five times their memory


@dataclass(frozen=True)
class UpdateStep:
    """The settings of one optimizer step."""

    number: int  # counts from 1
    lr: float
    scale: float  # factor of all gradients, which clips them
    training: TrainingConfig
    compute_dtype: torch.dtype


@dataclass(frozen=True)
class UpdateRule:
    """An optimizer's moments, and the function that updates weights with them."""

    moments: tuple[str, ...]  # names in snapshots
    zeros: Callable[[torch.Tensor], Sequence[torch.Tensor]]  # initial moments of a weight, in the order of the names
    update: Callable[[Sequence[TrainedWeight], UpdateStep], None]  # updates weights that have gradients


@dataclass
class TrainedWeight:
    """A trained tensor.

    `parameter` is the tensor the model computes with. `master` is its fp32 copy, or the parameter itself if there is no
    copy. `master` and `moments` hold only the part that `placement` assigns to this rank.
    """

    name: str
    number: int  # position among the trained weights of the model
    parameter: nn.Parameter
    master: torch.Tensor
    rule: UpdateRule
    decay: float
    placement: Placement = REPLICATED
    row_blocks: int = 1  # see kernels.linear.Linear
    moments: dict[str, torch.Tensor] = field(default_factory=dict)
    gradient: torch.Tensor | None = None
    used: bool = False  # this rank computed a gradient in one of the step's micro-batches
    summed: bool = False  # accumulate gradients of several micro-batches in fp32; otherwise use them as computed
    hook: RemovableHandle | None = None
    on_gradient: Callable[[TrainedWeight], None] | None = None  # called with the weight after each gradient

    def mark_used(self) -> None:
        """Records that this rank computed a gradient of the weight in this step."""
        self.used = True

    def gather(self, parameter: torch.Tensor) -> None:
        """Accumulates the gradient of a backward pass; registered as a post-accumulate-grad hook.

        Autograd has no gradient if kernels added all of it to `gradient`; see `kernels.linear.GradientSum`.
        """
        new, parameter.grad = parameter.grad, None
        if new is not None:
            self._add(new)
        elif self.gradient is None:
            return  # the functions that use this weight have no gradient of it
        self.mark_used()
        if self.on_gradient is not None:
            self.on_gradient(self)

    def _add(self, new: torch.Tensor) -> None:
        if new.is_sparse and self.gradient is None:
            new = new.to_dense()
        if self.gradient is None:
            self.gradient = new.to(torch.promote_types(new.dtype, torch.float32)) if self.summed else new
        else:
            self.gradient = add_product(self.gradient, new)

    def allocate_moments(self) -> None:
        """Sets the moments to zero unless they exist."""
        if not self.moments:
            local = self.master if isinstance(self.placement, RowSharded) else self.placement.shard(self.master)
            self.moments = dict(zip(self.rule.moments, self.rule.zeros(local), strict=True))

    @property
    def working(self) -> torch.Tensor | None:
        """The parameter's tensor if it is a lower-precision copy of the master, otherwise None."""
        return None if self.parameter.dtype == self.master.dtype else self.parameter.detach()

    def as_unsharded(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns `tensor`, or an empty meta tensor with the unsharded shape if `tensor` is this rank's rows of it."""
        if not isinstance(self.placement, RowSharded):
            return tensor
        return torch.empty(self.parameter.shape, dtype=tensor.dtype, device="meta")


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
        rounds = weight.master.dtype == torch.bfloat16  # only bf16 weights are rounded stochastically
        return WeightUpdate(
            weight.master,
            [weight.moments[moment] for moment in weight.rule.moments],
            gradient,
            weight.working,
            weight_decay=0.0 if l2 else weight.decay,
            seed=derive_seed(step.training.seed, "rounding", step.number, weight.number) if rounds else 0,
        )

    def update(weights: Sequence[TrainedWeight], step: UpdateStep) -> None:
        betas = step.training.beta1, step.training.beta2
        rate = step.lr * (step.training.muon_embedding_rate if step.training.optimizer == "muon" else 1.0)
        settings = AdamWStep(rate, betas, ADAM_EPS, step.number, 1.0 if l2 else step.scale)
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


def muon_momentum(training: TrainingConfig, step: int) -> float:
    """Returns Muon's momentum in a step, counted from 1."""
    first = training.muon_momentum_start
    return first + (MUON_MOMENTUM - first) * min(1.0, step / MOMENTUM_STEPS)


def _muon(weights: Sequence[TrainedWeight], step: UpdateStep) -> None:
    """Updates weights along their orthogonalized momentum (Jordan et al. 2024), batching weights of equal shape.

    Each weight is a matrix or a stack of matrices. The blocks of rows that belong to different attention heads are
    orthogonalized separately, which learns more per step and costs less. torch.optim.Muon is not used because it
    processes one matrix at a time and always computes in bf16, which is slow if the processor emulates it.
    """

    def kind(weight: TrainedWeight) -> tuple[torch.Size, int]:
        # Unsharded shapes: ranks may have unequal numbers of rows but must gather in the same order.
        return weight.parameter.shape, weight.row_blocks

    for (shape, _), group in groupby(sorted(weights, key=kind), key=kind):
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
    nesterov(averaged, muon_momentum(step.training, step.number), step.scale)
    for weight, (whole, local) in zip(weights, gathered, strict=True):
        whole.copy_(weight.placement.all_gather(local, shape))  # copies nothing if this rank has the whole weight
    matrices = full.view(-1, shape[-2] // weights[0].row_blocks, shape[-1])
    pieces = matrices.split(max(1, MUON_CHUNK_ELEMENTS // matrices[0].numel()))
    directions = [newton_schulz(piece, step.compute_dtype) for piece in pieces]
    together = (directions[0] if len(directions) == 1 else torch.cat(directions)).view_as(full)
    moves = [
        WeightUpdate(weight.master, (), weight.placement.shard(direction), weight.working, weight.decay)
        for weight, direction in zip(weights, together, strict=True)
    ]
    descend(moves, step.lr, MUON_UPDATE_RMS * max(matrices.shape[1:]) ** 0.5)


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
