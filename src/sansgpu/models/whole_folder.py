"""Model folders and files that are there whole, or not at all."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

from safetensors import SafetensorError

from sansgpu.config import SansGPUError
from sansgpu.machine.disk import sync_to_disk
from sansgpu.watch.files import whole_file


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


def written_whole_file(path: Path, write: Callable[[Path], None]) -> None:
    """Have `write` fill a new file, which takes `path`'s place when it is on the disk. Raises SansGPUError."""
    try:
        with whole_file(path) as partial:
            write(partial)
            sync_to_disk(partial)
    except OSError as error:
        raise SansGPUError(f"{path} cannot be written: {error.strerror or error}.") from None
