"""The contract of tasks: protocols between them, the training loop and the commands that use trained models."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

import torch
from torch import nn

from sansgpu.config import Config, ConfigError, TaskSettings
from sansgpu.config.paths import local_path
from sansgpu.config.wording import counted
from sansgpu.data.batch import ExampleBatch
from sansgpu.data.shards import ReportProgress
from sansgpu.machine.distributed.group import Group
from sansgpu.models.costing import Costs

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

    task_class: Any  # a TaskClass with the capability that its command needs
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


Gather = Callable[[Any], list[Any]]
Sums = dict[str, float]  # numerators and denominators of metrics, which are summed over batches


def add_sums(total: Sums, more: Sums) -> None:
    """Adds `more` to `total` in place."""
    for name, value in more.items():
        total[name] = total.get(name, 0.0) + value


class StepSums:
    """The sums of the training passes of a step."""

    def __init__(self) -> None:
        self._sums = Sums()

    def add(self, more: Sums) -> None:
        add_sums(self._sums, more)

    def take(self) -> Sums:
        """Returns and resets the sums."""
        sums, self._sums = self._sums, Sums()
        return sums


class Evaluator(Protocol):
    """A model and its validation data."""

    @property
    def model(self) -> nn.Module: ...

    def validation_batches(self, size: int) -> Iterator[ExampleBatch]:
        """Yields the validation data in order, `size` examples at a time."""

    def evaluate(self, batch: Any) -> Sums:
        """Returns the contributions of one validation batch to the sums."""

    def metrics(self, sums: Sums) -> dict[str, float]:
        """Computes metrics from sums over all batches. They include `loss`; lower is better."""


@runtime_checkable
class Collecting(Protocol):
    """A task whose evaluation produces more than sums, such as predictions."""

    def collect(self, gather: Gather) -> None:
        """Merges the results of all ranks; `gather` is an all_gather of JSON values."""


@runtime_checkable
class StepWideObjective(Protocol):
    """An objective whose loss relates all examples of a step to each other, such as one with in-batch negatives."""

    def outputs(self, batch: Any) -> torch.Tensor:
        """Computes what the loss depends on: any number of rows for each example, (S, D)."""

    def step_loss(self, outputs: torch.Tensor, batches: Sequence[Any]) -> torch.Tensor:
        """Computes the differentiable loss, (), of the outputs of several batches, summed over their targets."""


@runtime_checkable
class FittedHead(Protocol):
    """A task whose model has a head that is not trained, but fitted to what the trained weights compute."""

    def fit_head(self, micro_batch: int, device: torch.device) -> None:
        """Fits the head to the training data, a pure function of the weights and the data, equal on every rank."""


@runtime_checkable
class ComparedWithReference(Protocol):
    """A task whose loss depends on what the model computes before training."""

    def compute_reference(
        self, device: torch.device, precision: str, cache: Path, progress: ReportProgress, group: Group
    ) -> None:
        """Computes what the loss needs on all data, or reads it from the cache. Raises ConfigError."""


@runtime_checkable
class ReferenceCorpus(Protocol):
    """Data on which a model is evaluated before training, for a task that is `ComparedWithReference`."""

    @property
    def reference_tokens(self) -> int:
        """Returns the number of tokens, of all splits, to evaluate before training."""


@runtime_checkable
class SizedEvaluator(Protocol):
    """An evaluator whose batches all have the requested size, except for the last one."""

    @property
    def validation_examples(self) -> int:
        """Returns the number of examples in the validation data."""


@runtime_checkable
class GatheringEvaluator(Protocol):
    """An evaluator whose metrics are no sums over examples, such as a rank correlation."""

    def gather(self, all_gather_rows: Callable[[torch.Tensor], list[torch.Tensor]]) -> None:
        """Adds the results of other ranks. `all_gather_rows` gathers tensors whose first dimensions may differ."""


@runtime_checkable
class RankingEvaluator(Protocol):
    """An evaluator with metrics that are too expensive for all examples."""

    def rank_sample(self, device: torch.device, precision: str, progress: ReportProgress) -> dict[str, float]:
        """Returns the metrics of a fixed sample. All ranks call it, and each computes all of it."""


class Objective(Protocol):
    """A model and its loss."""

    @property
    def model(self) -> nn.Module: ...

    def loss(self, batch: Any) -> torch.Tensor:
        """Computes the differentiable loss, (), summed over the batch's targets."""

    def step_sums(self) -> Sums:
        """Returns and resets the sums that training passes have added up for metrics other than the loss."""

    def step_metrics(self, sums: Sums) -> dict[str, float]:
        """Computes training metrics from summed `step_sums`; empty if the task has none."""

    def between_blocks(self, callback: Callable[[], None]) -> None:
        """Registers a callback that runs several times per training pass and may raise to abort the pass."""


