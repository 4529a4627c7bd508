"""A trained tensor with its gradient and moments, and the interface of the rules that update it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from sansgpu.config import TrainingConfig
from sansgpu.kernels.update import add_product
from sansgpu.train.sharding import REPLICATED, Placement, RowSharded


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

        Autograd has no gradient if kernels added all of it to `gradient`; see `kernels.gradient_sum`.
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
