"""What one step learns from."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Protocol, TypeVar

import torch

IGNORE = -100  # a target that is not learned from, torch's and transformers' convention


Self = TypeVar("Self", bound="Examples")  # typing has it from Python 3.11 on


class Examples(Protocol):
    """Numbered examples that can be cut anywhere between two of them."""

    def __len__(self) -> int: ...

    def target_count(self) -> int:
        """What is predicted, and so what the summed loss is divided by."""

    def token_count(self) -> int:
        """Tokens that are read, without padding."""

    def rows(self: Self, start: int, stop: int) -> Self:
        """Examples start..stop."""

    def micro_batches(self: Self, size: int, rank: int = 0, world_size: int = 1) -> Iterator[Self]:
        """This rank's share in pieces of `size` examples; every rank gets equally many, the last perhaps of nothing
        that is predicted.
        """

    def to(self: Self, device: torch.device) -> Self:
        """These examples on `device`."""

    def pinned(self: Self) -> Self:
        """These examples in page-locked memory."""


@dataclass(frozen=True)
class Batch:
    """Examples of equal length: B rows of T tokens.

    `document_ids` and `positions` are None where every row is one document from its start; else a token sees
    only tokens before it with its own document id, and positions count from each document's start.
    """

    inputs: torch.Tensor  # (B, T) int64
    targets: torch.Tensor  # (B, T) int64, IGNORE where nothing is predicted
    positions: torch.Tensor | None = None  # (B, T) int64
    document_ids: torch.Tensor | None = None  # (B, T) int64
    target_bytes: torch.Tensor | None = None  # (B, 1) int64: UTF-8 bytes of the text that a row's targets cover

    def __len__(self) -> int:
        return len(self.inputs)

    def target_count(self) -> int:
        """Tokens that are predicted."""
        return int((self.targets != IGNORE).sum())

    def token_count(self) -> int:
        """The same: only padding is not predicted."""
        return self.target_count()

    def rows(self, start: int, stop: int) -> Batch:
        """Rows start..stop; where the batch ends earlier, rows without targets keep the shape."""
        missing = stop - max(start, len(self)) if stop > len(self) else 0

        def cut(value: torch.Tensor | None, padding: int) -> torch.Tensor | None:
            if value is None:
                return None
            blank = value.new_full((missing, value.shape[1]), padding)
            return torch.cat([value[start:stop], blank]) if missing else value[start:stop]

        inputs, targets = cut(self.inputs, 0), cut(self.targets, IGNORE)
        assert inputs is not None
        assert targets is not None
        return Batch(inputs, targets, cut(self.positions, 0), cut(self.document_ids, 0), cut(self.target_bytes, 0))

    def in_pieces(self, length: int) -> Batch:
        """The same tokens, cut every `length` places into pieces that do not see each other."""
        time = self.inputs.shape[1]
        documents = torch.zeros_like(self.inputs) if self.document_ids is None else self.document_ids
        return replace(self, document_ids=documents * time + torch.arange(time) // length)

    def micro_batches(self, size: int, rank: int = 0, world_size: int = 1) -> Iterator[Batch]:
        """This rank's share in pieces of `size` rows; every rank gets equally many, the last may be without targets."""
        stride = size * world_size
        for start in range(rank * size, -(-len(self) // stride) * stride, stride):
            yield self.rows(start, start + size)

    def to(self, device: torch.device) -> Batch:
        """This batch on `device`."""
        return self._map(lambda value: value.to(device, non_blocking=True))

    def pinned(self) -> Batch:
        """This batch in page-locked memory."""
        return self._map(lambda value: value.pin_memory())

    def _map(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Batch:
        others = (self.positions, self.document_ids, self.target_bytes)
        return Batch(change(self.inputs), change(self.targets), *(None if v is None else change(v) for v in others))
