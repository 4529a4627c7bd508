"""Arranges the tokens of examples in rows.

N tokens in total, B examples, T tokens in the longest one.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sansgpu.kernels.attention import token_places


def padded_rows(values: torch.Tensor, lengths: torch.Tensor, fill_value: int = 0) -> torch.Tensor:
    """Converts concatenated tokens (N, ...) to one padded row per example, (B, T, ...)."""
    longest = int(lengths.max()) if len(lengths) else 0
    out = values.new_full((len(lengths), longest, *values.shape[1:]), fill_value)
    out[token_places(lengths)] = values
    return out


def in_order(parts: list[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
    """Concatenates the rows of all (indices, rows) pairs in the order of their indices."""
    if len(parts) == 1:
        return parts[0][1]
    indices, values = (torch.cat(side) for side in zip(*parts, strict=True))
    return values[indices.argsort()]


def of_equal_length(lengths: Sequence[int]) -> list[list[int]]:
    """Groups the indices of examples with the same length."""
    groups: dict[int, list[int]] = {}
    for index, length in enumerate(lengths):
        groups.setdefault(length, []).append(index)
    return list(groups.values())
