"""What the loop asks of a task."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from sansgpu.config import Config
from sansgpu.data.batch import Batch
from sansgpu.data.shards import Progress
from sansgpu.machine.memory import Execution, Memory
from sansgpu.models.costs import StepWork

Sums = dict[str, float]  # a metric's numerators and denominators, which add up over batches


class Evaluated(Protocol):
    """A model with what it is measured on."""

    @property
    def model(self) -> nn.Module:
        """What is measured."""

    def validation_batches(self, size: int) -> Iterator[Batch]:
        """The whole validation part, in order, `size` examples at a time."""

    def evaluate(self, batch: Batch) -> Sums:
        """What one validation batch adds to each sum."""

    def metrics(self, sums: Sums) -> dict[str, float]:
        """The metrics of summed-up batches; `loss` among them, the lower the better."""


class Objective(Protocol):
    """A model with its loss."""

    @property
    def model(self) -> nn.Module:
        """What learns."""

    def loss(self, batch: Batch) -> torch.Tensor:
        """The loss summed over the batch's targets; differentiable, ()."""

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
    def train_tokens(self) -> int:
        """Targets of an epoch."""

    @property
    def validation_tokens(self) -> int:
        """Targets of an evaluation."""

    @property
    def fingerprint(self) -> str:
        """Names the data, to notice on resume that it changed."""


class Task(Evaluated, Objective, Protocol):
    """A model with what it learns from. The loop knows no task by name."""

    fingerprint: str  # of the data
    flops_per_token: float  # that the model needs to train on one

    def batch(self, step: int) -> Batch:
        """The global batch of a step: a pure function of the seed and the step."""

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

    def memory(self, config: Config, how: Execution) -> Memory:
        """Bytes at the peak of a step."""

    def work(self, config: Config, tokens: int) -> StepWork:
        """FLOPs of a step of `tokens`."""

    def objective(self, config: Config) -> Objective:
        """A model and its loss, without data."""

    def random_batch(self, config: Config, size: int) -> Batch:
        """A micro-batch of this shape."""
