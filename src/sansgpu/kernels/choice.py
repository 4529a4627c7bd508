"""Choice of native or plain torch kernels."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from sansgpu.config import ConfigError
from sansgpu.kernels import native


def load_kernels(
    requested: str,
    cache: Path,
    device: torch.device,
    warn: Callable[[str], None],
    announce: Callable[[str], None] = lambda doing: None,
) -> str:
    """Loads the kernels that `training.kernels` (auto, native or torch) requests; returns `native.name()`.

    `cache` comes from `machine.compiled.compiled_cache`. `announce` is called before a compilation. Raises ConfigError
    if native kernels are required but cannot be loaded.
    """
    if requested == "torch" or (requested == "auto" and device.type != "cpu"):
        return "torch"
    reason = native.load(cache, announce, warn)
    if reason is None:
        return native.name()
    if requested == "native":
        raise ConfigError(f"training.kernels is native, but they cannot be compiled ({reason}); set it to auto.")
    warn(f"the native kernels cannot be compiled ({reason}); falling back to plain torch, which is slower.")
    return "torch"
