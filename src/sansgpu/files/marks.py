"""The mark of an output folder: `.sansgpu.json`, which lists the files that sansgpu wrote there.

The mark has a fingerprint of each file, which shows whether the file was changed later.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from sansgpu.config import ConfigError
from sansgpu.config.parse import read_values
from sansgpu.config.plain_data import parse_json, read_regular
from sansgpu.files.atomic import write_text

MARK = ".sansgpu.json"
KINDS = {
    "run": "a run", "model": "a model", "tokenizer": "a tokenizer", "plots": "plots", "bench": "a benchmark",
    "cluster": "a cluster's manifests", "search": "a search", "snapshots": "a run's snapshots", "logs": "a run's logs",
}  # fmt: skip
_MAX_BYTES = 1 << 22  # maximum size of a mark; enough for 30,000 files
_MAX_LINE = 1 << 16  # maximum characters to read of a run's first event
_SAMPLE_BYTES = 1 << 20  # bytes at each end of a file that its fingerprint covers


@dataclass(frozen=True)
class FolderMark:
    """The content of a `.sansgpu.json` file."""

    kind: str
    files: dict[str, list[str]] = field(default_factory=dict)  # valid fingerprints by relative path
    run: str | None = None  # identity of the run that the folder belongs to
    configuration: dict[str, Any] | None = None  # `config.identity.identity` of a run


def read_mark(folder: Path) -> FolderMark | None:
    """Returns the mark of a folder, or None if it is missing or invalid."""
    path = folder / MARK
    try:
        if path.is_symlink():
            return None
        values = parse_json(read_regular(path, _MAX_BYTES))
        mark = FolderMark(**{key: value for key, value in values.items() if key != "made_by"})
        return mark if _is_valid(mark) else None
    except (OSError, ValueError, TypeError, AttributeError):
        return None


def is_copied_output(folder: Path, kind: str) -> bool:
    """Returns True if a folder without a mark has the files of a run or a search, e.g. because it was copied."""
    try:
        if kind == "search":
            return {"configuration", "space", "length"} <= {*parse_json(read_regular(folder / "tune.json", _MAX_BYTES))}
        return kind == "run" and _has_files_of_a_run(folder)
    except (OSError, ValueError, TypeError, KeyError, AttributeError, ConfigError):
        return False


def _has_files_of_a_run(folder: Path) -> bool:
    config, environment, metrics = (folder / name for name in ("config.yaml", "environment.json", "metrics.jsonl"))
    if any(path.is_symlink() or not path.is_file() for path in (config, environment, metrics)):
        return False
    with metrics.open(encoding="utf-8") as file:
        first = file.readline(_MAX_LINE)
    begun = not first or parse_json(first)["event"] == "start"
    keys = {*read_values(config), *parse_json(read_regular(environment, _MAX_BYTES))}
    return begun and {"task", "model", "training", "data", "isa", "sansgpu"} <= keys


def write_mark(folder: Path, mark: FolderMark) -> None:
    """Marks a folder as made by sansgpu. Raises OSError."""
    values = {key: value for key, value in asdict(mark).items() if value or key == "kind"}
    write_text(folder / MARK, json.dumps({"made_by": "sansgpu", **values}, indent=1, sort_keys=True) + "\n")


def is_unchanged(folder: Path, name: str, known: Sequence[str]) -> bool:
    """Returns True if `folder`/`name` is a file with a `known` fingerprint and no symlink on its path."""
    path = folder / name
    return not has_link_in_path(folder, name) and path.is_file() and fingerprint(path) in known


def has_link_in_path(folder: Path, name: str) -> bool:
    """Returns True if a path in a folder, or one of its parents within the folder, is a symlink."""
    steps = PurePosixPath(name)
    return any((folder / step).is_symlink() for step in (steps, *steps.parents[:-1]))


def fingerprint(path: Path) -> str:
    """Returns the SHA-256 of a file's size, start and end. Reading all of a model's weights would be slow."""
    with path.open("rb") as file:
        first = file.read(_SAMPLE_BYTES)
        size = os.fstat(file.fileno()).st_size
        file.seek(max(0, size - _SAMPLE_BYTES))
        return _digest(size, first, file.read())


def fingerprint_of(content: bytes) -> str:
    """Returns the fingerprint of a file with this content."""
    return _digest(len(content), content[:_SAMPLE_BYTES], content[-_SAMPLE_BYTES:])


def _digest(size: int, first: bytes, last: bytes) -> str:
    return hashlib.sha256(b"%d %b %b" % (size, first, last)).hexdigest()


def _is_valid(mark: FolderMark) -> bool:
    """Validates an untrusted mark: value types, and no path that leaves the folder."""
    return (
        mark.kind in KINDS
        and isinstance(mark.files, dict)
        and all(isinstance(known, list) and _is_inside(name) for name, known in mark.files.items())
        and isinstance(mark.run, str | None)
        and isinstance(mark.configuration, dict | None)
    )


def _is_inside(name: str) -> bool:
    parts = PurePosixPath(name).parts
    return bool(parts) and parts[0] != "/" and ".." not in parts
