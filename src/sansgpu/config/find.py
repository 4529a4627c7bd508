"""Finds configuration files by name, and the files and folders that a configuration names."""

from __future__ import annotations

import difflib
import os
from collections.abc import Collection
from itertools import islice
from pathlib import Path
from typing import Any

from sansgpu.config.errors import ConfigError
from sansgpu.config.parse import SUFFIXES, Values, read_values
from sansgpu.config.paths import BUILT_IN_NAMES, local_path
from sansgpu.config.schema import Config
from sansgpu.config.section import TOP_LEVEL_KEYS, declared_keys
from sansgpu.config.wording import truncate

PRESETS = ("small", "medium", "large")
# The run without a configuration file takes minutes on two cores and shows generated samples.
BUILT_IN: dict[str, dict[str, Any]] = {"training": {"max_steps": 500, "sample_tokens": 64}}
LIMITS = frozenset(f"training.{key}" for key in ("num_epochs", "max_steps", "max_tokens", "max_hours", "until"))
MAX_NAMES = 20  # names in a message
# Files of configs/ by the names that guides of other trainers (llm-trainer, oxidizr) give to files like them.
_NAMES_IN_GUIDES = {"cpu_small_model": "cpu_small", "cpu_medium_model": "cpu_medium", "nano": "nano"}
_PRESETS = Path(__file__).parent / "presets"
_PACKAGE = Path(__file__).parents[1]
# A wheel has the repository's configs/ in the package.
_CONFIGS = _PACKAGE.parents[1] / "configs" if _PACKAGE.parent.name == "src" else _PACKAGE / "configs"


def built_in(overridden: Collection[str]) -> dict[str, Any]:
    """Returns the values of a run without a configuration file, without those that the `overridden` keys replace."""
    if "task" in overridden:
        return {}
    dropped = {"max_steps"} if LIMITS & set(overridden) else set()
    return {name: {k: v for k, v in section.items() if k not in dropped} for name, section in BUILT_IN.items()}


def configuration_file(path: Path) -> tuple[Path, list[str]]:
    """Returns the file at `path`, or the one of this name among presets, ./configs and sansgpu's own configs.

    `configs/NAME.yaml` finds sansgpu's own, too, where a folder `configs` has no such file.

    Instead of a missing file that a guide names, returns the one with its contents, and a note for the user.
    Raises ConfigError if there is none.
    """
    if os.path.isfile(path):
        return path, []
    known = _known_by_name()
    if str(path) in known:
        return known[str(path)], []
    if path.parent == Path(_CONFIGS.name) and (_CONFIGS / path.name) in known.values():
        return _CONFIGS / path.name, []
    if not _is_missing(path):
        return path, []  # reading it raises an error that says why it cannot be read
    if (other := known.get(_NAMES_IN_GUIDES.get(path.stem, ""))) is not None:
        return other, [f"{truncate(str(path))} does not exist; {other} is used, which has the same purpose."]
    beside = {file.name: file for file in _files(path.parent)}
    near = [str(beside[name]) for name in _nearest(path.name, beside)] + _nearest(path.stem, known)
    suggestion = f" (did you mean {near[0]}?)" if near else ""
    names = ", ".join(islice((name for name, file in known.items() if _is_configuration(file)), MAX_NAMES))
    raise ConfigError(f"{truncate(str(path))} does not exist{suggestion}; pass a file, or one of {names}.")


def _nearest(name: str, files: dict[str, Path]) -> list[str]:
    """Returns the names of configurations among `files` (by name) that are similar to `name`, most similar first."""
    return [near for near in difflib.get_close_matches(name, files, n=MAX_NAMES) if _is_configuration(files[near])]


def _is_missing(path: Path) -> bool:
    try:
        path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return True
    except OSError:
        return False
    return False


def _known_by_name() -> dict[str, Path]:
    known = {name: _PRESETS / f"{name}.yaml" for name in PRESETS}
    for folder in (Path(_CONFIGS.name), _CONFIGS):
        for file in _files(folder):
            known.setdefault(file.stem, file)
    return known


def _files(folder: Path) -> list[Path]:
    return sorted(file for file in folder.glob("*") if file.suffix in SUFFIXES and file.is_file())


def _is_configuration(file: Path) -> bool:
    """Returns whether a file has only keys that the top level of a configuration may have."""
    try:
        keys = read_values(file).keys()
    except ConfigError:
        return False
    return bool(keys) and keys <= {*Config.model_fields, *TOP_LEVEL_KEYS}


def use_files_beside(schema: type[Config], values: Values, folder: Path, overridden: Collection[str]) -> list[str]:
    """Makes paths in `values` absolute that exist in the configuration's `folder` but not in the working directory.

    Keys that are `overridden` on the command line stay unchanged. Returns a note for each path that exists in both.
    """
    notes: list[str] = []
    for path in declared_keys(schema, "input_path"):
        *sections, key = path.split(".")
        given: Any = values
        for section in sections:
            given = given.get(section) if isinstance(given, dict) else None
        name = given.get(key) if isinstance(given, dict) else None
        if not isinstance(name, str) or not name or os.path.isabs(name) or name in BUILT_IN_NAMES:
            continue
        beside = os.path.abspath(folder / name)
        if path in overridden or not os.path.exists(beside):
            continue
        if not os.path.exists(name):
            given[key] = beside
        elif not os.path.samefile(name, beside):
            notes.append(
                f"{path}: {name} exists in the working directory and as {beside}; the one in the working directory is "
                "used."
            )
    return notes


def same_input(one: str, other: str) -> bool:
    """Returns whether two values of an input key name the same file, folder or Hub dataset."""
    return os.path.abspath(local_path(one)) == os.path.abspath(local_path(other))
