"""The interfaces between tasks, the training loop, and the commands that use trained models."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

import torch
from torch import nn

from sansgpu.config import ConfigError, TaskSettings
from sansgpu.config.paths import local_path
from sansgpu.config.schema import Config
from sansgpu.config.wording import counted
from sansgpu.data.batch import ExampleBatch
from sansgpu.events.progress import ReportProgress
from sansgpu.machine.distributed.group import Group
from sansgpu.models.costing import Costs
from sansgpu.models.generation.sampling import Sampling

Verb = Literal[
    "evaluate", "rank", "generate", "complete", "chat", "predict", "extract", "embed", "export", "gguf", "distill"
]


class SavedState(Protocol):
    """The interface of a snapshot (checkpoint), which `train.snapshots.Snapshot` implements."""

    @property
    def folder(self) -> Path: ...

    @property
    def step(self) -> int: ...

    def state(self) -> dict[str, Any]: ...

    def weights(self) -> dict[str, torch.Tensor]: ...


@dataclass(frozen=True)
class ModelSource:
    """The location of a model: a run's snapshot, or a model's folder, file or Hub name.

    `remote_code` allows running Python code from the model's repository. Without `computes`, only the weights are read.
    """

    target: str
    remote_code: bool = False
    config: Config | None = None  # this, the snapshot and the tokenizer are only set for a run
    snapshot: SavedState | None = None
    tokenizer: Path | None = None
    computes: bool = True

    @property
    def path(self) -> Path:
        return local_path(self.target)

    @property
    def step(self) -> int | None:
        return self.snapshot.step if self.snapshot else None


@dataclass(frozen=True)
class TrainedModel:
    """A model in evaluation mode, with everything that is needed to use it."""

    task_class: Any  # a TaskClass with the capability that its command needs
    source: ModelSource
    objective: Any
    tokenizer: Any
    config: Config
    device: torch.device
    precision: str  # the precision of matmuls: fp32, bf16, int16 or int8
    is_precision_chosen: bool = False  # True if the user chose the precision


@dataclass(frozen=True)
class EvaluationRequest:
    """The data to evaluate a model on. `data` names a dataset; None means the run's own validation split."""

    data: str | None
    window: int | None  # maximum tokens of an example; None: the default of the task
    objective: str | None  # `package.module:Class`, which the user allows to import for preparing the data
    reward: str | None  # a reward to use instead of the run's; Python code only if the user allows it to run
    own_corpus: Callable[[], Corpus]  # reads and tokenizes the run's own data
    cache: Path
    progress: ReportProgress
    warn: Callable[[str], None]

    def window_within(self, context: int, default: int) -> int:
        """Returns the maximum tokens of an example: the requested number, or `default` but at most `context`.

        Raises ConfigError if the requested number exceeds the context.
        """
        if self.window is not None and self.window > context:
            raise ConfigError(
                f"--window {self.window} is longer than the model's context of {counted(context, 'token')}; lower it."
            )
        return self.window or min(default, context)


@runtime_checkable
class DetailedEvaluator(Protocol):
    """An evaluator that reports more details in `sansgpu eval` than during training."""

    def detailed(self, metrics: dict[str, float]) -> dict[str, Any]:
        """Returns the metrics of an evaluation, with details added."""


@runtime_checkable
class PredictionWriter(Protocol):
    """An evaluator that saves its predictions in the run's folder."""

    def save(self, folder: Path) -> list[Path]:
        """Writes the predictions and returns the paths of the files."""


Gather = Callable[[Any], list[Any]]
Sums = dict[str, float]  # numerators and denominators of metrics, to be summed over batches and ranks


def add_sums(total: Sums, more: Sums) -> None:
    """Adds `more` to `total` in place."""
    for name, value in more.items():
        total[name] = total.get(name, 0.0) + value


class StepSums:
    """Accumulates sums over the training passes of a step."""

    def __init__(self) -> None:
        self._sums = Sums()

    def add(self, more: Sums) -> None:
        add_sums(self._sums, more)

    def take(self) -> Sums:
        """Returns and resets the sums."""
        sums, self._sums = self._sums, Sums()
        return sums


