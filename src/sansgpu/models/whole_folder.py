"""Model folders that are there whole, or not at all."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

from safetensors import SafetensorError

from sansgpu.config import SansGPUError


def written_whole(folder: Path, write: Callable[[Path], None]) -> None:
    """Have `write` fill a new folder, which takes `folder`'s place when it is whole. Raises SansGPUError."""
    partial = folder.with_name(folder.name + ".partial")
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        write(partial)
        shutil.rmtree(folder, ignore_errors=True)
        partial.rename(folder)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise SansGPUError(f"{folder} cannot be written: {getattr(error, 'strerror', None) or error}.") from None
