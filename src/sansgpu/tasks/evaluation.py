"""Corpora of examples with different lengths, and the evaluation of models on them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar, cast, runtime_checkable

import numpy as np
import torch
from torch import nn

from sansgpu.config import ConfigError
from sansgpu.config.data import DataConfig
from sansgpu.data.batch import Batch
from sansgpu.data.pack import Windows
from sansgpu.data.sources import Source, open_single
from sansgpu.tasks.task import EvaluationRequest, Sums

if TYPE_CHECKING:  # pretraining reads no rows
    from sansgpu.data.row_report import RowReport

SAMPLED_EXAMPLES = 256  # to find out how often examples begin like others
BATCH_DEVIATIONS = 4  # the largest of thousands of random batches is this many standard deviations above the mean


class CorpusPart(Protocol):
    """The examples of one split."""

    def __len__(self) -> int: ...

    @property
    def lengths(self) -> np.ndarray:
        """Returns the number of input tokens of each example."""


Part = TypeVar("Part", bound=CorpusPart)


@dataclass(frozen=True)
class VariableLengthCorpus(Generic[Part]):
    """Examples of different lengths for training and validation."""

    train: Part
    validation: Part
    notes: Sequence[str]
    fingerprint: str
    split: str | None = field(default=None, kw_only=True)  # message on how rows were held out, if they were

    def preview(self) -> str | None:
        return None

    @property
    def train_examples(self) -> int:
        return len(self.train)

    @property
    def example_tokens(self) -> float:
        return self.train_tokens / len(self.train)

    @property
    def sequence_tokens(self) -> float:
        """Returns the mean length of a sequence, within which tokens attend to each other."""
        return self.example_tokens

    def most_tokens(self, examples: int, padded: bool) -> int:
        if padded:
            return examples * max(int(part.lengths.max()) for part in (self.train, self.validation))
        return max(largest_batch(part.lengths, examples) for part in (self.train, self.validation))

    def shared_tokens(self, examples: int, micro_batch: int) -> float:
        """Estimates from random batches how many tokens of an example begin another one of its micro-batch, too."""
        from sansgpu.models.shared_prefixes import saved_tokens  # runs without sequences need none of its modules

        if (sequence := tokens_of(self.train)) is None:
            return 0.0
        examples, draws, found = min(examples, len(self.train)), np.random.default_rng(0), []
        for _ in range(-(-SAMPLED_EXAMPLES // examples)):
            numbers = draws.choice(len(self.train), examples, replace=False).tolist()
            saved = saved_tokens([sequence(number) for number in numbers], micro_batch)
            found.append(saved / examples)
        return float(np.mean(found))

    @property
    def train_tokens(self) -> int:
        return int(self.train.lengths.sum())

    @property
    def validation_tokens(self) -> int:
        return int(self.validation.lengths.sum())


def largest_batch(lengths: np.ndarray, examples: int) -> int:
    """Estimates the tokens in the largest batch of `examples` random examples in a run."""
    expected = examples * lengths.mean() + BATCH_DEVIATIONS * lengths.std() * examples**0.5
    return min(int(np.sort(lengths)[-examples:].sum()), int(expected))


@dataclass(frozen=True)
class TokenizedCorpus(VariableLengthCorpus[Part]):
    """Examples with the tokenizer that encoded them."""

    tokenizer: Any


class CausalModel(Protocol):
    """`models.TransformerLM`, or a transformers model wrapped by `models.huggingface.causal_lm.HuggingFaceLM`."""

    def summed_loss(
        self,
        inputs: torch.Tensor,
        targets: torch.Tensor,
        positions: torch.Tensor | None,
        document_ids: torch.Tensor | None,
    ) -> torch.Tensor:
        """Computes the cross-entropy summed over the targets, ()."""


class LanguageModeling:
    """Evaluates a causal model on validation windows."""

    def __init__(self, model: nn.Module, windows: Windows) -> None:
        self.model = model
        self._windows = windows

    def loss(self, batch: Batch) -> torch.Tensor:
        """Computes the cross-entropy summed over the targets, ()."""
        model = cast(CausalModel, self.model)
        return model.summed_loss(batch.inputs, batch.targets, batch.positions, batch.document_ids)

    @property
    def validation_examples(self) -> int:
        return len(self._windows)

    def validation_batches(self, size: int) -> Iterator[Batch]:
        """Yields the windows in order, `size` at a time. Pads the last batch, so that compiled graphs fit it, too."""
        windows = self._windows
        for start in range(0, len(windows), size):
            numbers = np.arange(start, min(start + size, len(windows)))
            sizes = torch.from_numpy(windows.target_bytes(numbers))[:, None]
            yield replace(windows.batch(numbers), target_bytes=sizes).rows(0, size)

    def evaluate(self, batch: Batch) -> Sums:
        """Returns the summed loss, the number of targets and the bytes of text that they cover."""
        assert batch.target_bytes is not None
        size = float(batch.target_bytes.sum())
        return {"loss": float(self.loss(batch)), "tokens": float(batch.target_count()), "bytes": size}

    def metrics(self, sums: Sums) -> dict[str, float]:
        return text_metrics(sums)


def text_metrics(sums: Sums) -> dict[str, float]:
    """Computes loss (nats per token), perplexity, and bits per byte, which is comparable between vocabularies."""
    loss = sums["loss"] / sums["tokens"]
    bits = sums["loss"] / math.log(2) / max(1.0, sums["bytes"])
    return {"loss": loss, "perplexity": math.exp(min(loss, 700.0)), "bits_per_byte": bits}


NORMAL_QUANTILE = 1.96  # normal quantile of a two-sided 95% interval


def wilson(share: float, count: float) -> list[float]:
    """Returns the Wilson 95% confidence interval [low, high] of a proportion `share` of `count` samples."""
    z2 = NORMAL_QUANTILE**2 / count
    middle = (share + z2 / 2) / (1 + z2)
    half = NORMAL_QUANTILE / (1 + z2) * math.sqrt(share * (1 - share) / count + z2 / (4 * count))
    return [max(0.0, middle - half), min(1.0, middle + half)]


def mean_interval(mean: float, squares: float, count: float) -> list[float]:
    """Returns the 95% confidence interval of the mean of at least 2 values, the sum of whose squares is `squares`.

    It assumes that the mean is normally distributed, as that of many values is.
    """
    variance = max(0.0, squares - count * mean**2) / (count - 1)
    half = NORMAL_QUANTILE * math.sqrt(variance / count)
    return [mean - half, mean + half]


TokensOf = Callable[[int], np.ndarray]  # returns the tokens of an example, given its index


@runtime_checkable
class HasSequences(Protocol):
    """A split whose examples are sequences, of which some may begin with the same tokens."""

    def sequence(self, index: int) -> np.ndarray:
        """Returns the tokens of an example, or the first of them."""


def tokens_of(part: object) -> TokensOf | None:
    return part.sequence if isinstance(part, HasSequences) else None


class OrderingObjective(Protocol):
    """The interface of an objective that can reorder examples to save work; see `FineTuning`."""

    model: Any

    def ordered(self, indices: np.ndarray, lengths: np.ndarray, sequence: TokensOf | None = None) -> np.ndarray: ...


class Split(CorpusPart, Protocol):
    """The examples of one split, from which batches are made."""

    def batch(self, indices: np.ndarray) -> Any: ...


M = TypeVar("M", bound=OrderingObjective)
P = TypeVar("P", bound=Split)


@runtime_checkable
class RowPredictor(Protocol):
    """An evaluator whose predictions can be shown beside the rows."""

    def predicted_rows(self, tokenizer: Any) -> Iterable[dict[str, Any]]:
        """Yields each row of the last evaluation: its text, what it should be (`label`), and what is `predicted`."""


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
        part = self._part
        order = self._objective.ordered(np.arange(len(part)), part.lengths, tokens_of(part))
        for start in range(0, len(order), size):
            yield self._part.batch(order[start : start + size])


class WindowedSplit(Split, Protocol):
    """The texts of one split in windows, of which batches are made."""

    @property
    def bad_rows(self) -> RowReport: ...

    def by_text(self) -> list[list[int]]: ...


W = TypeVar("W", bound=WindowedSplit)


class WindowEvaluator(Generic[M, W]):
    """Evaluates a model on texts in windows."""

    def __init__(self, objective: M, tokenized: W) -> None:
        self._objective, self._tokenized = objective, tokenized

    @property
    def model(self) -> torch.nn.Module:
        model: torch.nn.Module = self._objective.model
        return model

    def validation_batches(self, size: int) -> Iterator[Any]:
        """Yields batches of about `size` windows, with all windows of a text in one batch."""
        groups, lengths = self._tokenized.by_text(), self._tokenized.lengths
        yield from map(self._tokenized.batch, whole_groups(groups, lengths, size, self._objective.ordered))

    def detailed(self, metrics: dict[str, Any]) -> dict[str, Any]:
        """Adds the number of bad rows, which were skipped."""
        return {**metrics, "skipped": float(self._tokenized.bad_rows.skipped)}


def whole_groups(
    groups: Sequence[Sequence[int]], lengths: np.ndarray, size: int, ordered: Callable[..., np.ndarray]
) -> Iterator[np.ndarray]:
    """Yields batches of about `size` examples without splitting groups.

    `lengths` are the lengths of all examples, and `ordered` is `FineTuning.ordered`.
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
    """Reads the dataset of a request, with the Hub config (subset) that `data` names.

    `read` may append notes to its second argument, which become warnings. Raises ConfigError if there are no examples.
    """
    assert request.data is not None
    notes: list[str] = []
    settings = DataConfig(dataset_name=request.data, dataset_config=data.dataset_config)
    source = open_single(request.data, settings)
    notes += source.notes
    part = read(source, notes)
    for note in notes:
        request.warn(note)
    require_rows(part, request.data)
    return part


def require_rows(part: Sized, name: str) -> None:
    """Raises ConfigError if there are no rows to evaluate."""
    if not len(part):
        raise ConfigError(f"{name} has no examples to evaluate on; pass a different dataset.")
