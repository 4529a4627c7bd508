"""The mark of a folder that sansgpu made: `.sansgpu.json`, which names the files that it wrote there.

Each has a fingerprint, so that a file which somebody changed since is known to be theirs.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from sansgpu.config.plain import parse_json, read_regular
from sansgpu.watch.files import write_text

MARK = ".sansgpu.json"
KINDS = {
    "run": "a run", "model": "a model", "tokenizer": "a tokenizer", "plots": "plots", "bench": "a measurement",
    "cluster": "a cluster's manifests", "search": "a search", "snapshots": "a run's snapshots", "logs": "a run's logs",
}  # fmt: skip
_MOST_BYTES = 1 << 22  # of a mark that is read: enough for 30,000 files
_SAMPLE_BYTES = 1 << 20  # at each end of a file, which its fingerprint covers


@dataclass(frozen=True)
class Mark:
    """The content of a mark."""

    kind: str
    files: dict[str, list[str]] = field(default_factory=dict)  # by path in the folder: fingerprints it may have
    run: str | None = None  # identity of the run that the folder is of
    made_by_0_1: bool = False  # a run that version 0.1.0 began, whose other folders have no mark
    configuration: dict[str, Any] | None = None  # of a run, as config.identity gives it


def read_mark(folder: Path) -> Mark | None:
    """The mark of a folder; None if there is none that can be read."""
    path = folder / MARK
    try:
        if path.is_symlink():
            return None
        values = parse_json(read_regular(path, _MOST_BYTES))
        mark = Mark(**{key: value for key, value in values.items() if key != "made_by"})
        return mark if _has_types(mark) else None
    except (OSError, ValueError, TypeError, AttributeError):
        return None


def write_mark(folder: Path, mark: Mark) -> None:
    """Mark a folder as made by sansgpu. Raises OSError."""
    values = {key: value for key, value in asdict(mark).items() if value or key == "kind"}
    write_text(folder / MARK, json.dumps({"made_by": "sansgpu", **values}, indent=1, sort_keys=True) + "\n")


def is_unchanged(folder: Path, name: str, known: Sequence[str]) -> bool:
    """Whether `folder`/`name` is a file with one of the fingerprints `known`. Nothing behind a link is."""
    path = folder / name
    return not is_behind_link(folder, name) and path.is_file() and fingerprint(path) in known


def is_behind_link(folder: Path, name: str) -> bool:
    """Whether a path in a folder, or one of the folders on the way to it, is a link."""
    steps = PurePosixPath(name)
    return any((folder / step).is_symlink() for step in (steps, *steps.parents[:-1]))


def fingerprint(path: Path) -> str:
    """SHA-256 of a file's size, beginning and end: weights of many gigabytes need not be read."""
    with path.open("rb") as file:
        first = file.read(_SAMPLE_BYTES)
        size = os.fstat(file.fileno()).st_size
        file.seek(max(0, size - _SAMPLE_BYTES))
        return _digest(size, first, file.read())


def fingerprint_of(content: bytes) -> str:
    """The fingerprint of a file with this content."""
    return _digest(len(content), content[:_SAMPLE_BYTES], content[-_SAMPLE_BYTES:])


def _digest(size: int, first: bytes, last: bytes) -> str:
    return hashlib.sha256(b"%d %b %b" % (size, first, last)).hexdigest()


def _has_types(mark: Mark) -> bool:
    """A mark may come from somebody else: each value has its type, and no name leads out of the folder."""
    return (
        mark.kind in KINDS
        and isinstance(mark.files, dict)
        and all(isinstance(known, list) and _is_inside(name) for name, known in mark.files.items())
        and isinstance(mark.run, str | None)
        and isinstance(mark.made_by_0_1, bool)
        and isinstance(mark.configuration, dict | None)
    )


def _is_inside(name: str) -> bool:
    parts = PurePosixPath(name).parts
    return bool(parts) and parts[0] != "/" and ".." not in parts
