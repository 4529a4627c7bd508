"""safetensors files of others, read so that a damaged one is an error of the input."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from sansgpu.config import ConfigError
from sansgpu.config.plain import cut
from sansgpu.machine.inputs import require_ordinary

UNREADABLE = (SafetensorError, LookupError, ValueError, TypeError, AttributeError, RuntimeError, ArithmeticError)


@contextmanager
def readable_weights(path: Path) -> Iterator[None]:
    """Raises ConfigError for whatever safetensors and torch raise at a header, a type or a shape they do not know."""
    require_ordinary(path)
    try:
        yield
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror or error}.") from None
    except (
        SafetensorError,
        LookupError,
        ValueError,
        TypeError,
        AttributeError,
        RuntimeError,
        ArithmeticError,
    ) as error:
        reason = cut(" ".join(str(error).split())).removesuffix(".")
        raise ConfigError(f"{path} holds no weights that can be read ({reason}); copy or export it again.") from None


def load_weights(path: Path) -> dict[str, torch.Tensor]:
    """The tensors of a file by their names, mapped from the disk. Raises ConfigError if it is damaged."""
    with readable_weights(path):
        weights = dict(load_file(path))
        if odd := next((name for name, tensor in weights.items() if tensor.is_complex()), None):
            raise ValueError(f"{odd} has complex numbers")
    return weights
