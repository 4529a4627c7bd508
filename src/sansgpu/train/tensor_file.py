"""Writes safetensors files with direct I/O and hashes them on the way; the bytes equal those of safetensors."""

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
GatherTensor = Callable[
    [str, torch.Tensor], torch.Tensor
]  # (name, tensor with its shape and dtype) -> unsharded tensor

# Dtype names of the format (github.com/huggingface/safetensors, "Format").
_DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
SAFETENSORS_TYPES = {name: dtype for dtype, name in _DTYPES.items()}
_HEADER_ALIGNMENT = 8


def unchanged(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Returns the tensor unchanged; the gather function for unsharded tensors."""
    return tensor


def in_file_order(tensors: Tensors) -> list[str]:
    """Returns the names in the order in which `save_tensors` writes them."""
    return sorted(tensors, key=lambda name: (-tensors[name].dtype.itemsize, name))


def save_tensors(tensors: Tensors, path: Path, gather: GatherTensor = unchanged) -> str:
    """Writes tensors to a safetensors file, waits until it is on the disk and returns its SHA-256.

    `gather` is called for each tensor in file order, so `tensors` may hold only shapes and dtypes.
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
    return write_hashed(path, chain([first], (bytes_of(gather(name, tensors[name])) for name in names)))


def bytes_of(tensor: torch.Tensor) -> Bytes:
    """Returns the bytes of a tensor without a copy if it is contiguous and on the CPU."""
    flat: np.ndarray[Any, np.dtype[np.uint8]] = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()
    return flat
