"""Hidden states of known sequences, which are read from memory-mapped files instead of being computed.

B sequences with N tokens in total, D width.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from functools import lru_cache

import numpy as np
import torch

OPEN_FILES = 256  # files that are mapped at the same time; a process may open about a thousand

Load = Callable[[], np.ndarray]  # opens the hidden states of some sequences: (N, D) float32, or bf16 as int16


def sequence_key(tokens: np.ndarray, types: np.ndarray | None) -> bytes:
    """Returns a hash of a sequence of tokens and, if the model uses them, their token types."""
    digest = hashlib.blake2b(tokens.astype(np.int64).tobytes(), digest_size=16)
    if types is not None:
        digest.update(types.astype(np.int64).tobytes())
    return digest.digest()


class KeptStates:
    """Hidden states by the sequence that they were computed from. They are returned in `dtype`."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._places: dict[bytes, tuple[int, int]] = {}  # number of the file, and the first row in it
        self._loads: list[Load] = []
        self._opened = lru_cache(maxsize=OPEN_FILES)(lambda number: self._loads[number]())

    def add(self, keys: Sequence[bytes], lengths: Sequence[int], load: Load) -> None:
        """Adds the states of sequences, which `load` returns concatenated."""
        starts = np.cumsum([0, *lengths])[:-1].tolist()
        self._places |= {key: (len(self._loads), start) for key, start in zip(keys, starts, strict=True)}
        self._loads.append(load)

    def rows(self, tokens: torch.Tensor, lengths: torch.Tensor, types: torch.Tensor | None) -> torch.Tensor | None:
        """Returns the states (N, D) of concatenated sequences; None if those of some sequence are not known.

        `tokens` and `types` are (N,), and `lengths` (B,).
        """
        sizes = lengths.tolist()
        ends = np.cumsum(sizes)[:-1]
        parts = np.split(tokens.cpu().numpy(), ends)
        kinds = [None] * len(parts) if types is None else np.split(types.cpu().numpy(), ends)
        places = [self._places.get(sequence_key(*sequence)) for sequence in zip(parts, kinds, strict=True)]
        found = [
            self._opened(place[0])[place[1] : place[1] + size]
            for place, size in zip(places, sizes, strict=True)
            if place is not None
        ]
        if not found or len(found) < len(places):
            return None
        return unpacked(np.concatenate(found)).to(tokens.device, self._dtype)


def packed(states: torch.Tensor, narrow: bool) -> np.ndarray:
    """Converts states to an array for a file: to float32 or, if `narrow`, to the bits of bf16, which numpy lacks."""
    if narrow:
        return states.to(torch.bfloat16).view(torch.int16).cpu().numpy()
    return states.float().cpu().numpy()


def unpacked(values: np.ndarray) -> torch.Tensor:
    """Converts the array of a file back to states."""
    tensor = torch.from_numpy(values)
    return tensor.view(torch.bfloat16) if tensor.dtype == torch.int16 else tensor
