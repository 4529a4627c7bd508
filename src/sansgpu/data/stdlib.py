"""The modules of Python's standard library, which every machine has, as example data."""

from __future__ import annotations

import ast
import sysconfig
import tokenize
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePath
from typing import NamedTuple

_SKIPPED = {"site-packages", "dist-packages", "test", "tests", "__pycache__"}  # folders


class LibraryModule(NamedTuple):
    """A module that this Python version can parse."""

    file: str  # path relative to the library's folder
    name: str  # includes the names of its packages
    source: str
    tree: ast.Module


def library_files() -> tuple[Path, list[Path]]:
    """Returns the library's folder and its modules, without tests and installed packages."""
    root = Path(sysconfig.get_paths()["stdlib"])
    return root, [p for p in sorted(root.rglob("*.py")) if not _SKIPPED.intersection(p.relative_to(root).parts)]


def library_modules(files: Mapping[str, Path]) -> Iterator[LibraryModule]:
    """Parses `files`, whose keys are paths relative to the library's folder; skips those that cannot be parsed."""
    for file, path in files.items():
        try:
            with tokenize.open(path) as opened:  # uses the file's declared encoding
                source = opened.read()
            tree = ast.parse(source)
        except (SyntaxError, ValueError):
            continue
        place = PurePath(file)
        parts = place.parent.parts if place.name == "__init__.py" else place.with_suffix("").parts
        yield LibraryModule(file, ".".join(parts), source, tree)
