"""Sequences of tokens in one row, in which a beginning that several sequences share occurs once.

N tokens in the row, S keys, H query heads, K key-value heads, d head dim.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import compress, count
from operator import ne
from typing import NamedTuple

import torch

from sansgpu.kernels.attention import AttentionKernel, attention

MAX_KEYS = 16384  # keys per call of the attention kernel, for which shared keys are copied: bounds the memory


class PrefixTree:
    """A row of tokens. Each token attends to the tokens before it in its sequence, wherever they are in the row.

    Sequences must be added in lexicographic order. If `shares` is False, each sequence has its own tokens.
    """

    length = 0  # no tokens are cached before the row; see `decoder.LayerCache`

    def __init__(self, shares: bool = True) -> None:
        self.paths: list[list[int]] = []  # the places in the row of the tokens of each sequence
        self._shares = shares
        self._last: Sequence[int] = ()
        self._tokens: list[int] = []
        self._positions: list[int] = []
        self._new: list[int] = []  # the number of tokens that each sequence added

    def __len__(self) -> int:
        return len(self._tokens)

    def new_tokens(self, sequence: Sequence[int]) -> int:
        """Returns the number of tokens that a sequence would add to the row."""
        return len(sequence) - (common_length(self._last, sequence) if self._shares else 0)

    def add(self, sequence: Sequence[int]) -> None:
        new = self.new_tokens(sequence)
        shared = len(sequence) - new
        before = self.paths[-1][:shared] if shared else []
        self.paths.append([*before, *range(len(self), len(self) + new)])
        self._tokens += sequence[shared:]
        self._positions += range(shared, len(sequence))
        self._new.append(new)
        self._last = sequence

    def inputs(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the tokens (N,) and their positions (N,). No sequence may be added after this."""
        self._calls = list(self._attention_calls())
        return torch.tensor(self._tokens), torch.tensor(self._positions)

    @property
    def lengths(self) -> torch.Tensor:
        """Returns the length of each sequence."""
        return torch.tensor([len(path) for path in self.paths])

    def _attention_calls(self) -> Iterator[_Call]:
        first = start = 0
        keys: list[int] = []
        ends: list[tuple[int, range]] = []  # first key of each sequence, and the end of the key range of each new token
        for path, new in zip(self.paths, self._new, strict=True):
            if not new:
                continue
            if keys and len(keys) + len(path) > MAX_KEYS:
                yield _Call.of(first, start, keys, ends)
                first, keys, ends = start, [], []
            start_key = len(keys)
            keys += path
            ends.append((start_key, range(len(keys) - new + 1, len(keys) + 1)))
            start += new
        yield _Call.of(first, start, keys, ends)

    def attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, kernel: AttentionKernel | torch.Tensor
    ) -> torch.Tensor:
        """Computes the attention of q (1, H, N, d) to k and v (1, K, N, d): (1, H, N, d).

        Our own decoder passes key ranges, which have no meaning here, instead of a kernel.
        """
        compute = attention if isinstance(kernel, torch.Tensor) else kernel
        outs = [compute(q[:, :, call.queries], call.keys_of(k), call.keys_of(v), call.ranges) for call in self._calls]
        return outs[0] if len(outs) == 1 else torch.cat(outs, dim=2)


class _Call(NamedTuple):
    """The arguments of one call of the attention kernel."""

    queries: slice
    keys: torch.Tensor | None  # (S,): places of the keys in the row; None: those of the queries, as nothing is shared
    ranges: torch.Tensor  # (1, N, 2): range of each query in `keys`

    @classmethod
    def of(cls, first: int, stop: int, keys: list[int], ends: list[tuple[int, range]]) -> _Call:
        ranges = [(start, end) for start, of_tokens in ends for end in of_tokens]
        places = None if keys == list(range(first, stop)) else torch.tensor(keys)
        return cls(slice(first, stop), places, torch.tensor([ranges], dtype=torch.int32))

    def keys_of(self, states: torch.Tensor) -> torch.Tensor:
        """Selects the call's keys from keys or values (1, K, N, d) of all tokens in the row."""
        return states[:, :, self.queries] if self.keys is None else states.index_select(2, self.keys)


def common_length(one: Sequence[object], other: Sequence[object]) -> int:
    """Returns the length of the common beginning."""
    differences = compress(count(), map(ne, one, other))  # without a loop in Python, which takes twice as long
    return next(differences, min(len(one), len(other)))
