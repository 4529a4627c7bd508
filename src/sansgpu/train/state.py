"""What moves while a run goes on."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields
from typing import Any

import torch
from torch import nn

from sansgpu.config import TrainingConfig
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
        cls, model: nn.Module, training: TrainingConfig, device: torch.device, compute_dtype: torch.dtype
    ) -> TrainState:
        """Before the first step: the model where it is trained, and all memory that steps keep taken."""
        model.to(device).train()
        optimizer = Optimizer(model, training, compute_dtype)
        optimizer.make_moments()
        return cls(model, optimizer, Progress())

    def weights(self) -> dict[str, torch.Tensor]:
        """The model's tensors by name, but for frozen ones; what is trained as the optimizer holds it."""
        masters = self.optimizer.masters()
        parameters = {name for name, _ in self.model.named_parameters(remove_duplicate=False)}
        rest = {name: value for name, value in self.model.state_dict().items() if name not in parameters}
        return {**rest, **masters}

    def load_weights(self, tensors: dict[str, torch.Tensor]) -> None:
        """The inverse of `weights`."""
        with torch.no_grad():
            self.model.load_state_dict(tensors, strict=False)  # `resume` has compared the names
            self.optimizer.load_masters(tensors)
