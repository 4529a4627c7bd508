"""Recognizes output folders of version 0.1.0, which have no mark, by their contents.

A run has three characteristic files, and subfolders with known names. A benchmark and cluster manifests contain only
their own files, one of which mentions sansgpu. Folders of snapshots and TensorBoard logs contain nothing else. An
exported model or a tokenizer outside of a run cannot be recognized.
"""

from __future__ import annotations

import re
from pathlib import Path

from sansgpu.config import ConfigError
from sansgpu.config.parse import read_values
from sansgpu.config.plain_data import parse_json, read_regular
from sansgpu.files.marks import read_mark

_IN_A_RUN = {"final": "model", "export": "model", "tokenizer": "tokenizer", "plots": "plots"}
# By kind of folder: a file, text that it must contain, and the names that are allowed in the folder.
_STANDALONE = {
    "bench": ("start.sh", "# Trains as measured by sansgpu bench.", r"report\.(md|html)|optimized\.yaml|start\.sh"),
    "cluster": (
        "Dockerfile", "# The image that the manifests beside this file run. Built in a checkout of sansgpu",
        r"Dockerfile(\.dockerignore)?|(pytorchjob|trainjob|files)\.yaml",
    ),
}  # fmt: skip
_NAMES = {
    "model": r"(adapter_)?model.*\.safetensors(\.index\.json)?|((adapter|generation)_)?config\.json|relations\.json"
    r"|(tokenizer|special_tokens|vocab|merges|added_tokens|chat_template).*",
    "tokenizer": ".*",
    "plots": r".*\.(png|svg)",
    "snapshots": r"\.?step-\d{6,}(\.(partial|replaced|deleted))?",
    "logs": r"events\.out\.tfevents\..*",
    **{kind: names for kind, (_, _, names) in _STANDALONE.items()},
}
_MAX_LINE = 1 << 16  # characters read of a run's first event
_MAX_BYTES = 1 << 20  # read of a file


def is_unmarked(folder: Path, kind: str) -> bool:
    """Returns True if version 0.1.0 made this folder as an output of this kind."""
    if read_mark(folder) is not None or not folder.is_dir():
        return False
    if kind == "run":
        return _is_run(folder)
    if kind == "search":
        return _is_search(folder)
    if kind in _STANDALONE:
        return _is_standalone(folder, kind)
    if kind in ("snapshots", "logs"):
        return all(re.fullmatch(_NAMES[kind], path.name) for path in folder.iterdir())
    return _IN_A_RUN.get(folder.resolve().name) == kind and _is_in_a_run(folder.resolve().parent)


def files_of_unmarked(folder: Path, kind: str) -> list[Path]:
    """Returns the files of an unmarked folder whose names say that sansgpu wrote them."""
    return [path for path in folder.iterdir() if path.is_file() and re.fullmatch(_NAMES[kind], path.name)]


def _is_run(folder: Path) -> bool:
    config, environment, metrics = (folder / name for name in ("config.yaml", "environment.json", "metrics.jsonl"))
    if any(path.is_symlink() or not path.is_file() for path in (config, environment, metrics)):
        return False
    try:
        with metrics.open(encoding="utf-8") as file:
            first = file.readline(_MAX_LINE)
        begun = not first or parse_json(first)["event"] == "start"
        keys = {*read_values(config), *parse_json(read_regular(environment, _MAX_BYTES))}
        return begun and {"task", "model", "training", "data", "isa", "sansgpu"} <= keys
    except (OSError, ValueError, TypeError, KeyError, AttributeError, ConfigError):
        return False


def _is_search(folder: Path) -> bool:
    try:
        return {"configuration", "space", "length"} <= {*parse_json(read_regular(folder / "tune.json", _MAX_BYTES))}
    except (OSError, ValueError, TypeError):
        return False


def _is_in_a_run(folder: Path) -> bool:
    mark = read_mark(folder)
    return _is_run(folder) if mark is None else mark.made_by_0_1


def _is_standalone(folder: Path, kind: str) -> bool:
    proof, words, names = _STANDALONE[kind]
    try:
        known = all(re.fullmatch(names, path.name) and path.is_file() for path in folder.iterdir())
        return known and words in (folder / proof).read_text(encoding="utf-8")
    except (OSError, ValueError):
        return False
