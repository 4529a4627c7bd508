"""Examples of unequal length, one behind the other: nothing is padded. B examples, N tokens in all."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from sansgpu.data.batch import IGNORE


@dataclass(frozen=True)
class Sequences:
    """B examples. Targets stand at each token, (N,), or for each example, (B, K); IGNORE where nothing is predicted."""

    tokens: torch.Tensor  # (N,) int64
    lengths: torch.Tensor  # (B,) int64
    targets: torch.Tensor  # (N,) or (B, K) int64
    types: torch.Tensor | None = None  # (N,) int64, where the model tells kinds of tokens apart
    numbers: torch.Tensor | None = None  # (B,) int64: which examples they are

    @classmethod
    def of(
        cls,
        tokens: Sequence[np.ndarray],
        targets: Sequence[np.ndarray] | np.ndarray,
        types: Sequence[np.ndarray] | None = None,
        numbers: np.ndarray | None = None,
    ) -> Sequences:
        """From one array of each example; `targets` is a list of arrays as long as the tokens, or one (B, K) array."""

        def joined(parts: Sequence[np.ndarray]) -> torch.Tensor:
            return torch.from_numpy(np.concatenate([np.zeros(0, np.int64), *parts]).astype(np.int64))

        return cls(
            joined(tokens),
            torch.tensor([len(part) for part in tokens], dtype=torch.int64),
            torch.from_numpy(targets.astype(np.int64)) if isinstance(targets, np.ndarray) else joined(targets),
            None if types is None else joined(types),
            None if numbers is None else torch.from_numpy(numbers.astype(np.int64)),
        )

    def __len__(self) -> int:
        return len(self.lengths)

    def target_count(self) -> int:
        """Tokens, or examples, of which something is predicted."""
        return int((self.targets.reshape(len(self.targets), -1) != IGNORE).any(dim=1).sum())

    def token_count(self) -> int:
        """Tokens in all."""
        return len(self.tokens)

    def rows(self, start: int, stop: int) -> Sequences:
        """Examples start..stop, fewer where there are no more."""
        first, last = (int(self.lengths[:end].sum()) for end in (start, stop))
        by_token = self.targets.ndim == 1
        return Sequences(
            self.tokens[first:last],
            self.lengths[start:stop],
            self.targets[first:last] if by_token else self.targets[start:stop],
            None if self.types is None else self.types[first:last],
            None if self.numbers is None else self.numbers[start:stop],
        )

    def micro_batches(self, size: int, rank: int = 0, world_size: int = 1) -> Iterator[Sequences]:
        """This rank's share in pieces of `size`; every rank gets equally many, the last may be without targets."""
        stride = size * world_size
        for start in range(rank * size, -(-len(self) // stride) * stride, stride):
            yield self.rows(start, start + size) if start < len(self) else self.rows(0, 1).without_targets()

    def without_targets(self) -> Sequences:
        """The same examples, of which nothing is learned."""
        return replace(self, targets=torch.full_like(self.targets, IGNORE))

    def to(self, device: torch.device) -> Sequences:
        """These examples on `device`."""
        return self._map(lambda value: value.to(device, non_blocking=True))

    def pinned(self) -> Sequences:
        """These examples in page-locked memory."""
        return self._map(lambda value: value.pin_memory())

    def _map(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Sequences:
        types, numbers = (None if v is None else change(v) for v in (self.types, self.numbers))
        return Sequences(change(self.tokens), change(self.lengths), change(self.targets), types, numbers)
