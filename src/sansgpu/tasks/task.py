"""What the loop asks of a task."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn

from sansgpu.config import Config
from sansgpu.data.batch import Examples
from sansgpu.data.shards import Progress
from sansgpu.machine.memory import Execution, Memory
from sansgpu.models.costs import Products, StepTraffic, StepWork

Gather = Callable[[Any], list[Any]]
Sums = dict[str, float]  # a metric's numerators and denominators, which add up over batches


def add_sums(total: Sums, more: Sums) -> None:
    """Add `more` to `total`, in place."""
    for name, value in more.items():
        total[name] = total.get(name, 0.0) + value


class Evaluated(Protocol):
    """A model with what it is measured on."""

    @property
    def model(self) -> nn.Module:
        """What is measured."""

    def validation_batches(self, size: int) -> Iterator[Examples]:
        """The whole validation part, in order, `size` examples at a time."""

    def evaluate(self, batch: Any) -> Sums:
        """What one validation batch adds to each sum."""

    def metrics(self, sums: Sums) -> dict[str, float]:
        """The metrics of summed-up batches; `loss` among them, the lower the better."""


@runtime_checkable
class Collecting(Protocol):
    """A task whose evaluation leaves more behind than sums."""

    def collect(self, gather: Gather) -> None:
        """Put together what ranks have found, each of its own batches; `gather` gives all of them everyone's JSON."""


class Objective(Protocol):
    """A model with its loss."""

    @property
    def model(self) -> nn.Module:
        """What learns."""

    def loss(self, batch: Any) -> torch.Tensor:
        """The loss summed over the batch's targets; differentiable, ()."""

    def step_sums(self) -> Sums:
        """What else training passes have added up since this was last asked for."""

    def step_metrics(self, sums: Sums) -> dict[str, float]:
        """The metrics of summed-up passes; of a task without any, none."""

    def compile(self, on: bool) -> None:
        """Have the model's repeated parts compiled when they next run, or run as they are written."""

    def between_blocks(self, look: Callable[[], None]) -> None:
        """Call `look` now and then on the way of every training pass; it may raise to end that pass."""


class Corpus(Protocol):
    """Data that is ready to be learned from."""

    @property
    def train_examples(self) -> int:
        """What an epoch has of them."""

    @property
    def example_tokens(self) -> float:
        """Tokens that an example takes up, in the mean."""

    def most_tokens(self, examples: int) -> int:
        """Tokens that so many examples have at most."""

    @property
    def train_tokens(self) -> int:
        """Tokens of an epoch, without padding."""

    @property
    def validation_tokens(self) -> int:
        """Tokens of an evaluation."""

    @property
    def notes(self) -> Sequence[str]:
        """What the user is to hear of the data: what was cut or left out."""

    def preview(self) -> str | None:
        """An example as it is learned from, for people; None where there is nothing to see."""

    @property
    def fingerprint(self) -> str:
        """Names the data, to notice on resume that it changed."""


class Task(Evaluated, Objective, Protocol):
    """A model with what it learns from. The loop knows no task by name."""

    fingerprint: str  # of the data
    flops_per_token: float  # that the model needs to train on one
    notes: Sequence[str]  # what the user is to hear of the model

    def batch(self, step: int, total_steps: int | None = None) -> Examples:
        """The global batch of a step: a pure function of the seed and the step, and where the task changes it over the
        run (`total_steps` given) of how long that is.
        """

    def sample(self, prompt: str, tokens: int, seed: int) -> str:
        """What the model writes after `prompt`."""

    def save_tokenizer(self, folder: Path) -> None:
        """Write what turns text into this task's inputs."""

    def export(self, folder: Path) -> None:
        """Write the model as a Hugging Face folder."""


class TaskKind(Protocol):
    """What is known of a task before it is made: the class itself."""

    def __call__(self, config: Config, corpus: Any, effective_batch: int) -> Task:
        """The task."""

    def prepare(self, config: Config, cache: Path, progress: Progress) -> tuple[Config, Any]:
        """Make the data ready, and settle what of the configuration depends on it. Raises ConfigError."""

    def with_vocabulary(self, config: Config) -> Config:
        """The configuration as `prepare` would settle it, of data that was not looked at yet. Raises ConfigError."""

    def parameters(self, config: Config) -> dict[str, int]:
        """Parameters by part, without making the model."""

    def memory(self, config: Config, how: Execution, layers: int | None = None) -> Memory:
        """Bytes at the peak of a step; with `layers` of a model of so many blocks, or fewer where it has fewer."""

    def work(self, config: Config, tokens: float) -> StepWork:
        """FLOPs of a step of `tokens`."""

    def traffic(self, config: Config, how: Execution) -> StepTraffic:
        """Bytes a step moves at least."""

    def products(self, config: Config) -> Products:
        """The shapes of a step's matrix products."""

    def layers(self, config: Config) -> int:
        """Blocks of the model."""

    def objective(self, config: Config, layers: int | None = None) -> Objective:
        """A model and its loss, without data; with `layers` one of so many blocks."""

    def random_batch(self, config: Config, size: int, tokens: int | None = None) -> Examples:
        """A micro-batch of this shape; where examples may be short, with `tokens` each."""
