"""Recognizes and opens GGUF files. Imports the optional package gguf only to open one."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from sansgpu.config import ConfigError
from sansgpu.config.errors import require
from sansgpu.config.paths import local_path
from sansgpu.files.reading import require_regular_file
from sansgpu.models.formats.folders import gguf_parts

if TYPE_CHECKING:
    from sansgpu.models.formats.gguf_file import GGUFFile


def is_gguf(target: str) -> bool:
    """Returns True for an existing file, and for a name ending in .gguf that is not a folder.

    Raises ConfigError for a pipe or device.
    """
    path = local_path(target)
    require_regular_file(path)
    return path.is_file() or (path.suffix == ".gguf" and not path.is_dir())


def starts_as_gguf(path: Path) -> bool:
    """Returns True if a file starts with the magic bytes of GGUF."""
    with path.open("rb") as file:
        return file.read(4) == b"GGUF"


def open_gguf(path: Path) -> GGUFFile:
    """Opens a GGUF file. Raises ConfigError if it is missing, damaged or has an unsupported architecture."""
    if not path.is_file():
        raise ConfigError(f"{path} does not exist or is not a regular file; pass a GGUF file.")
    if not starts_as_gguf(path):
        raise ConfigError(f"{path} is not a GGUF file; pass a run, a Hugging Face model or a GGUF file.")
    require(f"{path}: reading a GGUF file", "gguf")
    stats = (part.stat() for part in gguf_parts(path) if part.is_file())
    return _open_cached(path, tuple((status.st_mtime_ns, status.st_size) for status in stats))


@lru_cache(maxsize=1)
def _open_cached(path: Path, version: tuple[tuple[int, int], ...]) -> GGUFFile:
    """Opens a file, cached because parsing a vocabulary of a hundred thousand tokens takes seconds."""
    from sansgpu.models.formats.gguf_file import GGUFFile

    return GGUFFile(path)
