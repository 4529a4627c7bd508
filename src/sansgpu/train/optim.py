"""The trained weights with their gradients and moments, and the two ways they are updated."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import groupby

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from sansgpu.config import ConfigError, TrainingConfig, fold_seed
from sansgpu.kernels.newton_schulz import orthogonalise
from sansgpu.kernels.quantised import adamw8, quantised_zeros
from sansgpu.kernels.update import adamw, add_product, global_norm
from sansgpu.machine.group import ALONE, Group
from sansgpu.train.parameter_groups import parameter_groups
from sansgpu.train.reduce import Reducer
from sansgpu.train.sharding import EVERYWHERE, Owned, Place, Rows, local_of, on_gradient, shard_blocks, spread

MUON_MOMENTUM = 0.95
MUON_UPDATE_RMS = 0.2  # AdamW's typical update size, so that both share one learning rate (arXiv 2502.16982)
ADAM_EPS = 1e-8
MUON_MOST = 0.1  # of a step may go into orthogonalising, where the choice is ours
MUON_NUMBERS = 1 << 22  # orthogonalised at once; they take five times their memory on the way
ORTHOGONALISE_PACE = 0.6  # time a FLOP of it takes over one of the step: it is all large products, as measured
MUON, ADAMW = ("momentum",), ("exp_avg", "exp_avg_sq")
ADAMW8 = ("exp_avg", "exp_avg_scale", "exp_avg_sq", "exp_avg_sq_scale")  # codes, and the scales of their blocks
QUANTISED_FROM = 4096  # numbers in a weight: the moments of smaller ones cost nothing


@dataclass
class Weight:
    """One trained tensor. `parameter` is what the model multiplies with, `master` its value, in fp32 unless that is the
    parameter itself. `master` and moments are what `place` leaves to this rank.
    """

    name: str
    parameter: nn.Parameter
    master: torch.Tensor
    kinds: tuple[str, ...]  # of the moments its update keeps
    decay: float
    place: Place = EVERYWHERE
    moments: dict[str, torch.Tensor] = field(default_factory=dict)
    gradient: torch.Tensor | None = None
    used: bool = False  # this rank computed a gradient in one of the step's micro-batches
    summed: bool = False  # over several micro-batches, in fp32; else the gradient stays as backward leaves it
    hook: RemovableHandle | None = None
    gathered: Callable[[Weight], None] | None = None  # is told of every gradient

    def mark_used(self) -> None:
        """Record that this rank computed a gradient of the weight in this step."""
        self.used = True

    def gather(self, parameter: torch.Tensor) -> None:
        """Add the gradient of a backward pass to those of earlier micro-batches."""
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
        """The parameter's tensor, where it is a narrower copy of the master."""
        return None if self.parameter.dtype == self.master.dtype else self.parameter.detach()

    def described(self, tensor: torch.Tensor) -> torch.Tensor:
        """Shape and type of the whole of what this rank has `tensor` of."""
        if not isinstance(self.place, Rows):
            return tensor
        return torch.empty(self.parameter.shape, dtype=tensor.dtype, device="meta")