class Evaluator(Protocol):
    """Computes metrics of a model on validation data."""

    @property
    def model(self) -> nn.Module: ...

    def validation_batches(self, size: int) -> Iterator[ExampleBatch]:
        """Yields the validation examples in order, `size` at a time."""

    def evaluate(self, batch: Any) -> Sums:
        """Returns the sums over one validation batch."""

    def metrics(self, sums: Sums) -> dict[str, float]:
        """Computes metrics from the sums over all batches. They must include `loss`, for which lower is better."""


@runtime_checkable
class Collecting(Protocol):
    """An evaluator that produces more than sums, such as predictions."""

    def collect(self, gather: Gather) -> None:
        """Merges the results of all ranks; `gather` is an all_gather of JSON values."""


@runtime_checkable
class StepWideObjective(Protocol):
    """An objective whose loss depends on all examples of a step together, for example one with in-batch negatives."""

    def outputs(self, batch: Any) -> torch.Tensor:
        """Computes the model outputs for `step_loss`: any number of rows per example, (S, D)."""

    def step_loss(self, outputs: torch.Tensor, batches: Sequence[Any]) -> torch.Tensor:
        """Computes the differentiable loss, (), from the outputs of several batches, summed over their targets."""


@runtime_checkable
class OnPolicyObjective(Protocol):
    """An objective that learns from text that its current weights generate, as in reinforcement learning."""

    def complete(self, batch: Any, group: Group) -> ExampleBatch:
        """Returns the batch to train on, made from the prompts of a step. All ranks call it and get the same batch."""

    def generation_seconds(self, completions: int, tokens: int) -> float:
        """Estimates the time to generate `completions` texts; a prompt and its completion have `tokens` tokens."""


@runtime_checkable
class CarriesSums(Protocol):
    """A task whose training metrics also depend on steps before the last step event."""

    def carried_sums(self, sums: Sums) -> Sums:
        """Returns what of the sums since the last step event the next one needs, too."""


@runtime_checkable
class FindsProblems(Protocol):
    """A task that recognizes steps from which the model learns nothing."""

    def step_problem(self, event: Mapping[str, Any]) -> str | None:
        """Describes what is wrong in the steps of a step event and what to change, or returns None."""


@runtime_checkable
class FittedHead(Protocol):
    """A task whose head is not trained by gradient descent, but fitted to the trained model's outputs."""

    def fit_head(self, micro_batch: int, device: torch.device) -> None:
        """Fits the head on the training data. The result depends only on weights and data; all ranks get the same."""


@runtime_checkable
class ComparedWithReference(Protocol):
    """A task whose loss needs the outputs of a reference model: the model before training."""

    def compute_reference(
        self, device: torch.device, precision: str, cache: Path, progress: ReportProgress, group: Group
    ) -> None:
        """Computes the reference outputs for all data, or reads them from the cache. Raises ConfigError."""


@runtime_checkable
class InitializedFromData(Protocol):
    """A task whose initial weights depend on the training data."""

    def initialize(self, progress: ReportProgress) -> None:
        """Sets the initial weights of a new run."""


@runtime_checkable
class ReferenceCorpus(Protocol):
    """The data of a task that is `ComparedWithReference`."""

    @property
    def reference_tokens(self) -> int:
        """Returns the number of tokens in all splits for which reference outputs are computed."""


@runtime_checkable
class SizedEvaluator(Protocol):
    """An evaluator whose batches all have the requested size, except the last one."""

    @property
    def validation_examples(self) -> int:
        """Returns the number of examples in the validation data."""


@runtime_checkable
class GatheringEvaluator(Protocol):
    """An evaluator with metrics that cannot be computed from sums, such as a rank correlation."""

    def gather(self, all_gather_rows: Callable[[torch.Tensor], list[torch.Tensor]]) -> None:
        """Adds the results of other ranks. `all_gather_rows` gathers tensors whose first dimensions may differ."""


@runtime_checkable
class RankingEvaluator(Protocol):
    """An evaluator with metrics that are too expensive for all examples."""

    def rank_sample(self, device: torch.device, precision: str, progress: ReportProgress) -> dict[str, float]:
        """Returns the metrics of a fixed sample. Each rank calls it and computes the whole sample."""


# The sums of `Objective.step_sums` that count the tokens of all sequences, and those of them that were computed.
SEQUENCE_TOKENS, COMPUTED_TOKENS = "sequence_tokens", "computed_tokens"