class Corpus(Protocol):
    """Tokenized training and validation data."""

    @property
    def train_examples(self) -> int:
        """Returns the number of examples per epoch."""

    @property
    def example_tokens(self) -> float:
        """Returns the mean number of tokens per example."""

    def most_tokens(self, examples: int, padded: bool) -> int:
        """Returns the tokens of the largest batch of `examples` random examples, with padding if `padded`."""

    @property
    def train_tokens(self) -> int:
        """Returns the number of tokens per epoch, without padding."""

    @property
    def validation_tokens(self) -> int:
        """Returns the number of tokens per evaluation."""

    @property
    def notes(self) -> Sequence[str]:
        """Returns messages for the user, such as counts of truncated or dropped rows."""

    def preview(self) -> str | None:
        """Returns a training example with its loss mask as readable text, or None if every token has a loss."""

    @property
    def fingerprint(self) -> str:
        """Identifies the data, to detect on resume that it changed."""


class Task(Objective, Protocol):
    """A model with its training data and the evaluator of its validation data. The loop refers to no task by name."""

    fingerprint: str  # identifies the data
    flops_per_token: float  # needed for training
    notes: Sequence[str]  # messages for the user about the model

    @property
    def evaluator(self) -> Evaluator: ...

    def batch(self, step: int, total_steps: int | None = None) -> ExampleBatch:
        """Returns the global batch of a step, a pure function of the seed and the step.

        Tasks that change batches over the run also use its length, `total_steps`.
        """

    def sample(self, prompt: str, tokens: int, seed: int) -> str:
        """Generates a continuation of `prompt`; "" if the model does not generate text."""

    def save_tokenizer(self, folder: Path) -> None: ...

    def export(self, folder: Path) -> None:
        """Writes the model as a Hugging Face folder."""


class TaskClass(Protocol):
    """The class of a task: all that is known without its data. What only some commands need is in `capabilities`."""

    settings: TaskSettings  # the keys of the configuration, their defaults and problems
    verbs_for_any_model: tuple[Verb, ...]  # those for which it takes every Hugging Face model
    verbs_without_kernels: tuple[Verb, ...]  # those that are not worth loading our kernels for
    has_windows: bool  # True if the length of the windows to evaluate can be chosen

    def __call__(self, config: Config, corpus: Any, effective_batch: int) -> Task: ...

    def prepare(self, config: Config, cache: Path, progress: ReportProgress) -> tuple[Config, Any]:
        """Reads and tokenizes the data, and fills in settings that depend on it. Raises ConfigError."""

    def with_vocabulary(self, config: Config) -> Config:
        """Estimates the settings that `prepare` fills in, without reading the data. Raises ConfigError."""

    def costs(self, config: Config) -> Costs:
        """Returns what training costs, without building the model."""

    def new_objective(self, config: Config, layers: int | None = None) -> Objective:
        """Builds a model with its loss but without data, with `layers` blocks if given."""

    def random_batch(self, config: Config, size: int, tokens: int | None = None) -> ExampleBatch:
        """Builds a random micro-batch of `size` examples; `tokens` is the length of each if lengths may vary."""

    def recorded_settings(self, config: Config, recorded: dict[str, Any]) -> list[str]:
        """Returns `key=value` of the `recorded` settings that a resumed run keeps, as they depend on the data."""

    def recognizes(self, target: str) -> bool:
        """Returns whether a folder, file or Hub name that is not a run holds a model in the task's own layout."""

    def load(self, source: ModelSource) -> tuple[Any, Any, Config]:
        """Loads the objective with trained weights, the tokenizer and the configuration. Raises ConfigError."""

    def evaluation_batch(self, config: Config) -> int:
        """Returns the number of examples to evaluate at a time."""

    def evaluator_for(self, loaded: TrainedModel, request: EvaluationRequest) -> Evaluator:
        """Prepares the evaluation of a model. Raises ConfigError if the data cannot be used."""

    def export_model(self, loaded: TrainedModel, folder: Path, merge: bool | None) -> None:
        """Writes a Hugging Face folder. `merge` chooses whether an adapter is merged; None: as configured."""
