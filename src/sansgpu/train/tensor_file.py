"""safetensors files, written past the page cache and hashed on the way; byte for byte what safetensors writes."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch

from sansgpu.machine.disk import Bytes, write_hashed

Tensors = dict[str, torch.Tensor]
Whole = Callable[[str, torch.Tensor], torch.Tensor]  # a tensor by its name, of which shape and type are known

# The names that the format has for them (github.com/huggingface/safetensors, "Format").
_DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
TYPES = {name: dtype for dtype, name in _DTYPES.items()}
_HEADER_ALIGNMENT = 8


def as_it_is(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Of a tensor that is all here."""
    return tensor


def in_file_order(tensors: Tensors) -> list[str]:
    """The names as `save_tensors` writes them."""
    return sorted(tensors, key=lambda name: (-tensors[name].dtype.itemsize, name))


def save_tensors(tensors: Tensors, path: Path, whole: Whole = as_it_is) -> str:
    """Write tensors to a safetensors file and wait until it is on the disk; returns its SHA-256.

    `whole` is asked for each in the order of the file, where `tensors` only tells shapes and types.
    """
    names = in_file_order(tensors)
    header, end = {}, 0
    for name in names:
        tensor, start = tensors[name], end
        end += tensor.nbytes
        header[name] = {"dtype": _DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _HEADER_ALIGNMENT)
    first = np.frombuffer(len(text).to_bytes(8, "little") + text, np.uint8)
    return write_hashed(path, chain([first], (bytes_of(whole(name, tensors[name])) for name in names)))


def bytes_of(tensor: torch.Tensor) -> Bytes:
    """The memory of a tensor, or of a copy where it is scattered or on another device."""
    flat: np.ndarray[Any, np.dtype[np.uint8]] = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()
    return flat
