"""Loads safetensors files, reporting damaged ones as ConfigError."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn

from sansgpu.config import ConfigError
from sansgpu.config.plain_data import require_regular_file, truncate

UNREADABLE = (SafetensorError, LookupError, ValueError, TypeError, AttributeError, RuntimeError, ArithmeticError)


@contextmanager
def readable_weights(path: Path) -> Iterator[None]:
    """Converts the errors of safetensors and torch for invalid headers, dtypes and shapes to ConfigError."""
    require_regular_file(path)
    try:
        yield
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror or error}.") from None
    except UNREADABLE as error:
        reason = truncate(" ".join(str(error).split())).removesuffix(".")
        raise ConfigError(f"{path} holds no weights that can be read ({reason}); copy or export it again.") from None


def set_weights(model: nn.Module, weights: dict[str, torch.Tensor], source: Path, assign: bool = False) -> None:
    """Loads weights that were read from `source` into a model. Raises ConfigError if they do not fit."""
    try:
        model.load_state_dict(weights, assign=assign)
    except (RuntimeError, TypeError) as error:
        reason = truncate(" ".join(str(error).split()))
        raise ConfigError(f"{source} does not contain the whole model: {reason}") from None


def load_weights(path: Path) -> dict[str, torch.Tensor]:
    """Returns the memory-mapped tensors of a file by name. Raises ConfigError if the file is damaged."""
    with readable_weights(path):
        weights = dict(load_file(path))
        if name := next((name for name, tensor in weights.items() if tensor.is_complex()), None):
            raise ValueError(f"{name} has complex numbers")
    return weights
