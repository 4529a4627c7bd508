"""Training data whose examples have different lengths."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import numpy as np


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

    def most_tokens(self, examples: int) -> int:
        """Returns the number of tokens of the longest examples."""
        return max(int(np.sort(part.lengths)[-examples:].sum()) for part in (self.train, self.validation))

    @property
    def train_tokens(self) -> int:
        return int(self.train.lengths.sum())

    @property
    def validation_tokens(self) -> int:
        return int(self.validation.lengths.sum())


@dataclass(frozen=True)
class TokenizedCorpus(VariableLengthCorpus[P]):
    """Examples with the tokenizer that made them."""

    tokenizer: Any
