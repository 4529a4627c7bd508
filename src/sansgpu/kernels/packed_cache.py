"""KV caches for generation: a plain one, and one in the layout of the C++ matmuls (native/packed_cache.h).

B slots, each for one sequence of at most S tokens, N tokens, K key-value heads, d head dim.
"""

from __future__ import annotations

import torch

from sansgpu.kernels.c_functions import constants

BLOCK = constants()["CACHE_BLOCK"]  # tokens


class PlainCache:
    """Keys and values (B, K, S, d) of one layer."""

    def __init__(self, slots: int, length: int, heads: int, dim: int, dtype: torch.dtype) -> None:
        self._stored = [torch.zeros(slots, heads, length, dim, dtype=dtype) for _ in "kv"]

    @property
    def nbytes(self) -> int:
        return sum(stored.nbytes for stored in self._stored)

    def store(self, slots: torch.Tensor, positions: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Stores keys and values (N, K, d) of tokens at `positions` (N,) of `slots` (N,)."""
        for stored, new in zip(self._stored, (keys, values), strict=True):
            stored[slots, :, positions] = new.to(stored.dtype)

    def read(self, slots: slice, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the keys and values (B, K, count, d) of some slots."""
        keys, values = (stored[slots, :, :count] for stored in self._stored)
        return keys, values

    def move(self, to: int, slot: int, count: int) -> None:
        """Copies the `count` tokens of a slot to another one."""
        self.restore(to, self.first(slot, count), count)

    def first(self, slot: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns a view of the first `count` tokens of a slot, in the layout of the cache."""
        keys, values = (stored[slot, :, :count] for stored in self._stored)
        return keys, values

    def restore(self, slot: int, states: tuple[torch.Tensor, torch.Tensor], count: int) -> None:
        """Stores the first `count` tokens of what `first` returned in a slot."""
        for stored, kept in zip(self._stored, states, strict=True):
            stored[slot, :, :count] = kept[:, :count]


class PackedCache:
    """Keys and values of one layer, which a DecoderStep stores and reads.

    Keys and values are each (B, K, S / BLOCK, BLOCK * d), with S rounded up to a multiple of BLOCK. A short sequence
    uses only the first blocks.
    """

    def __init__(self, slots: int, length: int, heads: int, dim: int, dtype: torch.dtype) -> None:
        shape = (slots, heads, -(-length // BLOCK), BLOCK * dim)
        self.keys, self.values = (torch.empty(shape, dtype=dtype) for _ in "kv")

    @property
    def slots(self) -> int:
        return len(self.keys)

    @property
    def length(self) -> int:
        """S, the tokens that fit into a slot."""
        return self.keys.shape[2] * BLOCK

    @property
    def nbytes(self) -> int:
        return self.keys.nbytes + self.values.nbytes

    def move(self, to: int, slot: int, count: int) -> None:
        """Copies the blocks with the first `count` tokens of `slot` to the slot `to`."""
        self.restore(to, self.first(slot, count), count)

    def first(self, slot: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns a view of the blocks with the first `count` tokens of a slot."""
        blocks = -(-count // BLOCK)
        return self.keys[slot, :, :blocks], self.values[slot, :, :blocks]

    def restore(self, slot: int, states: tuple[torch.Tensor, torch.Tensor], count: int) -> None:
        """Stores the blocks with the first `count` tokens of what `first` returned in a slot."""
        blocks = -(-count // BLOCK)
        for stored, kept in zip((self.keys, self.values), states, strict=True):
            stored[slot, :, :blocks] = kept[:, :blocks]