class Objective(Protocol):
    """A model and its loss."""

    @property
    def model(self) -> nn.Module: ...

    def loss(self, batch: Any) -> torch.Tensor:
        """Computes the differentiable loss, (), summed over the batch's targets."""

    def step_sums(self) -> Sums:
        """Returns and resets the sums of the training passes so far, for metrics other than the loss."""

    def step_metrics(self, sums: Sums) -> dict[str, float]:
        """Computes training metrics from `step_sums` summed over ranks; {} if the task has none."""

    def between_blocks(self, callback: Callable[[], None]) -> None:
        """Registers a callback to call several times per training pass, which may raise an error to abort it."""


class Corpus(Protocol):
    """Tokenized training and validation data."""

    @property
    def train_examples(self) -> int:
        """Returns the number of examples per epoch."""

    @property
    def example_tokens(self) -> float:
        """Returns the mean number of tokens per example."""

    def most_tokens(self, examples: int, padded: bool) -> int:
        """Estimates the tokens of the largest batch of `examples` random examples, with padding if `padded`."""

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
        """Returns a training example as text with its loss mask marked, or None if every token is a target."""

    @property
    def fingerprint(self) -> str:
        """Identifies the data, to detect on resume that it has changed."""


class Task(Objective, Protocol):
    """A model with its training data and its evaluator, as the training loop needs it."""

    fingerprint: str  # identifies the data
    flops_per_token: float  # FLOPs to train on one token
    notes: Sequence[str]  # messages for the user about the model

    @property
    def evaluator(self) -> Evaluator: ...

    def batch(self, step: int, total_steps: int | None = None) -> ExampleBatch:
        """Returns the global batch of a step, a pure function of the seed and the step.

        Tasks whose batches change over the course of a run also use its length, `total_steps`.
        """

    def sample(self, prompt: str, tokens: int, sampling: Sampling) -> str:
        """Generates a continuation of `prompt`, or "" if the model does not generate text."""

    def save_tokenizer(self, folder: Path) -> None: ...

    def export(self, folder: Path) -> None:
        """Writes the model as a Hugging Face folder."""


class TaskClass(Protocol):
    """The class of a task: everything that works without its training data.

    `capabilities` has the interfaces that only some commands need.
    """

    settings: TaskSettings  # the task's configuration keys, defaults and validation
    verbs_for_any_model: tuple[Verb, ...]  # commands for which the task handles any Hugging Face model
    verbs_without_kernels: tuple[Verb, ...]  # commands that take less time without loading the C++ kernels
    has_windows: bool  # True if users can choose the window length for evaluation

    def __call__(self, config: Config, corpus: Any, effective_batch: int) -> Task: ...

    def prepare(self, config: Config, cache: Path, progress: ReportProgress) -> tuple[Config, Any]:
        """Reads and tokenizes the data, and fills in settings that depend on it. Raises ConfigError."""

    def with_vocabulary(self, config: Config) -> Config:
        """Estimates the settings that `prepare` fills in, without reading the data. Raises ConfigError."""

    def costs(self, config: Config) -> Costs:
        """Returns the estimate of training costs, without building the model."""

    def new_objective(self, config: Config, layers: int | None = None) -> Objective:
        """Builds a model with its loss, without data; `layers` can change the number of blocks."""

    def kept_tokens(self, corpus: Any) -> int:
        """Returns the number of tokens of the data for which outputs of frozen layers can be kept."""

    def random_batch(self, config: Config, size: int, tokens: int | None = None) -> ExampleBatch:
        """Builds a random micro-batch of `size` examples, each of `tokens` tokens if lengths can vary."""

    def recorded_settings(self, config: Config, recorded: dict[str, Any]) -> list[str]:
        """Returns `key=value` for the `recorded` settings that a resumed run must keep: they depend on the data."""

    def recognizes(self, target: str) -> bool:
        """Returns whether a folder, file or Hub name is a model of this task, though not a run."""

    def load(self, source: ModelSource) -> tuple[Any, Any, Config]:
        """Returns the objective with trained weights, the tokenizer and the configuration. Raises ConfigError."""

    def evaluation_batch(self, config: Config) -> int:
        """Returns the batch size for evaluation."""

    def evaluator_for(self, loaded: TrainedModel, request: EvaluationRequest) -> Evaluator:
        """Prepares the evaluation of a model. Raises ConfigError if the data cannot be used."""

    def export_model(self, loaded: TrainedModel, folder: Path, merge: bool | None) -> None:
        """Writes a Hugging Face folder. `merge` says whether to merge an adapter; None: as configured."""
