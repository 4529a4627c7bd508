"""Batches of training examples."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Self

import numpy as np
import torch

IGNORE = -100  # target that the loss skips: the default ignore_index of torch and transformers


@dataclass(frozen=True)
class ExampleBatch(ABC):
    """Base of batches, which can be split between any two examples."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def target_count(self) -> int:
        """Returns the number of targets that are not ignored, by which the summed loss is divided."""

    @abstractmethod
    def token_count(self) -> int:
        """Returns the number of input tokens without padding."""

    @abstractmethod
    def rows(self, start: int, stop: int) -> Self:
        """Returns examples [start, stop)."""

    @abstractmethod
    def without_targets(self, size: int) -> Self:
        """Returns a micro-batch of at most `size` examples whose targets are all ignored, for ranks without data."""

    def with_shared_beginning(self, count: int) -> Self:
        """Returns a copy in which all examples begin with the same `count` tokens, if they are sequences."""
        return self

    def micro_batches(self, size: int, rank: int = 0, world_size: int = 1) -> Iterator[Self]:
        """Yields this rank's micro-batches of `size` examples.

        Every rank gets the same number of micro-batches. Ranks that run out of examples get one without targets.
        """
        stride = size * world_size
        for start in range(rank * size, -(-len(self) // stride) * stride, stride):
            yield self.rows(start, start + size) if start < len(self) else self.without_targets(size)

    def to(self, device: torch.device) -> Self:
        return self._map(lambda value: value.to(device, non_blocking=True))

    def pinned(self) -> Self:
        """Returns a copy in page-locked memory."""
        return self._map(lambda value: value.pin_memory())

    def _map(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Self:
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        changed: dict[str, Any] = {k: change(v) for k, v in values.items() if isinstance(v, torch.Tensor)}
        return replace(self, **changed)


@dataclass(frozen=True)
class Batch(ExampleBatch):
    """B rows of T tokens.

    `document_ids` and `positions` are None if every row holds one document from its start. Otherwise a token attends
    only to earlier tokens with the same document id, and positions count from the start of each document.
    """

    inputs: torch.Tensor  # (B, T) int64
    targets: torch.Tensor  # (B, T) int64, IGNORE for padding
    positions: torch.Tensor | None = None  # (B, T) int64
    document_ids: torch.Tensor | None = None  # (B, T) int64
    target_bytes: torch.Tensor | None = None  # (B, 1) int64: UTF-8 bytes of text covered by a row's targets
    teacher_ids: torch.Tensor | None = None  # (B, T, K) int32: a teacher's most likely tokens
    teacher_log_probabilities: torch.Tensor | None = None  # (B, T, K + 1) fp16; last: sum over all other tokens
    teacher_target_log_probabilities: torch.Tensor | None = None  # (B, T) fp16: a teacher's, of the targets

    def __len__(self) -> int:
        return len(self.inputs)

    def target_count(self) -> int:
        return int((self.targets != IGNORE).sum())

    def token_count(self) -> int:
        return self.target_count()  # all tokens but padding have a target

    def rows(self, start: int, stop: int) -> Batch:
        """Returns rows [start, stop). If the batch has fewer, rows of padding without targets fill the shape."""
        missing = stop - max(start, len(self)) if stop > len(self) else 0

        def cut(value: torch.Tensor | None, padding: int) -> torch.Tensor | None:
            if value is None:
                return None
            blank = value.new_full((missing, *value.shape[1:]), padding)
            return torch.cat([value[start:stop], blank]) if missing else value[start:stop]

        inputs, targets = cut(self.inputs, 0), cut(self.targets, IGNORE)
        assert inputs is not None
        assert targets is not None
        others = [cut(getattr(self, field.name), 0) for field in fields(self)[2:]]
        return Batch(inputs, targets, *others)

    def without_targets(self, size: int) -> Batch:
        return self.rows(len(self), len(self) + size)

    def in_pieces(self, length: int) -> Batch:
        """Returns a copy with new document ids, so that tokens attend only within chunks of `length` tokens."""
        time = self.inputs.shape[1]
        documents = torch.zeros_like(self.inputs) if self.document_ids is None else self.document_ids
        return replace(self, document_ids=documents * time + torch.arange(time) // length)


def concatenated(parts: Sequence[np.ndarray], width: tuple[int, ...] = ()) -> torch.Tensor:
    """Concatenates arrays of shape (n, *width), one per example, to an int64 tensor; without examples it is empty."""
    return torch.from_numpy(np.concatenate([np.zeros((0, *width), np.int64), *parts]).astype(np.int64))
