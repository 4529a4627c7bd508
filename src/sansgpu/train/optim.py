"""The optimizer: trained weights with their gradients and moments, updated by AdamW or Muon."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import groupby

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from sansgpu.config import ConfigError, TrainingConfig, derive_seed
from sansgpu.kernels.newton_schulz import newton_schulz
from sansgpu.kernels.quantized import adamw8, quantized_zeros
from sansgpu.kernels.update import adamw, add_product, global_norm
from sansgpu.machine.group import SINGLE_PROCESS, Group
from sansgpu.train.gradient_reduction import Reducer
from sansgpu.train.parameter_groups import parameter_groups
from sansgpu.train.sharding import (
    REPLICATED,
    OwnedByRank,
    Placement,
    RowSharded,
    assign_owners,
    local_tensor,
    register_gradient_hooks,
    shard_blocks,
)

MUON_MOMENTUM = 0.95
MUON_UPDATE_RMS = 0.2  # the typical update size of AdamW, so that both share one learning rate (arXiv 2502.16982)
ADAM_EPS = 1e-8
MUON_MAX_TIME_RATIO = 0.1  # `auto` chooses Muon if orthogonalization takes less than this share of a step
MUON_CHUNK_ELEMENTS = 1 << 22  # orthogonalized at once; needs about five times their memory
MUON_RELATIVE_FLOP_COST = 0.6  # seconds per Muon FLOP / seconds per step FLOP; measured, as Muon is all large matmuls
MUON, ADAMW = ("momentum",), ("exp_avg", "exp_avg_sq")
ADAMW8 = ("exp_avg", "exp_avg_scale", "exp_avg_sq", "exp_avg_sq_scale")  # 8-bit codes, and one scale per block
MIN_QUANTIZED_ELEMENTS = 4096  # the moments of smaller weights are not quantized, as it would save nothing


@dataclass
class TrainedWeight:
    """A trained tensor.

    `parameter` is the tensor the model computes with. `master` is its fp32 copy, or the parameter itself if there is no
    copy. `master` and `moments` hold only the part that `place` assigns to this rank.
    """

    name: str
    parameter: nn.Parameter
    master: torch.Tensor
    kinds: tuple[str, ...]  # names of its moments
    decay: float
    place: Placement = REPLICATED
    moments: dict[str, torch.Tensor] = field(default_factory=dict)
    gradient: torch.Tensor | None = None
    used: bool = False  # this rank computed a gradient in one of the step's micro-batches
    summed: bool = False  # accumulate gradients of several micro-batches in fp32; otherwise use them as computed
    hook: RemovableHandle | None = None
    gathered: Callable[[TrainedWeight], None] | None = None  # called with the weight after each gradient

    def mark_used(self) -> None:
        """Records that this rank computed a gradient of the weight in this step."""
        self.used = True

    def gather(self, parameter: torch.Tensor) -> None:
        """Accumulates the gradient of a backward pass; registered as a post-accumulate-grad hook."""
        new, parameter.grad = parameter.grad, None
        assert new is not None
        self.mark_used()
        if new.is_sparse and self.gradient is None:
            new = new.to_dense()
        if self.gradient is None:
            self.gradient = new.to(torch.promote_types(new.dtype, torch.float32)) if self.summed else new
        else:
            self.gradient = add_product(self.gradient, new)
        if self.gathered is not None:
            self.gathered(self)

    @property
    def working(self) -> torch.Tensor | None:
        """The parameter's tensor if it is a lower-precision copy of the master, otherwise None."""
        return None if self.parameter.dtype == self.master.dtype else self.parameter.detach()

    def described(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns a tensor with the unsharded shape and the dtype of this rank's part `tensor`."""
        if not isinstance(self.place, RowSharded):
            return tensor
        return torch.empty(self.parameter.shape, dtype=tensor.dtype, device="meta")


class Optimizer:
    """Updates the trained weights of a model with AdamW or Muon.

    Matrices are cast to the compute dtype once per step, not at every use. The weights to save are then the fp32
    `masters`; `release` writes them back to the model.
    """

    def __init__(
        self, model: nn.Module, training: TrainingConfig, compute_dtype: torch.dtype, group: Group = SINGLE_PROCESS
    ) -> None:
        if training.optimizer == "auto":
            raise ValueError("choose_optimizer turns auto into muon or adamw")
        self._model, self._training, self._compute_dtype, self._group = model, training, compute_dtype, group
        self._sharding = training.sharding if group.size > 1 else "none"
        cut = shard_blocks(model, group, compute_dtype) if self._sharding == "full" else set()
        groups = parameter_groups(model)
        if training.optimizer == "muon" and not groups.matrices:
            raise ConfigError("training.optimizer is muon, but no matrix of the model is trained; set it to adamw.")
        places = self._places(model, {name for name, p in model.named_parameters() if p.requires_grad}, cut)
        kinds, decay = MUON if training.optimizer == "muon" else ADAMW, training.weight_decay
        self.weights = [self._hold(name, p, kinds, decay, places[name]) for name, p in groups.matrices]
        self.weights += [self._hold(name, p, ADAMW, decay, places[name]) for name, p in groups.filters]
        self.weights += [self._hold(name, p, ADAMW, 0.0, places[name]) for name, p in groups.others]
        for parameter in model.parameters():
            if not parameter.requires_grad:  # frozen: matrices in the compute dtype, vectors in fp32
                parameter.data = parameter.data.to(compute_dtype if parameter.ndim > 1 else torch.float32)
        if cut:
            register_gradient_hooks(model, {w.name: w.mark_used for w in self.weights if w.name in cut})
        self._reducer = self._reducer_of(model) if group.size > 1 else None
        self._state: dict[str, tuple[TrainedWeight, str | None]] = {w.name: (w, None) for w in self.weights}
        self._state |= {f"{kind}.{w.name}": (w, kind) for w in self.weights for kind in w.kinds}

    def _places(self, model: nn.Module, trained: set[str], cut: set[str]) -> dict[str, Placement]:
        if self._sharding == "none":
            return dict.fromkeys(sorted(trained), REPLICATED)
        sizes = {n: p.numel() for n, p in model.named_parameters() if n in trained and n not in cut}
        owned = {n: OwnedByRank(self._group, owner) for n, owner in assign_owners(sizes, self._group.size).items()}
        return {**owned, **dict.fromkeys(sorted(cut), RowSharded(self._group))}

    def _reducer_of(self, model: nn.Module) -> Reducer:
        """Returns a reducer for all weights except those whose gradients fully_shard reduces."""
        by_name = {w.name: w for w in self.weights if not isinstance(w.place, RowSharded)}
        in_order = [by_name[name] for name, _ in model.named_parameters() if name in by_name]
        narrow = self._training.gradient_reduction == "bf16"
        reducer = Reducer(self._group, in_order, torch.bfloat16 if narrow else torch.float32)
        for weight in in_order:
            weight.gathered = reducer.arrived
        return reducer

    def _hold(
        self, name: str, parameter: nn.Parameter, kinds: tuple[str, ...], decay: float, place: Placement
    ) -> TrainedWeight:
        if isinstance(place, RowSharded):
            return TrainedWeight(name, parameter, local_tensor(parameter), kinds, decay, place)
        parameter.data = parameter.data.to(torch.promote_types(parameter.dtype, torch.float32))
        weight = TrainedWeight(name, parameter, parameter.detach(), kinds, decay, place)
        if kinds == ADAMW and self._training.optimizer_state == "8bit" and parameter.numel() >= MIN_QUANTIZED_ELEMENTS:
            weight.kinds = ADAMW8
        if parameter.ndim > 1 and self._compute_dtype != parameter.dtype:
            parameter.data = parameter.data.to(self._compute_dtype)
            parameter.grad_dtype = None  # gradients are fp32 from the loss and the embedding, bf16 from matmuls
            narrow = self._training.master_weights == "bf16"
            weight.master = parameter.detach() if narrow else place.shard(weight.master)
        weight.hook = parameter.register_post_accumulate_grad_hook(weight.gather)
        return weight

    def mark_last_backward(self) -> None:
        """Announces this rank's last backward pass of the step, so that the all-reduce may overlap with it."""
        if self._reducer is not None and self._sharding != "full":
            # All ranks must start collectives in the same order. With fully_shard, which also reduces during backward,
            # the order would differ on a rank that does not use some weight.
            self._reducer.open()

    def reduce(self) -> None:
        """Sums the gradients over all ranks.

        A weight that no rank used has no gradient: its moments and its value do not change in this step.
        """
        if self._reducer is None:
            return
        self._reducer.close()
        unused = self._group.all_reduce_sums({w.name: 1.0 for w in self.weights if not w.used})
        for weight in self.weights:
            if isinstance(weight.place, RowSharded):
                weight.gradient = None if weight.parameter.grad is None else local_tensor(weight.parameter.grad)
                weight.parameter.grad = None
            if unused.get(weight.name) == self._group.size:
                weight.gradient = None
            weight.used = False

    def set_accumulation(self, summed: bool) -> None:
        """Announces whether the step accumulates several micro-batches.

        Sums are then fp32 from the first one on, because changing the dtype later would fragment the heap.
        """
        for weight in self.weights:
            weight.summed = summed

    def grad_norm(self) -> float:
        """Returns the 2-norm of the gradients of all weights."""
        norm = global_norm([w.gradient for w in self.weights if w.gradient is not None])
        if self._sharding == "none":
            return norm
        return math.sqrt(self._group.all_reduce_sums({"squares": norm * norm})["squares"])

    @torch.no_grad()
    def step(self, lr: float, step: int, scale: float) -> None:
        """Applies update number `step` (from 1) with the gradients times `scale`, and drops the gradients."""
        trained = [w for w in self.weights if w.gradient is not None]
        self.allocate_moments()
        for number, weight in enumerate(self.weights):
            if weight.gradient is not None and weight.kinds != MUON:
                self._adamw(weight, lr, step, scale, derive_seed(self._training.seed, "rounding", step, number))
        # Grouped by unsharded shapes: ranks may have unequal numbers of rows but must gather in the same order.
        orthogonal = sorted((w for w in trained if w.kinds == MUON), key=lambda w: w.parameter.shape)
        for shape, same in groupby(orthogonal, key=lambda w: w.parameter.shape):
            group, together = list(same), max(1, MUON_CHUNK_ELEMENTS // shape.numel())
            for start in range(0, len(group), together):
                self._muon(group[start : start + together], lr, scale)
        self.zero_grad()
        self._share()

    def _share(self) -> None:
        """Broadcasts each parameter from the rank that updated it."""
        owned = [(w, w.place.owner) for w in self.weights if isinstance(w.place, OwnedByRank)]
        for work in [self._group.broadcast_async(w.parameter.detach(), owner) for w, owner in owned]:
            self._group.wait(work)

    def allocate_moments(self) -> None:
        """Allocates the moments; called before the first step, because later allocation would fragment the heap."""
        for weight in self.weights:
            if not weight.moments:
                weight.moments = _zeros(weight)

    def zero_grad(self) -> None:
        for weight in self.weights:
            weight.gradient = None

    def _adamw(self, weight: TrainedWeight, lr: float, step: int, scale: float, seed: int) -> None:
        assert weight.gradient is not None
        moments = [weight.moments[kind] for kind in weight.kinds]
        update: Callable[..., None] = adamw8 if weight.kinds == ADAMW8 else adamw
        update(
            weight.master,
            *moments,
            weight.gradient,
            weight.working,
            lr=lr,
            betas=(self._training.beta1, self._training.beta2),
            eps=ADAM_EPS,
            weight_decay=weight.decay,
            step=step,
            scale=scale,
            seed=seed,
        )

    def _muon(self, weights: list[TrainedWeight], lr: float, scale: float) -> None:
        """Updates weights of one shape along their orthogonalized momentum (Jordan et al. 2024).

        Each weight is a matrix or a stack of matrices. torch.optim.Muon is not used because it processes one matrix at
        a time and always computes in bf16, which is slow if the processor emulates it.
        """
        updates = []
        for weight in weights:
            assert weight.gradient is not None
            gradient, momentum = weight.gradient.to(weight.master.dtype).mul_(scale), weight.moments["momentum"]
            momentum.lerp_(gradient, 1 - MUON_MOMENTUM)
            updates.append(gradient.lerp_(momentum, MUON_MOMENTUM))  # Nesterov
        size = MUON_UPDATE_RMS * max(weights[0].parameter.shape[-2:]) ** 0.5
        whole = torch.stack([w.place.all_gather(u, w.parameter.shape) for w, u in zip(weights, updates, strict=True)])
        matrices = whole.view(-1, *whole.shape[-2:])
        for some in matrices.split(max(1, MUON_CHUNK_ELEMENTS // matrices[0].numel())):
            some.copy_(newton_schulz(some, self._compute_dtype))
        for weight, update in zip(weights, whole, strict=True):
            weight.master.mul_(1 - lr * weight.decay).add_(weight.place.shard(update), alpha=-lr * size)
            if weight.working is not None:
                weight.working.copy_(weight.master)

    def parameter_copies(self) -> dict[str, torch.Tensor]:
        """Returns the fp32 weights by parameter name; on the meta device if another rank owns them."""
        return {w.name: w.described(w.master) for w in self.weights}

    def has_state(self, name: str) -> bool:
        """Returns whether `name` in a snapshot is a master weight or a moment."""
        return name in self._state

    @torch.no_grad()
    def load(self, name: str, whole: torch.Tensor) -> None:
        """Loads a master weight or moment by its name in a snapshot; `whole` is the unsharded tensor."""
        weight, kind = self._state[name]
        cut = isinstance(weight.place, RowSharded)
        if kind is not None:
            mine = weight.place.shard(whole)
            weight.moments[kind] = mine if mine.is_meta else mine.to(weight.master.device, copy=True)
            return
        if not weight.master.is_meta:
            weight.master.copy_(weight.place.shard(whole) if cut else whole)
        if not cut:
            weight.parameter.detach().copy_(whole)

    def gather_tensor(self, name: str) -> torch.Tensor:
        """Returns an unsharded master weight or moment on rank 0; all ranks must call it in the same order."""
        weight, kind = self._state[name]
        tensor = weight.master if kind is None else weight.moments[kind]
        return weight.place.gather_to_main(tensor, weight.described(tensor).shape)

    def release_state(self) -> None:
        """Writes the fp32 weights back to the model (on rank 0 only if sharded) and ends training."""
        for weight in self.weights:
            if weight.hook is not None:
                weight.hook.remove()
            whole = self.gather_tensor(weight.name)
            if self._sharding == "none" or (self._group.is_main and not isinstance(weight.place, RowSharded)):
                weight.parameter.data = whole
            elif self._group.is_main:
                path, _, last = weight.name.rpartition(".")
                setattr(self._model.get_submodule(path), last, nn.Parameter(whole))

    def state_names(self) -> set[str]:
        """Returns the names in `state_tensors`."""
        return {f"{kind}.{w.name}" for w in self.weights for kind in w.kinds}

    def state_tensors(self) -> dict[str, torch.Tensor]:
        """Returns the moments as `KIND.PARAMETER`. AdamW's step count is the run's step and not included."""
        return {f"{kind}.{w.name}": w.described(value) for w in self.weights for kind, value in w.moments.items()}


def _zeros(weight: TrainedWeight) -> dict[str, torch.Tensor]:
    """Returns the initial moments of a weight."""
    mine = weight.master if isinstance(weight.place, RowSharded) else weight.place.shard(weight.master)
    if weight.kinds == ADAMW8:
        parts = [*quantized_zeros(mine), *quantized_zeros(mine)]
    else:
        dtype = torch.promote_types(mine.dtype, torch.float32)
        parts = [torch.zeros_like(mine, dtype=dtype) for _ in weight.kinds]
    return dict(zip(weight.kinds, parts, strict=True))


def choose_optimizer(wanted: str, step_flops: float, muon_flops: float) -> str:
    """Returns `muon` or `adamw`; `auto` becomes Muon if orthogonalization takes less than a tenth of a step.

    Decides by FLOPs rather than a measurement, so that the choice is reproducible.
    """
    if wanted != "auto":
        return wanted
    cost = muon_flops * MUON_RELATIVE_FLOP_COST
    return "muon" if cost < MUON_MAX_TIME_RATIO * (step_flops + cost) else "adamw"
