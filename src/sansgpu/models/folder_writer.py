"""Writes model folders atomically."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from safetensors import SafetensorError

from sansgpu.config import SansGPUError
from sansgpu.config.atomic import write_failures_as
from sansgpu.reporting.outputs import replace_folder


def write_folder_atomically(folder: Path, write: Callable[[Path], None]) -> None:
    """Calls `write` with a temporary folder, then replaces `folder` with it.

    Raises ConfigError if `folder` holds files that sansgpu did not write, and SansGPUError if writing fails.
    """
    try:
        with write_failures_as(SansGPUError, folder), replace_folder(folder, "model") as new:
            write(new)
    except SafetensorError as error:
        raise SansGPUError(f"{folder} cannot be written: {error}.") from None
