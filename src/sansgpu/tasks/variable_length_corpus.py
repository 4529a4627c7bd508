"""Training data whose examples have different lengths."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

import numpy as np

BATCH_DEVIATIONS = 4  # standard deviations by which the largest of thousands of random batches exceeds the mean


class CorpusPart(Protocol):
    """The examples of one split."""

    def __len__(self) -> int: ...

    @property
    def lengths(self) -> np.ndarray:
        """Returns the number of input tokens of each example."""


P = TypeVar("P", bound=CorpusPart)


@dataclass(frozen=True)
class VariableLengthCorpus(Generic[P]):
    """Examples of different lengths for training and validation."""

    train: P
    validation: P
    notes: Sequence[str]
    fingerprint: str
    split: str | None = field(default=None, kw_only=True)  # a clause on how rows were held out; None: none had to be

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
        """Returns the mean number of tokens that attend to each other."""
        return self.example_tokens

    def most_tokens(self, examples: int, padded: bool) -> int:
        if padded:
            return examples * max(int(part.lengths.max()) for part in (self.train, self.validation))
        return max(largest_batch(part.lengths, examples) for part in (self.train, self.validation))

    @property
    def train_tokens(self) -> int:
        return int(self.train.lengths.sum())

    @property
    def validation_tokens(self) -> int:
        return int(self.validation.lengths.sum())


def largest_batch(lengths: np.ndarray, examples: int) -> int:
    """Returns the most tokens to expect in a batch of random examples; no batch has more than the longest ones."""
    expected = examples * lengths.mean() + BATCH_DEVIATIONS * lengths.std() * examples**0.5
    return min(int(np.sort(lengths)[-examples:].sum()), int(expected))


@dataclass(frozen=True)
class TokenizedCorpus(VariableLengthCorpus[P]):
    """Examples with the tokenizer that made them."""

    tokenizer: Any
