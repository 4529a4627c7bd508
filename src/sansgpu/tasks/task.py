"""What the loop asks of a task."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import torch
from torch import nn

from sansgpu.data.batch import Batch

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


class Task(Evaluated, Protocol):
    """A model with what it learns from. The loop knows no task by name."""

    fingerprint: str  # of the data, to notice on resume that it changed
    steps_per_epoch: int
    tokens_per_epoch: int
    flops_per_token: float  # that the model needs to train on one

    def batch(self, step: int) -> Batch:
        """The global batch of a step: a pure function of the seed and the step."""

    def loss(self, batch: Batch) -> torch.Tensor:
        """The loss summed over the batch's targets; differentiable, ()."""

    def sample(self, prompt: str, tokens: int, seed: int) -> str:
        """What the model writes after `prompt`."""

    def compile(self, on: bool) -> None:
        """Have the model's repeated parts compiled when they next run, or run as they are written."""

    def save_tokenizer(self, folder: Path) -> None:
        """Write what turns text into this task's inputs."""

    def export(self, folder: Path) -> None:
        """Write the model as a Hugging Face folder."""
