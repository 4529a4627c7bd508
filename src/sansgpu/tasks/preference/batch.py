"""Tokenized preference data and its batches: prompts with two answers, or with one rated answer.

B examples, N input tokens, K target tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property

import numpy as np
import torch

from sansgpu.data.batch import IGNORE, ExampleBatch, concatenated
from sansgpu.data.sequences import shared_beginning
from sansgpu.tasks.evaluation import TokenizedCorpus, largest_batch
from sansgpu.tasks.preference.rows import Answers
from sansgpu.tasks.sft.chat import show_masked


@dataclass(frozen=True)
class AnswerPairs(ExampleBatch):
    """B prompts with two answers each. The last token of an answer is only a target, not an input."""

    tokens: torch.Tensor  # (N,) int64: prompt, first answer, second answer
    targets: torch.Tensor  # (K,) int64: first answer, second answer; IGNORE for tokens that are not learned
    sizes: torch.Tensor  # (B, 3) int64: tokens of the prompt, the first and the second answer
    labels: torch.Tensor  # (B,) int64: 1 if the first answer is good, 0 if bad, IGNORE for padding examples
    reference: torch.Tensor  # (B, 2) float64: log-probabilities of the answers under the reference model
    numbers: torch.Tensor  # (B,) int64: indices of the examples in the dataset

    @classmethod
    def of(cls, examples: Sequence[Answers], reference: np.ndarray, numbers: np.ndarray) -> AnswerPairs:
        """Concatenates examples with two answers."""
        inputs = [part for e in examples for part in (e.prompt, e.ids[0][:-1], e.ids[1][:-1])]
        targets = [np.where(known, ids, IGNORE) for e in examples for ids, known in zip(e.ids, e.learned, strict=True)]
        sizes = [[len(e.prompt), len(e.ids[0]), len(e.ids[1])] for e in examples]
        return cls(
            concatenated(inputs),
            concatenated(targets),
            torch.tensor(sizes, dtype=torch.int64).reshape(-1, 3),
            torch.tensor([int(e.label) for e in examples], dtype=torch.int64),
            torch.from_numpy(reference.astype(np.float64)),
            torch.from_numpy(numbers.astype(np.int64)),
        )

    @classmethod
    def joined(cls, batches: Sequence[AnswerPairs]) -> AnswerPairs:
        """Concatenates several batches."""
        parts = {field.name: [getattr(batch, field.name) for batch in batches] for field in fields(cls)}
        return cls(**{name: torch.cat(tensors) for name, tensors in parts.items()})

    def __len__(self) -> int:
        return len(self.sizes)

    def has_target(self) -> torch.Tensor:
        """Returns which examples contribute to the loss, (B,) bool."""
        return self.labels != IGNORE

    def target_count(self) -> int:
        return int(self.has_target().sum())

    def token_count(self) -> int:
        return len(self.tokens)

    def prompt(self, index: int) -> np.ndarray:
        """Returns the tokens of the prompt of an example."""
        start = int(self.sizes[:index].sum()) - 2 * index
        return self.tokens[start : start + int(self.sizes[index, 0])].numpy()

    def target_tokens(self) -> torch.Tensor:
        """Returns the number of target tokens of each answer, (B, 2)."""
        answers = torch.repeat_interleave(
            torch.arange(2 * len(self), device=self.sizes.device), self.sizes[:, 1:].flatten()
        )
        return torch.bincount(answers[self.targets != IGNORE], minlength=2 * len(self)).view(-1, 2)

    def content(self) -> bytes:
        """Returns the bytes of everything that determines the log-probabilities, for a cache key."""
        return b"".join(part.numpy().tobytes() for part in (self.tokens, self.targets, self.sizes))

    def rows(self, start: int, stop: int) -> AnswerPairs:
        ends = [int(self.sizes[:end].sum()) - 2 * len(self.sizes[:end]) for end in (start, stop)]
        targets = [int(self.sizes[:end, 1:].sum()) for end in (start, stop)]
        return AnswerPairs(
            self.tokens[slice(*ends)],
            self.targets[slice(*targets)],
            self.sizes[start:stop],
            self.labels[start:stop],
            self.reference[start:stop],
            self.numbers[start:stop],
        )

    def with_shared_beginning(self, count: int) -> AnswerPairs:
        inputs = self.sizes.sum(1) - 2  # the last token of each answer is only a target
        return replace(self, tokens=shared_beginning(self.tokens, inputs, count))

    def without_targets(self, size: int) -> AnswerPairs:
        first = self.rows(0, 1)
        return replace(first, labels=torch.full_like(first.labels, IGNORE))


class PreferenceExamples:
    """The examples of one split and, once computed, the answers' reference log-probabilities, (len, 2)."""

    def __init__(self, examples: Sequence[Answers]) -> None:
        self.examples = examples
        self.reference = np.zeros((len(examples), 2))

    def __len__(self) -> int:
        return len(self.examples)

    @cached_property
    def lengths(self) -> np.ndarray:
        """The number of input tokens of each example if both answers share the prompt."""
        return np.array([len(e.prompt) + sum(len(ids) - 1 for ids in e.ids) for e in self.examples], np.int64)

    @cached_property
    def sequence_lengths(self) -> np.ndarray:
        """The number of input tokens of each answer with its prompt, (len, 2)."""
        return np.array([[len(e.prompt) + len(ids) - 1 for ids in e.ids] for e in self.examples], np.int64)

    @property
    def targets(self) -> int:
        """The number of target tokens."""
        return sum(int(known.sum()) for e in self.examples for known in e.learned)

    def sequence(self, index: int) -> np.ndarray:
        return self.examples[index].prompt

    def batch(self, numbers: np.ndarray) -> AnswerPairs:
        """Returns a batch of the examples with the indices `numbers`."""
        return AnswerPairs.of([self.examples[number] for number in numbers], self.reference[numbers], numbers)


