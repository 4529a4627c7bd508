"""Writes model folders and files atomically."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from safetensors import SafetensorError

from sansgpu.config import SansGPUError
from sansgpu.reporting.files import atomic_write
from sansgpu.reporting.outputs import replace_folder


def write_folder_atomically(folder: Path, write: Callable[[Path], None]) -> None:
    """Calls `write` with a temporary folder, then replaces `folder` with it.

    Raises ConfigError if `folder` holds files that sansgpu did not write, and SansGPUError if writing fails.
    """
    try:
        with replace_folder(folder, "model") as new:
            write(new)
    except (OSError, SafetensorError) as error:
        raise SansGPUError(f"{folder} cannot be written: {getattr(error, 'strerror', None) or error}.") from None


def write_file_atomically(path: Path, write: Callable[[Path], None]) -> None:
    """Calls `write` with a temporary file, then replaces `path` with it. Raises SansGPUError if writing fails."""
    try:
        with atomic_write(path) as partial:
            write(partial)
    except OSError as error:
        raise SansGPUError(f"{path} cannot be written: {error.strerror or error}.") from None
