"""Choice of native or plain torch kernels."""

from __future__ import annotations

from collections.abc import Callable

import torch

from sansgpu.config import ConfigError
from sansgpu.kernels import native


def load_kernels(requested: str, device: torch.device, warn: Callable[[str], None]) -> str:
    """Loads the kernels that `training.kernels` (auto, native or torch) requests; returns `native.name()`.

    Raises ConfigError if native kernels are required but cannot be loaded.
    """
    if requested == "torch" or (requested == "auto" and device.type != "cpu"):
        return "torch"
    reason = native.load()
    if reason is None:
        return native.name()
    if requested == "native":
        raise ConfigError(f"training.kernels is native, but they cannot be loaded ({reason}); set it to auto.")
    warn(f"the native kernels cannot be loaded ({reason}); plain torch runs instead, which is slower.")
    return "torch"
