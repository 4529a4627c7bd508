"""Files that are there whole, or as they were."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


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
