"""The mutable state of a run: model, optimizer and progress."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import nn

from sansgpu.config.training import TrainingConfig
from sansgpu.machine.distributed.group import SINGLE_PROCESS, Group
from sansgpu.machine.execution import Execution
from sansgpu.tasks.task import Sums
from sansgpu.train.optim import Optimizer
from sansgpu.train.outer_optimizer import OuterOptimizer, is_outer
from sansgpu.train.snapshots import Progress


@dataclass
class TrainState:
    """The state that training changes and snapshots save, and the settings of its steps."""

    model: nn.Module
    optimizer: Optimizer
    training: TrainingConfig
    execution: Execution
    outer: OuterOptimizer | None = None  # None if all ranks take every step together
    progress: Progress = field(default_factory=Progress)

    @classmethod
    def create(cls, model: nn.Module, training: TrainingConfig, execution: Execution) -> TrainState:
        """Returns the state before the first step, with the model on its device and all moments allocated.

        Rank 0's weights are broadcast, because random initialization may differ in the last bit between processors.
        """
        group = execution.group
        model.to(execution.device).train()
        if group.size > 1:
            for tensor in [*(p for p in model.parameters() if p.requires_grad), *model.buffers()]:
                group.broadcast(tensor.detach(), 0)
        is_local = training.sync_every > 1 and group.size > 1
        optimizer = Optimizer(model, training, execution.compute_dtype, SINGLE_PROCESS if is_local else group)
        optimizer.allocate_moments()
        outer = OuterOptimizer(optimizer.weights, group, training) if is_local else None
        return cls(model, optimizer, training, execution, outer)

    @property
    def step_group(self) -> Group:
        """The ranks that take each step together."""
        return self.execution.group if self.outer is None else SINGLE_PROCESS

    def synchronize(self, sums: Sums) -> Sums:
        """Synchronizes ranks that train by themselves, and adds up the sums of their steps; all ranks must call it."""
        if self.outer is None:
            return sums
        self.outer.synchronize()
        return self.execution.group.all_reduce_sums(sums)

    def weights(self) -> dict[str, torch.Tensor]:
        """Returns buffers and trained parameters by name; parameters are the optimizer's master weights."""
        return {**self._buffers(), **self.optimizer.parameter_copies()}

    def moments(self) -> dict[str, torch.Tensor]:
        return {**self.optimizer.state_tensors(), **(self.outer.momenta if self.outer else {})}

    def gather_tensor(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Returns an unsharded weight or moment on rank 0; all ranks must call it in the same order."""
        return self.optimizer.gather_tensor(name) if self.optimizer.has_state(name) else tensor

    @torch.no_grad()
    def load(self, name: str, full: torch.Tensor) -> None:
        """Loads a weight or moment of a snapshot."""
        if self.outer is not None:
            self.outer.load(name, full)
        if self.optimizer.has_state(name):
            self.optimizer.load(name, full)
        elif not is_outer(name):
            self._buffers()[name].copy_(full)

    def _buffers(self) -> dict[str, torch.Tensor]:
        """Returns the state_dict entries that are not parameters."""
        parameters = {name for name, _ in self.model.named_parameters(remove_duplicate=False)}
        return {name: value for name, value in self.model.state_dict().items() if name not in parameters}
