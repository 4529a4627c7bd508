"""Masks that know how to compute attention among the tokens of a packed batch.

B batch, T queries, S keys, H query heads, K key-value heads, d head dim.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

# Computes attention as `kernels.attention` does, from q (B, H, T, d), k and v (B, K, S, d) and key ranges (B, T, 2).
Kernel = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class PackedMask(Protocol):
    """Which tokens attend to each other in a forward pass."""

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, kernel: Kernel) -> torch.Tensor:
        """Computes attention with a kernel; q (B, H, T, d), k and v (B, K, S, d); returns (B, H, T, d)."""


@dataclass(frozen=True)
class KeyRanges:
    """A mask in which each query sees one contiguous range of keys, (B, T, 2)."""

    ranges: torch.Tensor

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, kernel: Kernel) -> torch.Tensor:
        return kernel(q, k, v, self.ranges)
