"""What tasks know of their data whose examples have lengths of their own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import numpy as np


class Part(Protocol):
    """Examples to train on, or held out."""

    def __len__(self) -> int: ...

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of each that are read."""


P = TypeVar("P", bound=Part)


@dataclass(frozen=True)
class RaggedCorpus(Generic[P]):
    """Examples whose lengths differ, to train on and held out."""

    train: P
    validation: P
    notes: Sequence[str]
    fingerprint: str

    @property
    def train_examples(self) -> int:
        """How many there are to train on."""
        return len(self.train)

    @property
    def example_tokens(self) -> float:
        """Tokens of an example, in the mean."""
        return self.train_tokens / len(self.train)

    def most_tokens(self, examples: int) -> int:
        """Tokens of the longest ones."""
        return max(int(np.sort(part.lengths)[-examples:].sum()) for part in (self.train, self.validation))

    @property
    def train_tokens(self) -> int:
        """Tokens of an epoch."""
        return int(self.train.lengths.sum())

    @property
    def validation_tokens(self) -> int:
        """Tokens of an evaluation."""
        return int(self.validation.lengths.sum())
