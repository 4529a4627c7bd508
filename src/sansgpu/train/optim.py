"""The optimizer of a model: reduces, clips and applies the gradients of all its trained weights."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.modules.conv import _ConvNd
from torch.profiler import record_function

from sansgpu.config import ConfigError
from sansgpu.config.training import TrainingConfig
from sansgpu.kernels.linear import Linear
from sansgpu.kernels.update import global_norm
from sansgpu.machine.distributed.group import SINGLE_PROCESS, Group
from sansgpu.train.gradient_reduction import Reducer, flat_size, message_dtype, slots
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
from sansgpu.train.update_rules import TrainedWeight, UpdateStep, rule_for

MUON_MAX_TIME_RATIO = 0.1  # `auto` chooses Muon if orthogonalization takes less than this share of a step
MUON_RELATIVE_FLOP_COST = 0.6  # seconds per Muon FLOP / seconds per step FLOP; measured; Muon consists of large matmuls
PROFILED_AS = "sansgpu update"  # the profiler's name for the gradient norm and the update

Named = list[tuple[str, nn.Parameter]]


class Optimizer:
    """Updates the trained weights of a model with the rules of `update_rules`.

    Matrices are cast to the compute dtype once per step, not at every use. The weights to save are then the fp32
    master weights, which `release_state` writes back to the model.
    """

    def __init__(
        self, model: nn.Module, training: TrainingConfig, compute_dtype: torch.dtype, group: Group = SINGLE_PROCESS
    ) -> None:
        if training.optimizer == "auto":
            raise ValueError("optimizer is auto; resolve it with choose_optimizer first")
        self._model, self._training, self._compute_dtype, self._group = model, training, compute_dtype, group
        self._sharding = training.sharding if group.size > 1 else "none"
        cut = shard_blocks(model, group, compute_dtype) if self._sharding == "full" else set()
        groups = parameter_groups(model)
        if training.optimizer == "muon" and not groups.matrices:
            raise ConfigError("training.optimizer is muon, but the model has no trainable matrices; set it to adamw.")
        places = self._places(model, {name for name, p in model.named_parameters() if p.requires_grad}, cut)
        matrices = {name for name, _ in groups.matrices}
        undecayed = {name for name, _ in groups.others}
        row_blocks = {f"{name}.weight": m.row_blocks for name, m in model.named_modules() if isinstance(m, Linear)}
        self.weights = [
            TrainedWeight(
                name,
                number,
                parameter,
                master=parameter.detach(),
                rule=rule_for(parameter, name in matrices, training),
                decay=0.0 if name in undecayed else training.weight_decay,
                placement=places[name],
                row_blocks=row_blocks.get(name, 1),
            )
            for number, (name, parameter) in enumerate([*groups.matrices, *groups.filters, *groups.others])
        ]
        for weight in self.weights:
            self._set_dtypes(weight)
        self._owned = list(self._joined())
        for parameter in model.parameters():
            if not parameter.requires_grad:  # frozen: matrices in the compute dtype, vectors in fp32
                parameter.data = parameter.data.to(compute_dtype if parameter.ndim > 1 else torch.float32)
        if cut:
            register_gradient_hooks(model, {w.name: w.mark_used for w in self.weights if w.name in cut})
        self._reducer = self._reducer_of(model) if group.size > 1 else None
        self._state: dict[str, tuple[TrainedWeight, str | None]] = {w.name: (w, None) for w in self.weights}
        self._state |= {f"{moment}.{w.name}": (w, moment) for w in self.weights for moment in w.rule.moments}

    def _places(self, model: nn.Module, trained: set[str], cut: set[str]) -> dict[str, Placement]:
        if self._sharding == "none":
            return dict.fromkeys(sorted(trained), REPLICATED)
        sizes = {n: p.numel() for n, p in model.named_parameters() if n in trained and n not in cut}
        owned = {n: OwnedByRank(self._group, owner) for n, owner in assign_owners(sizes, self._group.size).items()}
        return {**owned, **dict.fromkeys(sorted(cut), RowSharded(self._group))}

    def _reducer_of(self, model: nn.Module) -> Reducer:
        """Returns a reducer for all weights except frozen ones, and those whose gradients fully_shard reduces."""
        reduced = [w for w in self.weights if w.parameter.requires_grad and not isinstance(w.placement, RowSharded)]
        by_name = {w.name: w for w in reduced}
        in_order = [by_name[name] for name, _ in model.named_parameters() if name in by_name]
        reducer = Reducer(self._group, in_order, message_dtype(self._training))
        for weight in in_order:
            weight.on_gradient = reducer.arrived
        return reducer

    def drop_frozen(self) -> None:
        """Stops reducing gradients of weights that the model has frozen; their values and moments stay unchanged."""
        if self._reducer is not None:
            self._reducer = self._reducer_of(self._model)

    def _set_dtypes(self, weight: TrainedWeight) -> None:
        """Gives a weight its master copy, casts its parameter to the compute dtype and collects its gradients."""
        parameter = weight.parameter
        if isinstance(weight.placement, RowSharded):
            weight.master = local_tensor(parameter)
            return
        parameter.data = parameter.data.to(torch.promote_types(parameter.dtype, torch.float32))
        weight.master = parameter.detach()
        if parameter.ndim > 1 and self._compute_dtype != parameter.dtype:
            parameter.data = parameter.data.to(self._compute_dtype)
            parameter.grad_dtype = None  # gradients are fp32 from the loss and the embedding, bf16 from matmuls
            narrow = self._training.master_weights == "bf16"
            weight.master = parameter.detach() if narrow else weight.placement.shard(weight.master)
        weight.hook = parameter.register_post_accumulate_grad_hook(weight.gather)
        parameter.gradient_sum = weight  # type: ignore[attr-defined]  # see kernels.linear.GradientSum

    def _joined(self) -> Iterator[tuple[int, torch.Tensor]]:
        """Moves the parameters that a rank owns into one tensor for each dtype; yields the rank and the tensor."""
        groups: dict[tuple[int, torch.dtype], list[TrainedWeight]] = {}
        for weight in self.weights:
            if isinstance(weight.placement, OwnedByRank):
                groups.setdefault((weight.placement.owner, weight.parameter.dtype), []).append(weight)
        for (owner, dtype), weights in groups.items():
            flat = torch.zeros(flat_size(weights), dtype=dtype, device=weights[0].parameter.device)
            for weight, slot in zip(weights, slots(flat, weights), strict=True):
                is_master = weight.working is None
                weight.parameter.data = slot.copy_(weight.parameter.detach())
                if is_master:
                    weight.master = weight.parameter.detach()
            yield owner, flat

    @contextmanager
    def backward_pass(self, accumulates: bool, is_last: bool = False) -> Iterator[None]:
        """Collects the gradients of the backward passes inside it, which belong to one micro-batch of a step.

        `accumulates` is True if the step has several micro-batches. Gradient sums are then fp32 from the start, because
        changing the dtype later would fragment the heap, and matmuls add to them in place. During this rank's last
        micro-batch of the step, the all-reduce may overlap with the backward pass.
        """
        if is_last and self._reducer is not None and self._sharding != "full":
            # All ranks must start collectives in the same order. With fully_shard, which also reduces during backward,
            # the order would differ on a rank that does not use some weight.
            self._reducer.open()
        self._set_summed(accumulates)
        try:
            yield
        finally:
            self._set_summed(False)  # so that other backward passes, e.g. in a custom loss, do not add to the sums

    def _set_summed(self, summed: bool) -> None:
        for weight in self.weights:
            weight.summed = summed

    def reduce(self) -> None:
        """Sums the gradients over all ranks.

        A weight that no rank used has no gradient: its moments and its value do not change in this step.
        """
        if self._reducer is None:
            return
        self._reducer.close()
        unused = self._group.all_reduce_sums({w.name: 1.0 for w in self.weights if not w.used})
        for weight in self.weights:
            if isinstance(weight.placement, RowSharded):
                weight.gradient = None if weight.parameter.grad is None else local_tensor(weight.parameter.grad)
                weight.parameter.grad = None
            if unused.get(weight.name) == self._group.size:
                weight.gradient = None
            weight.used = False

    @record_function(PROFILED_AS)
    def grad_norm(self) -> float:
        """Returns the 2-norm of the gradients of all weights."""
        norm = global_norm([w.gradient for w in self.weights if w.gradient is not None])
        if self._sharding == "none":
            return norm
        return math.sqrt(self._group.all_reduce_sums({"squares": norm * norm})["squares"])

    @record_function(PROFILED_AS)
    @torch.no_grad()
    def step(self, lr: float, step: int, scale: float) -> None:
        """Applies update number `step` (from 1) with the gradients times `scale`, and drops the gradients."""
        self.allocate_moments()
        trained = [w for w in self.weights if w.gradient is not None]
        settings = UpdateStep(step, lr, scale, self._training, self._compute_dtype)
        for rule in dict.fromkeys(weight.rule for weight in self.weights):
            rule.update([weight for weight in trained if weight.rule is rule], settings)
        self.zero_grad()
        self._share()

    def _share(self) -> None:
        """Broadcasts the parameters that each rank updated."""
        for work in [self._group.broadcast_async(flat, owner) for owner, flat in self._owned]:
            self._group.wait(work)

    def allocate_moments(self) -> None:
        """Allocates the moments; called before the first step, because later allocation would fragment the heap."""
        for weight in self.weights:
            weight.allocate_moments()

    def zero_grad(self) -> None:
        for weight in self.weights:
            weight.gradient = None

    def parameter_copies(self) -> dict[str, torch.Tensor]:
        """Returns the fp32 weights by parameter name; on the meta device if another rank owns them."""
        return {w.name: w.as_unsharded(w.master) for w in self.weights}

    def has_state(self, name: str) -> bool:
        """Returns whether `name` in a snapshot is a master weight or a moment."""
        return name in self._state

    @torch.no_grad()
    def load(self, name: str, full: torch.Tensor) -> None:
        """Loads a master weight or moment by its name in a snapshot; `full` is the unsharded tensor."""
        weight, moment = self._state[name]
        cut = isinstance(weight.placement, RowSharded)
        if moment is not None:
            local = weight.placement.shard(full)
            weight.moments[moment] = local if local.is_meta else local.to(weight.master.device, copy=True)
            return
        if not weight.master.is_meta:
            weight.master.copy_(weight.placement.shard(full) if cut else full)
        if not cut:
            weight.parameter.detach().copy_(full)

    def gather_tensor(self, name: str) -> torch.Tensor:
        """Returns an unsharded master weight or moment on rank 0; all ranks must call it in the same order."""
        weight, moment = self._state[name]
        tensor = weight.master if moment is None else weight.moments[moment]
        return weight.placement.gather_to_main(tensor, weight.as_unsharded(tensor).shape)

    def release_state(self) -> None:
        """Writes the fp32 weights back to the model (on rank 0 only if sharded) and ends training.

        Weights that were frozen during training require gradients again, as all weights that the run has changed.
        """
        for weight in self.weights:
            weight.parameter.requires_grad_(True)
            if weight.hook is not None:
                weight.hook.remove()
                weight.parameter.gradient_sum = None  # type: ignore[attr-defined]
            full = self.gather_tensor(weight.name)
            if self._sharding == "none" or (self._group.is_main and not isinstance(weight.placement, RowSharded)):
                weight.parameter.data = full
            elif self._group.is_main:
                path, _, last = weight.name.rpartition(".")
                setattr(self._model.get_submodule(path), last, nn.Parameter(full))

    def state_names(self) -> set[str]:
        """Returns the names in `state_tensors`."""
        return {name for name, (_, moment) in self._state.items() if moment is not None}

    def state_tensors(self) -> dict[str, torch.Tensor]:
        """Returns the moments as `MOMENT.PARAMETER`. AdamW's step count is the run's step and not included."""
        return {f"{name}.{w.name}": w.as_unsharded(value) for w in self.weights for name, value in w.moments.items()}


def choose_optimizer(configured: str, step_flops: float, muon_flops: float) -> str:
    """Returns the configured optimizer; `auto` becomes Muon if orthogonalization takes less than a tenth of a step.

    Decides by FLOPs rather than a measurement, so that the choice is reproducible.
    """
    if configured != "auto":
        return configured
    cost = muon_flops * MUON_RELATIVE_FLOP_COST
    return "muon" if cost < MUON_MAX_TIME_RATIO * (step_flops + cost) else "adamw"


@dataclass(frozen=True)
class ParameterGroups:
    """The trained parameters of a model by role; a tied parameter is in one group only."""

    matrices: Named  # linear weights (outputs, inputs), or stacks (experts, outputs, inputs): decayed, may use Muon
    filters: Named  # convolution filters: decayed, never Muon
    others: Named  # embeddings, output head, norms and biases: not decayed


def parameter_groups(model: nn.Module) -> ParameterGroups:
    """Groups the trained parameters by the role of their modules; each group is in the model's order.

    In transformers, mixture-of-experts models stack the matrices of all experts in parameters (experts, outputs,
    inputs) of a module whose class name contains `Experts`.
    """
    head = getattr(model, "get_output_embeddings", lambda: getattr(model, "head", None))()
    tables = {
        id(m.weight) for m in model.modules() if (isinstance(m, nn.Embedding) or m is head) and hasattr(m, "weight")
    }
    matrices: set[int] = set()
    filters: set[int] = set()
    for module in model.modules():
        experts = "Experts" in type(module).__name__
        for name, parameter in module.named_parameters(recurse=False):
            if id(parameter) in tables or parameter.ndim < 2:
                continue
            if name == "weight" and (isinstance(module, _ConvNd) or parameter.ndim > 3):
                filters.add(id(parameter))
            elif name == "weight" or (experts and parameter.ndim == 3):
                matrices.add(id(parameter))
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    return ParameterGroups(
        [(name, p) for name, p in trained if id(p) in matrices],
        [(name, p) for name, p in trained if id(p) in filters],
        [(name, p) for name, p in trained if id(p) not in matrices | filters],
    )
