"""Recognizes and opens GGUF files. Imports the optional package gguf only to open one."""

from __future__ import annotations

import re
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from sansgpu.config import ConfigError
from sansgpu.config.errors import require
from sansgpu.config.paths import local_path
from sansgpu.files.reading import require_regular_file

if TYPE_CHECKING:
    from sansgpu.models.formats.gguf_file import GGUFFile

_PART = re.compile(r"(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")
_MAX_PARTS = 1000


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
    stats = (part.stat() for part in parts_of(path) if part.is_file())
    return _open_cached(path, tuple((status.st_mtime_ns, status.st_size) for status in stats))


def parts_of(path: Path) -> list[Path]:
    """Returns the paths of all parts of a model if the name of a file is llama.cpp's for one, or else `path` alone."""
    name = _PART.fullmatch(path.name)
    if name is None or not 1 <= int(name["number"]) <= int(name["count"]) <= _MAX_PARTS:
        return [path]
    count = int(name["count"])
    return [path.with_name(f"{name['stem']}-{number + 1:05}-of-{count:05}.gguf") for number in range(count)]


@lru_cache(maxsize=1)
def _open_cached(path: Path, version: tuple[tuple[int, int], ...]) -> GGUFFile:
    """Opens a file, cached because parsing a vocabulary of a hundred thousand tokens takes seconds."""
    from sansgpu.models.formats.gguf_file import GGUFFile

    return GGUFFile(path)
