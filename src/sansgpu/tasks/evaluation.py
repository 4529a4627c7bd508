"""Evaluation of fine-tuned models: datasets to evaluate on, and the batches of their examples."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence, Sized
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
import torch

from sansgpu.config import ConfigError, DataConfig
from sansgpu.data.sources import Source, open_single
from sansgpu.tasks.trained_model import EvaluationRequest
from sansgpu.tasks.variable_length_corpus import CorpusPart

WILSON_Z = 1.96  # normal quantile of a two-sided 95 % interval


def wilson(share: float, count: float) -> list[float]:
    """Returns the interval [low, high] of a proportion `share` observed in `count` samples."""
    z2 = WILSON_Z**2 / count
    middle = (share + z2 / 2) / (1 + z2)
    half = WILSON_Z / (1 + z2) * math.sqrt(share * (1 - share) / count + z2 / (4 * count))
    return [max(0.0, middle - half), min(1.0, middle + half)]


class OrderingObjective(Protocol):
    """A model that runs examples in an order of its own; implemented by `FineTuning`."""

    model: Any

    def ordered(self, indices: np.ndarray, lengths: np.ndarray) -> np.ndarray: ...


class Split(CorpusPart, Protocol):
    """The examples of one split, from which batches are made."""

    def batch(self, indices: np.ndarray) -> Any: ...


M = TypeVar("M", bound=OrderingObjective)
P = TypeVar("P", bound=Split)


class SplitEvaluator(Generic[M, P]):
    """Evaluates a model on the examples of a split."""

    def __init__(self, objective: M, part: P) -> None:
        self._objective, self._part = objective, part

    @property
    def model(self) -> torch.nn.Module:
        model: torch.nn.Module = self._objective.model
        return model

    @property
    def validation_examples(self) -> int:
        return len(self._part)

    def validation_batches(self, size: int) -> Iterator[Any]:
        order = self._objective.ordered(np.arange(len(self._part)), self._part.lengths)
        for start in range(0, len(order), size):
            yield self._part.batch(order[start : start + size])


def whole_groups(
    groups: Sequence[Sequence[int]], lengths: np.ndarray, size: int, ordered: Callable[..., np.ndarray]
) -> Iterator[np.ndarray]:
    """Yields batches of about `size` examples; all examples of a group are in one batch.

    `lengths` are those of the examples, and `ordered` is `FineTuning.ordered`.
    """
    longest = np.array([lengths[list(numbers)].max() for numbers in groups])
    pending: list[int] = []
    for group in ordered(np.arange(len(groups)), longest):
        pending += groups[group]
        if len(pending) >= size:
            yield np.array(pending)
            pending = []
    if pending:
        yield np.array(pending)


def read_requested(request: EvaluationRequest, data: DataConfig, read: Callable[[Source, list[str]], P]) -> P:
    """Reads the dataset of a request, in the subset that `data` names. `read` also adds notes, which become warnings.

    Raises ConfigError if there are no examples.
    """
    assert request.data is not None
    notes: list[str] = []
    settings = DataConfig(dataset_name=request.data, dataset_config=data.dataset_config)
    part = read(open_single(request.data, settings), notes)
    for note in notes:
        request.warn(note)
    require_rows(part, request.data)
    return part


def require_rows(part: Sized, name: str) -> None:
    """Raises ConfigError if there is nothing to evaluate."""
    if not len(part):
        raise ConfigError(f"{name} has no examples to evaluate on.")
