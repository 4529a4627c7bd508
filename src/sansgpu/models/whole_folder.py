"""Model folders and files that are there whole, or not at all."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from safetensors import SafetensorError

from sansgpu.config import SansGPUError
from sansgpu.watch.files import whole_file
from sansgpu.watch.outputs import filled_folder


def written_whole(folder: Path, write: Callable[[Path], None]) -> None:
    """Have `write` fill a new folder, which takes `folder`'s place when it is whole.

    Raises ConfigError if `folder` is not ours to write to, and SansGPUError if the disk refuses.
    """
    try:
        with filled_folder(folder, "model") as new:
            write(new)
    except (OSError, SafetensorError) as error:
        raise SansGPUError(f"{folder} cannot be written: {getattr(error, 'strerror', None) or error}.") from None


def written_whole_file(path: Path, write: Callable[[Path], None]) -> None:
    """Have `write` fill a new file, which takes `path`'s place when it is on the disk. Raises SansGPUError."""
    try:
        with whole_file(path) as partial:
            write(partial)
    except OSError as error:
        raise SansGPUError(f"{path} cannot be written: {error.strerror or error}.") from None
