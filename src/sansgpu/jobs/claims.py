"""Which folders a run may write to, and whether its configuration is its own."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sansgpu.config import Config, ConfigError, RunPaths, identity, require_identity
from sansgpu.config.parse import read_values
from sansgpu.train.checkpoint import snapshots
from sansgpu.watch.files import make_folder
from sansgpu.watch.marks import MARK, Mark, read_mark, write_mark
from sansgpu.watch.outputs import require_folder, require_no_links
from sansgpu.watch.unmarked import is_unmarked


def require_places(paths: RunPaths, resumes: bool) -> None:
    """Raises ConfigError unless a run may write to its folder, and to the folders of its snapshots and logs."""
    require_folder(paths.root, "run")
    require_no_links(paths.written)
    for folder, kind in ((paths.final, "model"), (paths.tokenizer, "tokenizer")):
        require_folder(folder, kind)
    for folder, kind, key in _elsewhere(paths):
        require_folder(folder, kind, key)
        mark, run = read_mark(folder), _own(paths.root)
        owner = mark.run if mark else None
        if owner and owner != run and (run or not resumes) and _is_used(folder):
            raise ConfigError(f"{folder} holds another run's {kind}; choose another {key}.")


def claim_elsewhere(paths: RunPaths) -> None:
    """Mark the folders of snapshots and logs that are not in the run's folder. Raises ConfigError."""
    run = _identity_of(paths)
    for folder, kind, key in _elsewhere(paths):
        try:
            make_folder(folder)
            write_mark(folder, Mark(kind, run=run))
        except OSError as error:
            raise ConfigError(f"{folder} cannot be written: {error.strerror}; choose another {key}.") from None


def claim_run(paths: RunPaths, config: Config) -> None:
    """Mark the run's folder, with the configuration that config.yaml is about to hold. Raises OSError."""
    before = read_mark(paths.root)
    by_0_1 = before.made_by_0_1 if before else is_unmarked(paths.root, "run")
    write_mark(paths.root, Mark("run", {}, _identity_of(paths), by_0_1, identity(config)))


def require_own_configuration(paths: RunPaths) -> None:
    """Raises ConfigError if config.yaml was cut off, or altered so that it describes another model or data order.

    It has to fit the folder's mark or the newest snapshot: a run that is resumed with other values has them in its mark
    alone until its first snapshot. Runs that version 0.1.0 made recorded neither.
    """
    require_identity(paths.config, read_values(paths.config), list(_recorded(paths)))


def _recorded(paths: RunPaths) -> Iterator[dict[str, Any]]:
    """What is recorded of the run's configuration."""
    mark = read_mark(paths.root)
    if mark and mark.configuration:
        yield mark.configuration
    for snapshot in reversed(snapshots(paths.snapshots)):
        try:
            recorded = snapshot.state().get("configuration")
        except (OSError, ValueError, ConfigError):
            continue  # a torn one, which resuming skips
        if isinstance(recorded, dict):
            yield recorded
        return


def _elsewhere(paths: RunPaths) -> Iterator[tuple[Path, str, str]]:
    """Folders outside of the run's own places: path, kind, and the key that names it."""
    seen = {paths.root.resolve()}
    named = (paths.checkpoint_dir, "snapshots", "checkpoint_dir"), (paths.logging_dir, "logs", "logging_dir")
    for folder, kind, key in named:
        if folder is not None and folder.resolve() not in seen:
            seen.add(folder.resolve())
            yield folder, kind, f"training.{key}"


def _identity_of(paths: RunPaths) -> str:
    """The run's identity: the one it has, or the one of the snapshots that it goes on from, or a new one."""
    known = (_own(folder) for folder in (paths.root, *(folder for folder, _, _ in _elsewhere(paths))))
    return next((run for run in known if run), None) or uuid.uuid4().hex


def _own(folder: Path) -> str | None:
    mark = read_mark(folder)
    return mark.run if mark else None


def _is_used(folder: Path) -> bool:
    return any(path.name != MARK for path in folder.iterdir())
