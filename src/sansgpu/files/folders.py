"""Walks, copies and deletes folders of any depth; the standard library's functions recurse and fail on deep ones."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path


def entries_below(folder: Path) -> Iterator[Path]:
    """Yields every file and folder below `folder`, each folder before its content. Symlinks are not followed.

    Folders without permission count as empty. Raises OSError, e.g. if a path is too long for the system.
    """
    left = [folder]
    while left:
        current = left.pop()
        with contextlib.suppress(PermissionError), os.scandir(current) as entries:
            for entry in entries:
                yield current / entry.name
                if entry.is_dir(follow_symlinks=False):
                    left.append(current / entry.name)


def copy_folder(source: Path, target: Path, without: str = "") -> None:
    """Copies a folder, except files with the name `without`, into `target`, which may exist. Raises OSError."""
    target.mkdir(parents=True, exist_ok=True)
    for path in entries_below(source):
        copy = target / path.relative_to(source)
        if path.is_dir():
            copy.mkdir(exist_ok=True)
        elif path.name != without:
            shutil.copy2(path, copy)


def delete_folder(folder: Path) -> None:
    """Deletes a folder with its content. Ignores errors."""
    with contextlib.suppress(RecursionError):  # `rmtree` is safe from symlink races, but recurses
        shutil.rmtree(folder, ignore_errors=True)
