"""Which kernels a job computes with."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from sansgpu.config import ConfigError
from sansgpu.kernels import native


def load_kernels(wanted: str, cache: Path, device: torch.device, warn: Callable[[str], None]) -> str:
    """Resolve `training.kernels` (auto, native or torch) to native or torch, and load them.

    `cache` is what `machine.compiled.compiled_cache` returns. Raises ConfigError if native kernels are required and
    cannot be loaded.
    """
    if wanted == "torch" or (wanted == "auto" and device.type != "cpu"):
        return "torch"
    reason = native.load(cache)
    if reason is None:
        return "native"
    if wanted == "native":
        raise ConfigError(f"training.kernels is native, but they cannot be compiled ({reason}); set it to auto.")
    warn(f"the native kernels cannot be compiled ({reason}); plain torch does their work, and steps take longer.")
    return "torch"
