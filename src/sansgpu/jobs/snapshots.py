"""Lists, shows, verifies, prunes and forks a run's snapshots."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from sansgpu.config import ConfigError, RunPaths, SansGPUError, save_config
from sansgpu.config.tasks import Metric
from sansgpu.events.jsonl import MetricsFile
from sansgpu.events.progress import Warn
from sansgpu.files.atomic import make_folder, scratch_folder, write_failures_as
from sansgpu.files.folders import copy_folder
from sansgpu.files.marks import MARK
from sansgpu.files.ownership import OutputFolder, is_locked
from sansgpu.tasks.configuration import load_config
from sansgpu.train.branches import all_snapshots, ancestors, branches, finish_pending_moves, record_of
from sansgpu.train.loading import require_snapshot
from sansgpu.train.run_folders import mark_run, open_run, recorded_file, require_own_snapshots
from sansgpu.train.snapshots import Snapshot, best_snapshot, clear_leftovers, prune, snapshots


def list_snapshots(run: Path) -> list[dict[str, Any]]:
    """Returns step, main validation metric and size of every snapshot; abandoned branches come last."""
    config, paths = open_run(run)
    best = best_snapshot(snapshots(paths.snapshots))
    found = all_snapshots(paths.snapshots)
    metric = config.settings.main_metric
    return [{**_row(snapshot, paths.snapshots, metric), "best": snapshot == best} for snapshot in found]


def _name(snapshot: Snapshot, folder: Path) -> str:
    """Returns the snapshot's name on the command line: its path below `snapshots/`."""
    return str(snapshot.folder.relative_to(folder))


def _row(snapshot: Snapshot, folder: Path, metric: Metric) -> dict[str, Any]:
    row: dict[str, Any] = {"name": _name(snapshot, folder), "step": snapshot.step, "tokens": None}
    value = snapshot.validation_metric(metric.name)
    row |= {"loss": snapshot.validation_loss(), "main_metric": {"name": metric.label, "value": value}}
    row["abandoned"] = snapshot.folder.parent != folder
    try:
        row["tokens"] = snapshot.state()["progress"]["tokens"]
        row["content_id"] = snapshot.content_id()
    except ConfigError:
        row["torn"] = True
    return row | {"bytes": snapshot.size_bytes()}


def show_snapshot(run: Path, name: str, warn: Warn) -> dict[str, Any]:
    snapshot = require_snapshot(run, *open_run(run), name, warn)
    known = {"name": snapshot.folder.name, "content_id": snapshot.content_id(), "bytes": snapshot.size_bytes()}
    return {**known, **snapshot.manifest(), **snapshot.state()}


def verify_snapshots(run: Path) -> list[tuple[str, str | None]]:
    """Returns (name, problem) of each snapshot; the problem is None if the snapshot is intact."""
    _, paths = open_run(run)
    return [(_name(found, paths.snapshots), found.problem()) for found in all_snapshots(paths.snapshots)]


def prune_snapshots(run: Path, keep_last: int | None, abandoned: bool = False) -> list[str]:
    """Deletes all but the best and the newest `keep_last` snapshots (None: keeps all), and returns the deleted names.

    With `abandoned`, deletes all abandoned branches, too.
    """
    if keep_last is not None and keep_last < 1:
        raise ConfigError(f"--keep-last {keep_last} would delete every snapshot; keep at least 1.")
    _, paths = open_run(run)
    require_own_snapshots(paths)
    if not is_locked(paths):  # a training process may still be writing what looks like leftovers
        finish_pending_moves(paths)
        clear_leftovers(paths.snapshots)
    deleted: list[str] = []
    for branch in branches(paths.snapshots) if abandoned else []:
        deleted += [_name(snapshot, paths.snapshots) for snapshot in branch.snapshots()]
        branch.delete()
    if keep_last is not None:
        best = best_snapshot(snapshots(paths.snapshots))
        deleted += [s.folder.name for s in prune(paths.snapshots, keep_last, keep=(best.step,) if best else ())]
    return deleted


def fork_snapshot(run: Path, name: str, output: Path, warn: Warn) -> Path:
    """Creates a new run from a copy of one snapshot, to be resumed with other settings.

    Also copies the best snapshot up to that step.
    """
    config, paths = open_run(run)
    snapshot = require_snapshot(run, config, paths, name, warn)
    if OutputFolder(output, "run").require().is_own:
        raise ConfigError(f"{output} already contains a run; choose another --output-dir.")
    file = recorded_file(run, str(snapshot.folder))
    assert file is not None  # open_run requires one
    config, _ = load_config(file, find_beside=False)
    config = config.with_values("training", checkpoint_dir=None, logging_dir=None)
    with write_failures_as(SansGPUError, output):
        best = best_snapshot(ancestors(snapshot, paths.snapshots))
        make_folder(output.parent)
        with scratch_folder(output.parent, is_folder=True) as new:
            forked = RunPaths(new)
            for copied in {snapshot.step: snapshot, **({best.step: best} if best else {})}.values():
                copy_folder(copied.folder, forked.snapshots / copied.folder.name)
            with OutputFolder(forked.tokenizer, "tokenizer").replace() as tokenizer:
                copy_folder(paths.tokenizer, tokenizer, without=MARK)
            shutil.copy2(paths.environment, forked.environment)
            shutil.copy2(record_of(snapshot, paths), forked.metrics)
            MetricsFile(forked.metrics, snapshot.step).close()
            mark_run(forked, config)
            save_config(config, forked.config)
            if output.exists():
                for path in sorted(new.iterdir()):  # `.sansgpu.json` comes first
                    path.rename(output / path.name)
            else:
                new.rename(output)
    return output
