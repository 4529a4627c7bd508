"""Trained models: where they come from, and what commands can do with them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

import torch

from sansgpu.config import Config, ConfigError
from sansgpu.config.paths import local_path
from sansgpu.config.wording import counted
from sansgpu.data.shards import ReportProgress

if TYPE_CHECKING:
    from sansgpu.tasks.task import Corpus

Verb = Literal[
    "evaluate", "rank", "generate", "complete", "chat", "predict", "extract", "embed", "export", "gguf", "distill"
]


class SavedState(Protocol):
    """A snapshot; implemented by `train.snapshots.Snapshot`."""

    @property
    def folder(self) -> Path: ...

    @property
    def step(self) -> int: ...

    def state(self) -> dict[str, Any]: ...

    def weights(self) -> dict[str, torch.Tensor]: ...


@dataclass(frozen=True)
class ModelSource:
    """A run's snapshot, or else a model's folder, file or Hub name. `remote_code` allows the model's own code."""

    target: str
    remote_code: bool = False
    config: Config | None = None  # this and the following fields are set for a run only
    snapshot: SavedState | None = None
    tokenizer: Path | None = None

    @property
    def path(self) -> Path:
        return local_path(self.target)

    @property
    def step(self) -> int | None:
        return self.snapshot.step if self.snapshot else None


@dataclass(frozen=True)
class TrainedModel:
    """A model in fp32 and evaluation mode, with everything needed to use it."""

    kind: Any  # the class of its task, a TaskKind with the capability that its command needs
    source: ModelSource
    objective: Any
    tokenizer: Any
    config: Config
    device: torch.device
    precision: str  # dtype of matrix products: fp32 or bf16


@dataclass(frozen=True)
class EvaluationRequest:
    """The data to evaluate a model on. `data` names a dataset; None is the run's own validation split."""

    data: str | None
    window: int | None
    objective: str | None  # `package.module:Class` that the user allows to be imported to prepare the data
    own_corpus: Callable[[], Corpus]  # prepares the run's own data
    cache: Path
    progress: ReportProgress
    warn: Callable[[str], None]

    def window_within(self, context: int, default: int) -> int:
        """Returns the maximum tokens of an example: as requested, or `default` as far as the model's context allows.

        Raises ConfigError if the requested number is larger than the context.
        """
        if self.window is not None and self.window > context:
            raise ConfigError(
                f"--window {self.window} is longer than the model's context of {counted(context, 'token')}."
            )
        return self.window or min(default, context)


@runtime_checkable
class DetailedEvaluator(Protocol):
    """An evaluator that reports more for `sansgpu eval` than during training."""

    def detailed(self, metrics: dict[str, float]) -> dict[str, Any]:
        """Returns the metrics of an evaluation with details."""


@runtime_checkable
class PredictionWriter(Protocol):
    """An evaluator whose predictions are saved in the run's folder."""

    def save(self, folder: Path) -> list[Path]:
        """Writes the predictions and returns their files."""
