"""Checks that a run may write to its folders and that its recorded configuration is intact."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from sansgpu.config import Config, ConfigError, RunPaths, identity, require_identity
from sansgpu.config.parse import read_values
from sansgpu.files.atomic import cleanup_of, make_folder, write_failures_as
from sansgpu.files.marks import MARK, FolderMark, is_output, read_mark, write_mark
from sansgpu.files.ownership import require_folder, require_no_links
from sansgpu.train.snapshots import snapshots


def require_unclaimed_folders(paths: RunPaths) -> None:
    """Raises ConfigError unless a run may write to its folder and to its snapshot and log folders."""
    require_folder(paths.root, "run")
    require_no_links(paths.written)
    for folder, kind in ((paths.final, "model"), (paths.tokenizer, "tokenizer")):
        require_folder(folder, kind)
    _require_other_folders(paths)


def require_own_snapshots(paths: RunPaths) -> None:
    """Raises ConfigError unless the run's snapshots, which a command will move or delete, belong to this run."""
    require_folder(paths.root.resolve(), "run", "run")
    require_no_links([paths.snapshots])
    _require_other_folders(paths)


def _require_other_folders(paths: RunPaths) -> None:
    """Raises ConfigError if a snapshot or log folder outside of the run's folder belongs to something else."""
    for folder, kind, key in _elsewhere(paths):
        require_folder(folder, kind, key)
        owner = _owner_of(folder)
        if owner and owner != _owner_of(paths.root) and _is_used(folder):
            raise ConfigError(f"{folder} contains another run's {kind}; choose another {key}.")


def mark_other_folders(paths: RunPaths, until_end: ExitStack) -> None:
    """Marks snapshot and log folders outside of the run's folder. Raises ConfigError if one cannot be written.

    The run's folder is marked first: a process killed in between must not leave folders that belong to no run.
    `until_end` finally removes the mark of a folder that the run did not use.
    """
    mark = _mark_of(paths.root)
    for folder, kind, key in _elsewhere(paths):
        until_end.callback(cleanup_of(folder, MARK))
        with write_failures_as(ConfigError, paths.root, "--output-dir"):
            write_mark(paths.root, mark)
        with write_failures_as(ConfigError, folder, key):
            make_folder(folder)
            write_mark(folder, FolderMark(kind, run=mark.run))


def mark_run(paths: RunPaths, config: Config) -> None:
    """Marks the run's folder with the configuration that is about to be written. Raises OSError."""
    write_mark(paths.root, replace(_mark_of(paths.root), configuration=identity(config)))


def require_own_configuration(paths: RunPaths) -> None:
    """Raises ConfigError if config.yaml is truncated, or altered so that it describes another model or data order.

    It must match the folder's mark or the newest snapshot: a run resumed with other values records them only in its
    mark until its next snapshot.
    """
    require_identity(paths.config, read_values(paths.config), list(_recorded(paths)))


def _recorded(paths: RunPaths) -> Iterator[dict[str, Any]]:
    """Yields the configurations recorded in the run's mark and newest readable snapshot."""
    mark = read_mark(paths.root)
    if mark and mark.configuration:
        yield mark.configuration
    for snapshot in reversed(snapshots(paths.snapshots)):
        try:
            recorded = snapshot.state().get("configuration")
        except (OSError, ValueError, ConfigError):
            continue  # incomplete; resuming skips it, too
        if isinstance(recorded, dict):
            yield recorded
        return


def _elsewhere(paths: RunPaths) -> Iterator[tuple[Path, str, str]]:
    """Yields (path, kind, configuration key) of snapshot and log folders outside of the run's folder."""
    seen = {paths.root.resolve()}
    named = (paths.checkpoint_dir, "snapshots", "checkpoint_dir"), (paths.logging_dir, "logs", "logging_dir")
    for folder, kind, key in named:
        if folder is not None and folder.resolve() not in seen:
            seen.add(folder.resolve())
            yield folder, kind, f"training.{key}"


def _mark_of(root: Path) -> FolderMark:
    """Returns the mark of a run's folder, with a new identity if it has none."""
    mark = read_mark(root) or FolderMark("run")
    return replace(mark, run=mark.run or uuid.uuid4().hex)


def _run_of(folder: Path) -> str | None:
    """Returns the identity of the run whose mark the folder has."""
    mark = read_mark(folder)
    return mark.run if mark else None


def _owner_of(folder: Path) -> str | None:
    """Returns the identity of the run that a folder belongs to, by its mark or else by the run around it, or None.

    A run without an identity is identified by its path.
    """
    if run := _run_of(folder):
        return run
    for place in (resolved := folder.resolve(), *resolved.parents):
        if is_output(place, "run"):
            return _run_of(place) or str(place)
    return None


def _is_used(folder: Path) -> bool:
    return folder.exists() and any(path.name != MARK for path in folder.iterdir())