class Optimizer:
    """All trained weights of a model. Matrices are cast to the compute dtype once a step, not at every use.

    While it holds a model in bf16, `masters` are the weights to save; `release` gives them back to the model.
    """

    def __init__(
        self, model: nn.Module, training: TrainingConfig, compute_dtype: torch.dtype, group: Group = ALONE
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
            if not parameter.requires_grad:  # as products read it, and in fp32 what no product does
                parameter.data = parameter.data.to(compute_dtype if parameter.ndim > 1 else torch.float32)
        if cut:
            on_gradient(model, {w.name: w.mark_used for w in self.weights if w.name in cut})
        self._reducer = self._reducer_of(model) if group.size > 1 else None
        self._kept: dict[str, tuple[Weight, str | None]] = {w.name: (w, None) for w in self.weights}
        self._kept |= {f"{kind}.{w.name}": (w, kind) for w in self.weights for kind in w.kinds}

    def _places(self, model: nn.Module, trained: set[str], cut: set[str]) -> dict[str, Place]:
        if self._sharding == "none":
            return dict.fromkeys(sorted(trained), EVERYWHERE)
        sizes = {n: p.numel() for n, p in model.named_parameters() if n in trained and n not in cut}
        owned = {n: Owned(self._group, owner) for n, owner in spread(sizes, self._group.size).items()}
        return {**owned, **dict.fromkeys(sorted(cut), Rows(self._group))}

    def _reducer_of(self, model: nn.Module) -> Reducer:
        """Of all weights but those whose gradients fully_shard adds up."""
        by_name = {w.name: w for w in self.weights if not isinstance(w.place, Rows)}
        in_order = [by_name[name] for name, _ in model.named_parameters() if name in by_name]
        narrow = self._training.gradient_reduction == "bf16"
        reducer = Reducer(self._group, in_order, torch.bfloat16 if narrow else torch.float32)
        for weight in in_order:
            weight.gathered = reducer.arrived
        return reducer

    def _hold(self, name: str, parameter: nn.Parameter, kinds: tuple[str, ...], decay: float, place: Place) -> Weight:
        if isinstance(place, Rows):
            return Weight(name, parameter, local_of(parameter), kinds, decay, place)
        parameter.data = parameter.data.to(torch.promote_types(parameter.dtype, torch.float32))
        weight = Weight(name, parameter, parameter.detach(), kinds, decay, place)
        if kinds == ADAMW and self._training.optimizer_state == "8bit" and parameter.numel() >= QUANTISED_FROM:
            weight.kinds = ADAMW8
        if parameter.ndim > 1 and self._compute_dtype != parameter.dtype:
            parameter.data = parameter.data.to(self._compute_dtype)
            parameter.grad_dtype = None  # the loss and the embedding leave fp32 sums, products what they are
            narrow = self._training.master_weights == "bf16"
            weight.master = parameter.detach() if narrow else place.mine(weight.master)
        weight.hook = parameter.register_post_accumulate_grad_hook(weight.gather)
        return weight

    def expect_whole(self) -> None:
        """The next backward pass is this rank's last one of the step, so sums over ranks may begin during it."""
        if self._reducer is not None and self._sharding != "full":
            # fully_shard sums during backward, too, and all ranks must start all collectives in one order. Where a rank
            # leaves a weight out, that order would differ.
            self._reducer.open()

    def reduce(self) -> None:
        """Sum the gradients over all ranks. A weight that no rank used in any micro-batch has no gradient: neither
        its moments nor its value change in this step.
        """
        if self._reducer is None:
            return
        self._reducer.close()
        unused = self._group.add_up({w.name: 1.0 for w in self.weights if not w.used})
        for weight in self.weights:
            if isinstance(weight.place, Rows):
                weight.gradient = None if weight.parameter.grad is None else local_of(weight.parameter.grad)
                weight.parameter.grad = None
            if unused.get(weight.name) == self._group.size:
                weight.gradient = None
            weight.used = False

    def expect_sum(self, summed: bool) -> None:
        """Whether the next gradients are a sum over micro-batches. In fp32 from the first on, as changing the type
        later would tear holes into the heap.
        """
        for weight in self.weights:
            weight.summed = summed

    def norm(self) -> float:
        """The 2-norm of the gradient."""
        norm = global_norm([w.gradient for w in self.weights if w.gradient is not None])
        if self._sharding == "none":
            return norm
        return math.sqrt(self._group.add_up({"squares": norm * norm})["squares"])

    @torch.no_grad()
    def step(self, lr: float, step: int, scale: float) -> None:
        """Update number `step` (1, 2, ...) by the gradients x `scale`, which are dropped."""
        trained = [w for w in self.weights if w.gradient is not None]
        self.make_moments()
        for number, weight in enumerate(self.weights):
            if weight.gradient is not None and weight.kinds != MUON:
                self._adamw(weight, lr, step, scale, fold_seed(self._training.seed, "rounding", step, number))
        # By whole shapes: ranks may have unequal numbers of rows, and must gather the same matrices in one order.
        orthogonal = sorted((w for w in trained if w.kinds == MUON), key=lambda w: w.parameter.shape)
        for shape, same in groupby(orthogonal, key=lambda w: w.parameter.shape):
            group, together = list(same), max(1, MUON_NUMBERS // shape.numel())
            for start in range(0, len(group), together):
                self._muon(group[start : start + together], lr, scale)
        self.drop_gradients()
        self._share()

    def _share(self) -> None:
        """Give all ranks what each has updated."""
        owned = [(w, w.place.owner) for w in self.weights if isinstance(w.place, Owned)]
        for work in [self._group.send_later(w.parameter.detach(), owner) for w, owner in owned]:
            self._group.finish(work)

    def make_moments(self) -> None:
        """Take the memory of the moments. Before the first step, as what stays would tear holes into its heap."""
        for weight in self.weights:
            if not weight.moments:
                weight.moments = _zeros(weight)

    def drop_gradients(self) -> None:
        """Forget what backward has left."""
        for weight in self.weights:
            weight.gradient = None

    def _adamw(self, weight: Weight, lr: float, step: int, scale: float, seed: int) -> None:
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

    def _muon(self, weights: list[Weight], lr: float, scale: float) -> None:
        """Steps along the orthogonalised momentum (Jordan et al. 2024), for weights of one shape together: matrices, or
        stacks of matrices that are orthogonalised one by one.

        torch.optim.Muon computes in bf16 everywhere, which is slow where bf16 is emulated, and one matrix at a time.
        """
        updates = []
        for weight in weights:
            assert weight.gradient is not None
            gradient, momentum = weight.gradient.to(weight.master.dtype).mul_(scale), weight.moments["momentum"]
            momentum.lerp_(gradient, 1 - MUON_MOMENTUM)
            updates.append(gradient.lerp_(momentum, MUON_MOMENTUM))  # Nesterov
        size = MUON_UPDATE_RMS * max(weights[0].parameter.shape[-2:]) ** 0.5
        whole = torch.stack([w.place.everywhere(u, w.parameter.shape) for w, u in zip(weights, updates, strict=True)])
        matrices = whole.view(-1, *whole.shape[-2:])
        for some in matrices.split(max(1, MUON_NUMBERS // matrices[0].numel())):
            some.copy_(orthogonalise(some, self._compute_dtype))
        for weight, update in zip(weights, whole, strict=True):
            weight.master.mul_(1 - lr * weight.decay).add_(weight.place.mine(update), alpha=-lr * size)
            if weight.working is not None:
                weight.working.copy_(weight.master)

    def masters(self) -> dict[str, torch.Tensor]:
        """The fp32 weights by the parameters' names; of those elsewhere, shape and type (meta device)."""
        return {w.name: w.described(w.master) for w in self.weights}

    def keeps(self, name: str) -> bool:
        """Whether a tensor of a snapshot is a master or a moment."""
        return name in self._kept

    @torch.no_grad()
    def load(self, name: str, whole: torch.Tensor) -> None:
        """Take up a master or moment by its name in a snapshot."""
        weight, kind = self._kept[name]
        cut = isinstance(weight.place, Rows)
        if kind is not None:
            mine = weight.place.mine(whole)
            weight.moments[kind] = mine if mine.is_meta else mine.to(weight.master.device, copy=True)
            return
        if not weight.master.is_meta:
            weight.master.copy_(weight.place.mine(whole) if cut else whole)
        if not cut:
            weight.parameter.detach().copy_(whole)

    def whole(self, name: str) -> torch.Tensor:
        """A master or moment by its name in a snapshot, put together on rank 0; all ranks call it in the same order."""
        weight, kind = self._kept[name]
        tensor = weight.master if kind is None else weight.moments[kind]
        return weight.place.gather(tensor, weight.described(tensor).shape)

    def release(self) -> None:
        """Give the model its fp32 weights back, on rank 0 where they are spread; it is not trained any further."""
        for weight in self.weights:
            if weight.hook is not None:
                weight.hook.remove()
            whole = self.whole(weight.name)
            if self._sharding == "none" or (self._group.first and not isinstance(weight.place, Rows)):
                weight.parameter.data = whole
            elif self._group.first:
                path, _, last = weight.name.rpartition(".")
                setattr(self._model.get_submodule(path), last, nn.Parameter(whole))

    def state_names(self) -> set[str]:
        """The names `state_tensors` has once every parameter was updated."""
        return {f"{kind}.{w.name}" for w in self.weights for kind in w.kinds}

    def state_tensors(self) -> dict[str, torch.Tensor]:
        """Moments as `KIND.PARAMETER`; AdamW's step count is the run's own."""
        return {f"{kind}.{w.name}": w.described(value) for w in self.weights for kind, value in w.moments.items()}


def _zeros(weight: Weight) -> dict[str, torch.Tensor]:
    """Moments before the first step."""
    mine = weight.master if isinstance(weight.place, Rows) else weight.place.mine(weight.master)
    if weight.kinds == ADAMW8:
        parts = [*quantised_zeros(mine), *quantised_zeros(mine)]
    else:
        dtype = torch.promote_types(mine.dtype, torch.float32)
        parts = [torch.zeros_like(mine, dtype=dtype) for _ in weight.kinds]
    return dict(zip(weight.kinds, parts, strict=True))


def choose_optimizer(wanted: str, step_flops: float, muon_flops: float) -> str:
    """`muon` or `adamw`: of `auto` Muon, where orthogonalising costs less than a tenth of a step.

    By FLOPs and no measurement, so that equal runs decide alike.
    """
    if wanted != "auto":
        return wanted
    cost = muon_flops * ORTHOGONALISE_PACE
    return "muon" if cost < MUON_MOST * (step_flops + cost) else "adamw"
