"""Reads safetensors files, and writes the same bytes as the safetensors library, but with direct I/O and a hash."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file

from sansgpu.config import ConfigError
from sansgpu.config.plain_data import unreadable
from sansgpu.config.wording import truncate
from sansgpu.files.reading import require_regular_file
from sansgpu.machine.disk import Bytes, write_hashed

Tensors = dict[str, torch.Tensor]
# (name, tensor with its shape and dtype) -> unsharded tensor
GatherTensor = Callable[[str, torch.Tensor], torch.Tensor]

# The format's names of dtypes (github.com/huggingface/safetensors, "Format").
_DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
SAFETENSORS_TYPES = {name: dtype for dtype, name in _DTYPES.items()}
_HEADER_ALIGNMENT = 8
MAX_HEADER_BYTES = 16 << 20  # about 150,000 tensors, read in seconds; safetensors itself allows 100 MB
_UNREADABLE = (SafetensorError, LookupError, ValueError, TypeError, AttributeError, RuntimeError, ArithmeticError)


@contextmanager
def readable_weights(path: Path) -> Iterator[None]:
    """Context that turns the errors of safetensors and torch about an invalid file into ConfigError."""
    require_regular_file(path)
    try:
        yield
    except OSError as error:
        raise unreadable(path, error) from None
    except _UNREADABLE as error:
        reason = truncate(" ".join(str(error).split())).removesuffix(".")
        raise ConfigError(f"{path} is a damaged safetensors file ({reason}); download or export it again.") from None


@contextmanager
def open_weights(path: Path) -> Iterator[Any]:
    """Opens a safetensors file for reading one tensor at a time. Raises ConfigError if the file is damaged."""
    with readable_weights(path), safe_open(path, "pt") as opened:
        yield opened


def load_weights(path: Path) -> dict[str, torch.Tensor]:
    """Returns the tensors of a file by name, memory-mapped. Raises ConfigError if the file is damaged."""
    with readable_weights(path):
        weights = dict(load_file(path))
        if name := next((name for name, tensor in weights.items() if tensor.is_complex()), None):
            raise ValueError(f"{name} contains complex numbers")
    return weights


def require_short_header(path: Path) -> None:
    """Raises ConfigError if the header of a safetensors file is longer than `MAX_HEADER_BYTES`."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
    if length > MAX_HEADER_BYTES:
        raise ConfigError(
            f"{path} is a damaged safetensors file (its header has {length:,} bytes); download or export it again."
        )


def unchanged(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Returns the tensor unchanged; the gather function for unsharded tensors."""
    return tensor


def in_file_order(tensors: Tensors) -> list[str]:
    """Returns the names in the order in which `save_tensors` writes them."""
    return sorted(tensors, key=lambda name: (-tensors[name].dtype.itemsize, name))


def save_tensors(tensors: Tensors, path: Path, gather: GatherTensor = unchanged) -> str:
    """Writes tensors to a safetensors file, flushes it to disk and returns its SHA-256.

    Calls `gather` for the values of each tensor, in file order, so `tensors` need only shapes and dtypes.
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
    """Returns the bytes of a tensor, without copying if it is contiguous and on the CPU."""
    flat: np.ndarray[Any, np.dtype[np.uint8]] = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()
    return flat
