"""Files that are there whole, or as they were; and streams whose reader leaves."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """Where to write what takes the place of `path` in the end; the folder is made. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial")  # hidden: a folder with nothing else still counts as empty
    try:
        yield partial
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Write a text as a whole file. Raises OSError."""
    with whole_file(path) as partial:
        partial.write_text(text, encoding="utf-8")


def to_nowhere(stream: IO[str]) -> None:
    """What is written to a stream from now on, and what is still in its buffer, is dropped: its reader has left."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)
