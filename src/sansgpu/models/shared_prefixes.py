"""Sequences of tokens in one row, in which a beginning that several sequences share occurs once.

B sequences with N tokens in total, M tokens in the row, S keys, H query heads, K key-value heads, d head dim.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import compress, count, pairwise
from operator import ne
from typing import Any, NamedTuple

import numpy as np
import torch

from sansgpu.kernels.attention import AttentionKernel, attention, in_window

MAX_KEYS = 16384  # keys per call of the attention kernel, for which shared keys are copied: bounds the memory
_INTEGERS = np.dtype(">i8")  # the bytes of nonnegative big-endian integers sort like the integers

ChangeRanges = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class SharedPrefixes:
    """A row of M tokens that stands for B sequences. Each token attends to those before it in its sequence.

    The sequences form a forest of tokens (Tree Training, arXiv 2511.00413). A node of it is computed once by all
    layers. Only attention copies its keys and values, to every sequence that contains it, so that a query sees one
    contiguous range of keys. Results and gradients are those of separate sequences, up to rounding.
    """

    copies: torch.Tensor  # (N,): the place in the row of each token of the sequences
    originals: torch.Tensor  # (M,): a token of the sequences for each place in the row
    lengths: torch.Tensor  # (B,): tokens of each sequence
    change_ranges: ChangeRanges | None = None  # limits key ranges (1, T, 2) to a sliding window

    length = 0  # no tokens are cached before the row; see `decoder.LayerCache`

    @classmethod
    def of(cls, tokens: torch.Tensor, lengths: torch.Tensor, shares: bool = True) -> SharedPrefixes:
        """Finds all shared beginnings of the concatenated sequences `tokens` (N,), or none if `shares` is False."""
        sizes = lengths.tolist()
        first_copies = np.arange(len(tokens))
        if shares:
            whole, starts = tokens.cpu().numpy().astype(_INTEGERS), np.cumsum([0, *sizes])
            sequences = [whole[start : start + size] for start, size in zip(starts.tolist(), sizes, strict=False)]
            for before, number in pairwise(lexicographic_order(sequences)):
                common = _common_length(sequences[before], sequences[number])
                own, other = int(starts[number]), int(starts[before])
                first_copies[own : own + common] = first_copies[other : other + common]
        originals, copies = map(torch.from_numpy, np.unique(first_copies, return_inverse=True))
        return cls(copies.to(tokens.device), originals.to(tokens.device), lengths)

    def __len__(self) -> int:
        return len(self.originals)

    @property
    def saved(self) -> int:
        """The number of tokens that need not be computed."""
        return len(self.copies) - len(self.originals)

    @cached_property
    def positions(self) -> torch.Tensor:
        """The position (M,) of each token of the row in its sequences."""
        ranges = self._ranges[0]
        return (ranges[:, 1] - ranges[:, 0] - 1).long()

    def windowed(self, size: int) -> SharedPrefixes:
        """Returns a copy for layers in which a token attends only to the last `size` tokens of its sequence."""
        return replace(self, change_ranges=lambda ranges: in_window(ranges, size))

    def expand(self, rows: torch.Tensor) -> torch.Tensor:
        """Copies rows (M, ...) of the tokens in the row to those of all tokens of the sequences, (N, ...)."""
        return _copied(rows, Copies.of(self.copies.cpu(), self.copies))

    def attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, kernel: AttentionKernel | torch.Tensor
    ) -> torch.Tensor:
        """Computes the attention of q (1, H, M, d) to k and v (1, K, M, d): (1, H, M, d).

        Our own decoder passes key ranges, which have no meaning here, instead of a kernel.
        """
        compute = attention if isinstance(kernel, torch.Tensor) else kernel
        outs = [
            compute(q[:, :, call.queries], _copied_keys(k, call.keys), _copied_keys(v, call.keys), call.ranges)
            for call in self._calls
        ]
        return outs[0] if len(outs) == 1 else torch.cat(outs, dim=2)

    @cached_property
    def _ranges(self) -> torch.Tensor:
        """The range (1, M, 2) of keys of each query among the tokens of the sequences."""
        ends = self.lengths.cumsum(0)
        sequence = torch.searchsorted(ends, self.originals, right=True)
        return torch.stack((ends[sequence] - self.lengths[sequence], self.originals + 1), dim=-1)[None]

    @cached_property
    def _calls(self) -> list[_Call]:
        return list(self._attention_calls())

    def _attention_calls(self) -> Iterator[_Call]:
        copies, originals, ends = self.copies.cpu(), self.originals.cpu(), self.lengths.cumsum(0).tolist()
        ranges = self._ranges if self.change_ranges is None else self.change_ranges(self._ranges)
        start = 0
        for stop, following in zip(ends, [*ends[1:], ends[-1] + MAX_KEYS + 1], strict=True):
            if following - start <= MAX_KEYS:
                continue
            first, last = torch.searchsorted(originals, torch.tensor([start, stop])).tolist()
            keys = Copies.of(copies[start:stop], self.copies[start:stop])
            if last > first:
                yield _Call(slice(first, last), keys, (ranges[:, first:last] - start).int())
            start = stop


@dataclass(frozen=True)
class Copies:
    """Which rows to copy, and the same as runs of consecutive rows."""

    index: torch.Tensor  # (n,)
    runs: list[tuple[int, int, int]]  # first copy, first copied row, number of rows

    @classmethod
    def of(cls, index: torch.Tensor, on_device: torch.Tensor) -> Copies:
        """Finds the runs of `index`, which is on the CPU, and keeps its copy `on_device`."""
        values = index.numpy()
        first = np.flatnonzero(np.diff(values, prepend=-2) != 1)
        counts = np.diff(first, append=len(values))
        return cls(on_device, list(zip(first.tolist(), values[first].tolist(), counts.tolist(), strict=True)))


class _Call(NamedTuple):
    """The arguments of one call of the attention kernel."""

    queries: slice
    keys: Copies
    ranges: torch.Tensor  # (1, T, 2) int32: the range of each query in `keys`


def _copied_keys(states: torch.Tensor, keys: Copies) -> torch.Tensor:
    """Copies keys or values (1, K, M, d) of the row: (1, K, S, d)."""
    return _copied(states[0].transpose(0, 1), keys).transpose(0, 1)[None]


def _copied(rows: torch.Tensor, copies: Copies) -> torch.Tensor:
    if len(copies.runs) == 1 and len(copies.index) == len(rows):
        return rows
    copied: torch.Tensor = _CopyRows.apply(rows, copies)
    return copied


class _CopyRows(torch.autograd.Function):
    """Copies rows. The backward pass sums the gradients of a row's copies in a fixed order."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, copies: Copies) -> torch.Tensor:
        ctx.copies, ctx.shape = copies, rows.shape
        return rows.index_select(0, copies.index)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        total = grad_outputs[0].new_zeros(ctx.shape)
        for first, place, size in ctx.copies.runs:
            total[place : place + size].add_(grad_outputs[0][first : first + size])
        return total, None


def lexicographic_order(sequences: Sequence[np.ndarray]) -> list[int]:
    """Returns the numbers of the sequences of tokens in an order in which those that begin equally are neighbors."""
    keys = [ids.astype(_INTEGERS, copy=False).tobytes() for ids in sequences]
    return sorted(range(len(keys)), key=keys.__getitem__)


def saved_tokens(sequences: Sequence[np.ndarray], together: int) -> int:
    """Returns how many tokens need not be computed if `together` sequences, neighbors in this order, share a row."""
    order = lexicographic_order(sequences)
    neighbors = (pair for pair in enumerate(pairwise(order), 1) if pair[0] % together)
    return sum(_common_length(sequences[one], sequences[other]) for _, (one, other) in neighbors)


def _common_length(one: np.ndarray, other: np.ndarray) -> int:
    size = min(len(one), len(other))
    differs = one[:size] != other[:size]
    return int(differs.argmax()) if differs.any() else size


def common_length(one: Sequence[object], other: Sequence[object]) -> int:
    """Returns the length of the common beginning."""
    differences = compress(count(), map(ne, one, other))  # without a loop in Python, which takes twice as long
    return next(differences, min(len(one), len(other)))
