"""Checks that a run may write to its folders and that its recorded configuration is intact."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sansgpu.config import Config, ConfigError, RunPaths, identity, require_identity
from sansgpu.config.atomic import make_folder, write_failures_as
from sansgpu.config.parse import read_values
from sansgpu.reporting.marks import MARK, FolderMark, read_mark, write_mark
from sansgpu.reporting.outputs import require_folder, require_no_links
from sansgpu.reporting.unmarked import is_unmarked
from sansgpu.train.snapshots import snapshots


def require_unclaimed_folders(paths: RunPaths, resumes: bool) -> None:
    """Raises ConfigError unless a run may write to its folder and to its snapshot and log folders."""
    require_folder(paths.root, "run")
    require_no_links(paths.written)
    for folder, kind in ((paths.final, "model"), (paths.tokenizer, "tokenizer")):
        require_folder(folder, kind)
    for folder, kind, key in _elsewhere(paths):
        require_folder(folder, kind, key)
        owner, run = _run_of(folder), _run_of(paths.root)
        if owner and owner != run and (run or not resumes) and _is_used(folder):
            raise ConfigError(f"{folder} contains another run's {kind}; choose another {key}.")


def mark_other_folders(paths: RunPaths) -> None:
    """Marks snapshot and log folders outside of the run's folder. Raises ConfigError if one cannot be written."""
    run = _identity_of(paths)
    for folder, kind, key in _elsewhere(paths):
        with write_failures_as(ConfigError, folder, key):
            make_folder(folder)
            write_mark(folder, FolderMark(kind, run=run))


def mark_run(paths: RunPaths, config: Config) -> None:
    """Marks the run's folder with the configuration that is about to be written. Raises OSError."""
    before = read_mark(paths.root)
    by_0_1 = before.made_by_0_1 if before else is_unmarked(paths.root, "run")
    write_mark(paths.root, FolderMark("run", {}, _identity_of(paths), by_0_1, identity(config)))


def require_own_configuration(paths: RunPaths) -> None:
    """Raises ConfigError if config.yaml is truncated, or altered so that it describes another model or data order.

    It must match the folder's mark or the newest snapshot: a run resumed with other values records them only in its
    mark until its next snapshot. Runs of version 0.1.0 recorded neither.
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


def _identity_of(paths: RunPaths) -> str:
    """Returns the run's identity: its own, or that of its snapshot or log folder, or a new one."""
    known = (_run_of(folder) for folder in (paths.root, *(folder for folder, _, _ in _elsewhere(paths))))
    return next((run for run in known if run), None) or uuid.uuid4().hex


def _run_of(folder: Path) -> str | None:
    """Returns the identity of the run whose mark the folder has."""
    mark = read_mark(folder)
    return mark.run if mark else None


def _is_used(folder: Path) -> bool:
    return any(path.name != MARK for path in folder.iterdir())
