"""Batches of task grpo: prompts, and after a step has generated them, completions with their advantages.

B completions, N input tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch

from sansgpu.data.batch import IGNORE, ExampleBatch
from sansgpu.data.sequences import PackedSequences


@dataclass(frozen=True)
class PromptRow:
    """A row: its prompt and the other columns, on which its reward depends."""

    where: str  # location of the row, for messages
    ids: np.ndarray  # (P,) int64: the tokens of the prompt
    prompt: str | list[dict[str, Any]]  # text, or turns of a conversation
    columns: dict[Any, Any]


@dataclass(frozen=True)
class Prompts(ExampleBatch):
    """Prompts to complete in a training step, or in an evaluation."""

    questions: Sequence[PromptRow]
    step: int = 0

    def __len__(self) -> int:
        return len(self.questions)

    def target_count(self) -> int:
        return len(self)

    def token_count(self) -> int:
        return sum(len(question.ids) for question in self.questions)

    def rows(self, start: int, stop: int) -> Prompts:
        return replace(self, questions=self.questions[start:stop])

    def without_targets(self, size: int) -> Prompts:
        return self.rows(0, 0)


@dataclass(frozen=True)
class Completions(PackedSequences):
    """B prompts with completions, whose tokens are the targets."""

    advantages: torch.Tensor = torch.empty(0)  # noqa: RUF009  (B,) float32; tensors are not changed in place
    # Completions without an advantage change no gradient, so they are left out, but their tokens count.
    omitted_targets: int = 0
    omitted_tokens: int = 0

    @classmethod
    def with_advantages(
        cls, prompts: Sequence[np.ndarray], completions: Sequence[Sequence[int]], advantages: torch.Tensor
    ) -> Completions:
        """Concatenates prompts with their completions. The last token of a completion is only a target."""
        pairs = [(prompt, np.asarray(ids, np.int64)) for prompt, ids in zip(prompts, completions, strict=True)]
        tokens = [np.concatenate([prompt, ids[:-1]]) for prompt, ids in pairs]
        targets = [np.concatenate([np.full(len(prompt) - 1, IGNORE), ids]) for prompt, ids in pairs]
        return cls._of(PackedSequences.of(tokens, targets), advantages.float())

    @classmethod
    def _of(cls, sequences: PackedSequences, advantages: torch.Tensor) -> Completions:
        known = {field.name: getattr(sequences, field.name) for field in fields(PackedSequences)}
        return cls(**known, advantages=advantages)

    def target_count(self) -> int:
        return super().target_count() + self.omitted_targets

    def token_count(self) -> int:
        return super().token_count() + self.omitted_tokens

    def rows(self, start: int, stop: int) -> Completions:
        return self._of(super().rows(start, stop), self.advantages[start:stop])

    def with_shared_beginning(self, count: int) -> Completions:
        """Returns the batch unchanged: random completions share their prompts in groups."""
        return self

    def with_advantage_only(self) -> Completions:
        """Leaves out completions whose advantage is 0, except one if all are."""
        kept = self.advantages.nonzero().flatten().tolist() or [0]
        examples = [self.rows(number, number + 1) for number in kept]
        tensors: dict[str, Any] = {
            name: torch.cat([getattr(example, name) for example in examples])
            for name in ("tokens", "lengths", "targets", "advantages")
        }
        part = Completions(**tensors)
        return replace(
            part,
            omitted_targets=self.target_count() - part.target_count(),
            omitted_tokens=self.token_count() - part.token_count(),
        )