def with_other_answers(examples: Sequence[Answers], max_length: int) -> list[Answers]:
    """Adds a second answer to each rated one, from which KTO estimates the KL divergence.

    It is the answer of the next example with the same rating, truncated to `max_length`.
    """
    ordered = sorted(range(len(examples)), key=lambda number: examples[number].label)
    following = dict(zip(ordered, ordered[1:] + ordered[:1], strict=True))
    found = []
    for number, own in enumerate(examples):
        other, room = examples[following[number]], max(1, max_length - len(own.prompt))
        pairs = (own.ids[0], other.ids[0][:room]), (own.learned[0], other.learned[0][:room])
        found.append(replace(own, ids=pairs[0], learned=pairs[1]))
    return found


ANSWERS = 2  # answers per example


@dataclass(frozen=True)
class PreferenceCorpus(TokenizedCorpus[PreferenceExamples]):
    """Tokenized preferences for training and validation."""

    needs_reference: bool

    @property
    def reference_tokens(self) -> int:
        return self.train_tokens + self.validation_tokens if self.needs_reference else 0

    def preview(self) -> str | None:
        """Returns the text of the first example, with brackets around the chosen and the rejected answer."""
        first = self.train.examples[0]
        prompt = [(int(token), False) for token in first.prompt]
        shown = []
        for before, ids, learned in zip((prompt, []), first.ids, first.learned, strict=False):
            tokens = [*before, *zip(ids.tolist(), learned.tolist(), strict=True)]
            shown.append(show_masked([t for t, _ in tokens], [known for _, known in tokens], self.tokenizer))
        return "\n".join(shown)

    @property
    def sequence_tokens(self) -> float:
        return float(self.train.sequence_lengths.mean())

    def most_tokens(self, examples: int, padded: bool) -> int:
        parts = (self.train, self.validation)
        if padded:
            return ANSWERS * examples * max(int(part.sequence_lengths.max()) for part in parts)
        return max(largest_batch(part.lengths, examples) for part in parts)
