"""Folders that version 0.1.0 made, which carry no mark, recognised by what is in them.

A run has three files of a shape that nothing else has, and folders of known names within it. A measurement and a
cluster's manifests hold nothing but their files, one of which names sansgpu. Folders of snapshots and of TensorBoard's
logs hold nothing but such. An exported model or a tokenizer outside of a run looks like anybody else's.
"""

from __future__ import annotations

import re
from pathlib import Path

from sansgpu.config import ConfigError
from sansgpu.config.parse import read_values
from sansgpu.config.plain import parse_json, read_regular
from sansgpu.watch.marks import read_mark

_IN_A_RUN = {"final": "model", "export": "model", "tokenizer": "tokenizer", "plots": "plots"}
# Other folders by their kind: the file that proves it, the words in it, and the only names that may be there.
_ALONE = {
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
    **{kind: names for kind, (_, _, names) in _ALONE.items()},
}
_MOST_LINE = 1 << 16  # characters of a run's first event that are read
_MOST_BYTES = 1 << 20  # of a file that is read


def is_unmarked(folder: Path, kind: str) -> bool:
    """Whether version 0.1.0 made this folder, as one of this kind."""
    if read_mark(folder) is not None or not folder.is_dir():
        return False
    if kind == "run":
        return _is_run(folder)
    if kind == "search":
        return _is_search(folder)
    if kind in _ALONE:
        return _is_alone(folder, kind)
    if kind in ("snapshots", "logs"):
        return all(re.fullmatch(_NAMES[kind], path.name) for path in folder.iterdir())
    return _IN_A_RUN.get(folder.resolve().name) == kind and _is_in_a_run(folder.resolve().parent)


def files_of_unmarked(folder: Path, kind: str) -> list[Path]:
    """The files of an unmarked folder that may be replaced, by their names."""
    return [path for path in folder.iterdir() if path.is_file() and re.fullmatch(_NAMES[kind], path.name)]


def _is_run(folder: Path) -> bool:
    config, environment, metrics = (folder / name for name in ("config.yaml", "environment.json", "metrics.jsonl"))
    if any(path.is_symlink() or not path.is_file() for path in (config, environment, metrics)):
        return False
    try:
        with metrics.open(encoding="utf-8") as file:
            first = file.readline(_MOST_LINE)
        begun = not first or parse_json(first)["event"] == "start"
        keys = {*read_values(config), *parse_json(read_regular(environment, _MOST_BYTES))}
        return begun and {"task", "model", "training", "data", "isa", "sansgpu"} <= keys
    except (OSError, ValueError, TypeError, KeyError, AttributeError, ConfigError):
        return False


def _is_search(folder: Path) -> bool:
    try:
        return {"configuration", "space", "length"} <= {*parse_json(read_regular(folder / "tune.json", _MOST_BYTES))}
    except (OSError, ValueError, TypeError):
        return False


def _is_in_a_run(folder: Path) -> bool:
    mark = read_mark(folder)
    return _is_run(folder) if mark is None else mark.made_by_0_1


def _is_alone(folder: Path, kind: str) -> bool:
    proof, words, names = _ALONE[kind]
    try:
        known = all(re.fullmatch(names, path.name) and path.is_file() for path in folder.iterdir())
        return known and words in (folder / proof).read_text(encoding="utf-8")
    except (OSError, ValueError):
        return False
