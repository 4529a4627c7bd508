"""Hidden states of known sequences, which are read from memory-mapped files instead of being computed.

B sequences with N tokens in total, D width.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Literal

import numpy as np
import torch

from sansgpu.config.model import ModelConfig
from sansgpu.machine.probe import has_bf16_tensors

OPEN_FILES = 256  # files that are mapped at the same time; a process may open about a thousand

# How states are stored. int8: absmax quantization with one scale per token, as in LLM.int8() (arXiv 2208.07339).
Form = Literal["fp32", "bf16", "int8"]
DTYPES: dict[Form, type[np.generic]] = {"fp32": np.float32, "bf16": np.int16, "int8": np.int8}
SCALE_BYTES = 4  # size of the fp32 scale that follows the int8 values of a token
INT8_MAX = 127

Load = Callable[[], np.ndarray]  # opens the hidden states of some sequences, as `packed` returns them


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


def activation_form(model: ModelConfig, precision: str) -> Form:
    """Returns how activations are stored: in int8 if configured, otherwise in the precision of training."""
    if model.keep_activations == "int8":
        return "int8"
    return "bf16" if has_bf16_tensors(precision) else "fp32"


def bytes_per_token(form: Form, width: int) -> int:
    """Returns the bytes of the states of a token on the disk."""
    return width * np.dtype(DTYPES[form]).itemsize + (SCALE_BYTES if form == "int8" else 0)


def packed(states: torch.Tensor, form: Form) -> np.ndarray:
    """Converts states (N, D) to an array for a file, one row per token.

    bf16, which numpy lacks, becomes int16 with the same bits. An int8 row ends with the bytes of its scale.
    """
    if form == "bf16":
        return states.to(torch.bfloat16).view(torch.int16).cpu().numpy()
    wide = states.float().cpu().numpy()
    if form == "fp32":
        return wide
    largest = np.abs(wide).max(axis=1, keepdims=True)
    scales = np.where(largest > 0, largest / INT8_MAX, 1.0).astype(np.float32)
    values = np.rint(wide / scales).clip(-INT8_MAX, INT8_MAX).astype(np.int8)
    return np.concatenate([values, scales.view(np.int8)], axis=1)


def unpacked(values: np.ndarray) -> torch.Tensor:
    """Converts the array of a file back to states."""
    if values.dtype == np.int8:
        scales = np.ascontiguousarray(values[:, -SCALE_BYTES:]).view(np.float32)
        return torch.from_numpy(values[:, :-SCALE_BYTES] * scales)
    tensor = torch.from_numpy(values)
    return tensor.view(torch.bfloat16) if tensor.dtype == torch.int16 else tensor
