"""Listing of the runs in a folder."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from sansgpu.config import ABANDONED_FOLDER, ConfigError, RunPaths
from sansgpu.config.paths import RUNS
from sansgpu.files.ownership import is_locked
from sansgpu.views.record import RunRecord
from sansgpu.views.results import RunSummary, changed_settings, size_bytes, summarize

KnownRuns = dict[Path, tuple[object, RunSummary]]  # the results of a run, with what changes when they change


def list_runs(folder: Path, known: KnownRuns | None = None) -> list[RunSummary]:
    """Returns the results of every run below `folder`, most recently changed first.

    An unreadable run has state `broken` and a `problem`. Runs in `known` that have not changed are not read again, and
    those that are read are added. Raises ConfigError if the folder does not exist.
    """
    if folder == RUNS and not folder.exists():
        return []
    if not folder.is_dir():
        raise ConfigError(f"{folder} is not a folder; train a model first, or pass the folder that contains your runs.")
    rows = [_row(found, folder, {} if known is None else known) for found in run_folders(folder)]
    return sorted(rows, key=lambda row: (row.changed or "", row.path), reverse=True)


def run_folders(folder: Path) -> Iterator[Path]:
    """Yields folders that look like runs: `folder` itself, or those below it that are not inside another run."""
    left = [folder]
    while left:
        paths = RunPaths(left.pop())
        try:
            is_run = any(path.exists() for path in (paths.metrics, paths.environment, paths.snapshots))
            inside = sorted(path for path in paths.root.iterdir() if path.is_dir() and not path.is_symlink())
        except OSError:  # not readable, or its path is too long
            continue
        if is_run:
            yield paths.root
        else:
            left += (path for path in reversed(inside) if not path.name.startswith((".", ABANDONED_FOLDER)))


def _row(found: Path, folder: Path, known: KnownRuns) -> RunSummary:
    state = _state(RunPaths(found))
    if found not in known or known[found][0] != state:
        known[found] = state, _read_row(found, folder)
    return known[found][1]


def _state(paths: RunPaths) -> object:
    """Returns what changes when the results of a run change."""
    try:
        entries = [path.stat() for path in (paths.metrics, paths.root, paths.snapshots)]
        return [(one.st_mtime_ns, one.st_size) for one in entries], paths.final.exists(), is_locked(paths)
    except (ConfigError, OSError):
        return object()  # unequal to every other state


def _read_row(found: Path, folder: Path) -> RunSummary:
    name = found.absolute().name if found == folder else str(found.relative_to(folder))
    row = RunSummary(name, str(found))
    try:
        row = replace(row, size_bytes=size_bytes(found))
        record = RunRecord.open(found)
        moment = changed_settings(record)
        return replace(
            summarize(record, is_locked(record.paths)),
            name=name,
            path=row.path,
            size_bytes=row.size_bytes,
            changed=moment.isoformat(timespec="seconds") if moment else None,
            problem=record.problem,
        )
    except (ConfigError, OSError) as error:
        return replace(row, problem=" ".join(str(error).split()))
