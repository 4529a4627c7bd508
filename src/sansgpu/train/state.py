"""What moves while a run goes on."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields
from typing import Any

import torch
from torch import nn

from sansgpu.config import TrainingConfig
from sansgpu.machine.group import ALONE, Group
from sansgpu.train.optim import Optimizer


@dataclass
class Progress:
    """How far a run is: all its moving numbers but weights and moments."""

    step: int = 0
    tokens: int = 0
    total_steps: int | None = None  # as laid over the time left, where time limits the run
    best_loss: float | None = None
    best_step: int | None = None
    logged_loss: float = 0.0  # summed since the last step event
    logged_targets: int = 0
    logged_sums: dict[str, float] = field(default_factory=dict)  # the task's own

    def to_json(self) -> dict[str, Any]:
        """As it stands in a snapshot's state.json."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Progress:
        """The inverse of `to_json`."""
        return cls(**{f.name: values[f.name] for f in fields(cls) if f.name in values})


@dataclass
class TrainState:
    """A run at one moment."""

    model: nn.Module
    optimizer: Optimizer
    progress: Progress

    @classmethod
    def begin(
        cls,
        model: nn.Module,
        training: TrainingConfig,
        device: torch.device,
        compute_dtype: torch.dtype,
        group: Group = ALONE,
    ) -> TrainState:
        """Before the first step: the model where it is trained, and all memory that steps keep taken.

        Every rank of `group` begins with rank 0's weights: another processor may have drawn others in the last bit.
        """
        model.to(device).train()
        if group.size > 1:
            for tensor in [*(p for p in model.parameters() if p.requires_grad), *model.buffers()]:
                group.send(tensor.detach(), 0)
        optimizer = Optimizer(model, training, compute_dtype, group)
        optimizer.make_moments()
        return cls(model, optimizer, Progress())

    def weights(self) -> dict[str, torch.Tensor]:
        """The model's tensors by name, but for frozen ones; what is trained as the optimizer holds it."""
        return {**self._rest(), **self.optimizer.masters()}

    def moments(self) -> dict[str, torch.Tensor]:
        """What the optimizer keeps of past gradients, by kind and name."""
        return self.optimizer.state_tensors()

    def whole(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Of the weights or moments, put together on rank 0; all ranks ask in the same order."""
        return self.optimizer.whole(name) if self.optimizer.keeps(name) else tensor

    @torch.no_grad()
    def load(self, name: str, whole: torch.Tensor) -> None:
        """Take up one of the weights or moments of a snapshot."""
        if self.optimizer.keeps(name):
            self.optimizer.load(name, whole)
        else:
            self._rest()[name].copy_(whole)

    def _rest(self) -> dict[str, torch.Tensor]:
        """Tensors of the model that are no parameters."""
        parameters = {name for name, _ in self.model.named_parameters(remove_duplicate=False)}
        return {name: value for name, value in self.model.state_dict().items() if name not in parameters}
