"""The mutable state of a run: model, optimizer and progress."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields
from typing import Any

import torch
from torch import nn

from sansgpu.config import TrainingConfig
from sansgpu.machine.group import SINGLE_PROCESS, Group
from sansgpu.tasks.task import Sums, add_sums
from sansgpu.train.optim import Optimizer


@dataclass
class Progress:
    """The counters of a run and its best validation loss, saved in state.json."""

    step: int = 0
    tokens: int = 0
    total_steps: int | None = None  # estimated from the remaining time if the run is time-limited
    best_loss: float | None = None
    best_step: int | None = None
    logged_loss: float = 0.0  # loss sum since the last step event
    logged_targets: int = 0
    logged_sums: Sums = field(default_factory=dict)  # the task's sums since the last step event

    def add_step(self, tokens: int, loss_sum: float, targets: int, sums: Sums) -> None:
        self.step += 1
        self.tokens += tokens
        self.logged_loss += loss_sum
        self.logged_targets += targets
        add_sums(self.logged_sums, sums)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Progress:
        return cls(**{f.name: values[f.name] for f in fields(cls) if f.name in values})


@dataclass
class TrainState:
    """The state that training changes and snapshots save."""

    model: nn.Module
    optimizer: Optimizer
    progress: Progress

    @classmethod
    def create(
        cls,
        model: nn.Module,
        training: TrainingConfig,
        device: torch.device,
        compute_dtype: torch.dtype,
        group: Group = SINGLE_PROCESS,
    ) -> TrainState:
        """Returns the state before the first step, with the model on `device` and all moments allocated.

        Rank 0's weights are broadcast, because random initialization may differ in the last bit between processors.
        """
        model.to(device).train()
        if group.size > 1:
            for tensor in [*(p for p in model.parameters() if p.requires_grad), *model.buffers()]:
                group.broadcast(tensor.detach(), 0)
        optimizer = Optimizer(model, training, compute_dtype, group)
        optimizer.allocate_moments()
        return cls(model, optimizer, Progress())

    def weights(self) -> dict[str, torch.Tensor]:
        """Returns buffers and trained parameters by name; parameters are the optimizer's master weights."""
        return {**self._buffers(), **self.optimizer.parameter_copies()}

    def moments(self) -> dict[str, torch.Tensor]:
        return self.optimizer.state_tensors()

    def gather_tensor(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Returns an unsharded weight or moment on rank 0; all ranks must call it in the same order."""
        return self.optimizer.gather_tensor(name) if self.optimizer.has_state(name) else tensor

    @torch.no_grad()
    def load(self, name: str, full: torch.Tensor) -> None:
        """Loads a weight or moment of a snapshot."""
        if self.optimizer.has_state(name):
            self.optimizer.load(name, full)
        else:
            self._buffers()[name].copy_(full)

    def _buffers(self) -> dict[str, torch.Tensor]:
        """Returns the state_dict entries that are not parameters."""
        parameters = {name for name, _ in self.model.named_parameters(remove_duplicate=False)}
        return {name: value for name, value in self.model.state_dict().items() if name not in parameters}
