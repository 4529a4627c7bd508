"""The layouts of weights in GGUF files and in transformers."""

from __future__ import annotations

import torch

from sansgpu.models import families
from sansgpu.models.family import Family, Settings


def to_file(name: str, tensor: torch.Tensor, settings: Settings) -> torch.Tensor:
    """Converts a weight to llama.cpp's layout."""
    family = families.get(settings["model_type"])
    if family.is_transposed(name):
        return tensor.T
    if (dimension := _squeezed(name, family)) is not None:
        tensor = tensor.squeeze(dimension)
    tensor = permuted(name, tensor, settings)
    if (layout := family.gguf_layout(name, settings)) is not None:
        return layout.to_file(tensor)
    return tensor + family.gguf_norm_offset if family.gguf_norm_offset and name.endswith("norm.weight") else tensor


def from_file(name: str, tensor: torch.Tensor, settings: Settings) -> torch.Tensor:
    """Inverts `to_file`."""
    family = families.get(settings["model_type"])
    if family.is_transposed(name):
        return tensor.T.contiguous()
    if (layout := family.gguf_layout(name, settings)) is not None:
        tensor = layout.from_file(tensor)
    elif family.gguf_norm_offset and name.endswith("norm.weight"):
        tensor = tensor - family.gguf_norm_offset
    tensor = rows_from_file(name, tensor, settings)
    dimension = _squeezed(name, family)
    return tensor if dimension is None else tensor.unsqueeze(dimension)


def permuted(name: str, rows: torch.Tensor, settings: Settings) -> torch.Tensor:
    """Returns the rows of a matrix (out, ...) in llama.cpp's order."""
    order = families.get(settings["model_type"]).gguf_rows(name, settings)
    return rows if order is None else order.to_file(rows)


def rows_from_file(name: str, rows: torch.Tensor, settings: Settings) -> torch.Tensor:
    """Returns the rows of a matrix, which may be quantized, in transformers' order."""
    order = families.get(settings["model_type"]).gguf_rows(name, settings)
    return rows if order is None else order.from_file(rows)


def has_own_layout(name: str, settings: Settings) -> bool:
    """Returns True if a weight differs in files by more than the order of its rows."""
    return families.get(settings["model_type"]).gguf_layout(name, settings) is not None


def _squeezed(name: str, family: Family) -> int | None:
    return next((dimension for ending, dimension in family.gguf_squeezed.items() if name.endswith(ending)), None)
