"""Batches of examples with several texts each. B examples, S texts, N tokens in total."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property

import numpy as np
import torch

from sansgpu.data.batch import ExampleBatch, concatenated
from sansgpu.data.order import generator


@dataclass(frozen=True)
class TextGroups(ExampleBatch):
    """B examples: each is an anchor with its positive and negatives, or two texts with a score."""

    tokens: torch.Tensor  # (N,) int64
    lengths: torch.Tensor  # (S,) int64: tokens of each text
    meanings: torch.Tensor  # (S,) int64: texts with the same number are never negatives of each other
    counts: torch.Tensor  # (B,) int64: texts of each example
    scores: torch.Tensor  # (B,) float32: similarity of the two texts; 0 in data without scores
    has_loss: torch.Tensor  # (B,) bool: False for padding examples
    numbers: torch.Tensor  # (B,) int64: indices of the examples in the dataset

    @classmethod
    def joined(cls, parts: Sequence[TextGroups]) -> TextGroups:
        """Concatenates batches."""
        return cls(**{f.name: torch.cat([getattr(part, f.name) for part in parts]) for f in fields(cls)})

    def __len__(self) -> int:
        return len(self.counts)

    def target_count(self) -> int:
        return int(self.has_loss.sum())

    def token_count(self) -> int:
        return len(self.tokens)

    def rows(self, start: int, stop: int) -> TextGroups:
        first, last = (int(self.counts[:end].sum()) for end in (start, stop))
        begin, end = (int(self.lengths[:text].sum()) for text in (first, last))
        return TextGroups(
            self.tokens[begin:end],
            self.lengths[first:last],
            self.meanings[first:last],
            *(part[start:stop] for part in (self.counts, self.scores, self.has_loss, self.numbers)),
        )

    def without_targets(self, size: int) -> TextGroups:
        first = self.rows(0, 1)
        return replace(first, has_loss=torch.zeros_like(first.has_loss))

    @property
    def starts(self) -> torch.Tensor:
        """The index of each example's first text, (B,)."""
        return self.counts.cumsum(0) - self.counts


@dataclass(frozen=True, eq=False)
class TokenizedGroups:
    """The tokenized examples of a split, in which each text is stored once.

    Without labels, `members` are the indices of the texts of each example. With labels, an example is one text. Its
    positive is a random text with the same label, which changes in each epoch.
    """

    texts: list[np.ndarray]
    meanings: np.ndarray  # (texts,)
    members: list[tuple[int, ...]]
    scores: np.ndarray | None  # (examples,) float32
    labeled: bool
    seed: int
    skipped: int = 0  # number of bad rows

    def __len__(self) -> int:
        return len(self.members)

    @cached_property
    def lengths(self) -> np.ndarray:
        """The number of tokens of each example in the first epoch."""
        numbers = range(len(self))
        return np.array([sum(len(self.texts[t]) for t in self._texts_of(n, 0)) for n in numbers], np.int64)

    @cached_property
    def text_count(self) -> int:
        """The total number of texts in all examples."""
        return sum(len(self._texts_of(number, 0)) for number in range(len(self)))

    @property
    def most_texts(self) -> int:
        """The largest number of texts in an example."""
        return max(len(texts) for texts in self.members) + self.labeled

    @cached_property
    def _alike(self) -> dict[int, list[int]]:
        """Maps labels to the indices of their texts."""
        alike: dict[int, list[int]] = {}
        for number, meaning in enumerate(self.meanings.tolist()):
            alike.setdefault(meaning, []).append(number)
        return alike

    def _texts_of(self, number: int, epoch: int) -> tuple[int, ...]:
        texts = self.members[number]
        if not self.labeled:
            return texts
        others = [text for text in self._alike[int(self.meanings[texts[0]])] if text != texts[0]]
        return *texts, others[generator(self.seed, "positive", epoch, number).integers(len(others))]

    def batch(self, numbers: np.ndarray, epoch: int = 0) -> TextGroups:
        """Returns a batch of the examples with the indices `numbers`."""
        members = [self._texts_of(int(number), epoch) for number in numbers]
        scores = np.zeros(len(numbers), np.float32) if self.scores is None else self.scores[numbers]
        return text_groups(
            [[self.texts[text] for text in texts] for texts in members],
            np.array([self.meanings[text] for texts in members for text in texts], np.int64),
            scores,
            numbers,
        )


def text_groups(
    examples: Sequence[Sequence[np.ndarray]], meanings: np.ndarray, scores: np.ndarray, numbers: np.ndarray
) -> TextGroups:
    """Builds a batch from examples, which are sequences of the token ids of their texts."""
    texts = [text for example in examples for text in example]
    return TextGroups(
        concatenated(texts),
        torch.tensor([len(text) for text in texts], dtype=torch.int64),
        torch.from_numpy(meanings),
        torch.tensor([len(example) for example in examples], dtype=torch.int64),
        torch.from_numpy(scores.astype(np.float32)),
        torch.ones(len(examples), dtype=torch.bool),
        torch.from_numpy(numbers.astype(np.int64)),
    )
