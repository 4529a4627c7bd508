"""`sansgpu snapshots`: list, show, verify, prune, fork."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sansgpu.config import ConfigError, RunPaths, SansGPUError, save_config
from sansgpu.jobs.claims import claim_run
from sansgpu.jobs.folders import open_run, recorded_config
from sansgpu.jobs.loading import run_snapshot
from sansgpu.train.checkpoint import Snapshot, clear_leftovers, prune, snapshots
from sansgpu.watch.files import make_folder, scratch
from sansgpu.watch.jsonl import Metrics
from sansgpu.watch.marks import MARK, read_mark
from sansgpu.watch.outputs import filled_folder, require_folder
from sansgpu.watch.unmarked import is_unmarked


def list_snapshots(run: Path) -> list[dict[str, Any]]:
    """Every snapshot with its step, validation loss and size, and which one is the best so far."""
    _, paths = open_run(run)
    rows = [_row(snapshot) for snapshot in snapshots(paths.snapshots)]
    scored = [row for row in rows if row["loss"] is not None]
    best = min(scored, key=lambda row: float(row["loss"]), default=None)
    return [{**row, "best": row is best} for row in rows]


def _row(snapshot: Snapshot) -> dict[str, Any]:
    row: dict[str, Any] = {"name": snapshot.folder.name, "step": snapshot.step, "loss": None, "tokens": None}
    try:
        state = snapshot.state()
        row |= {"loss": (state["metrics"] or {}).get("loss"), "tokens": state["progress"]["tokens"]}
        row["content_id"] = snapshot.content_id()
    except ConfigError:
        row["torn"] = True
    return row | {"bytes": snapshot.size_bytes()}


def show_snapshot(run: Path, name: str, warn: Callable[[str], None]) -> dict[str, Any]:
    """All a snapshot holds but its tensors."""
    _, snapshot = run_snapshot(run, name, warn)
    known = {"name": snapshot.folder.name, "content_id": snapshot.content_id(), "bytes": snapshot.size_bytes()}
    return {**known, **snapshot.manifest(), **snapshot.state()}


def verify_snapshots(run: Path) -> list[tuple[str, str | None]]:
    """Each snapshot's name and what is torn or altered in it, None where it is whole."""
    _, paths = open_run(run)
    return [(snapshot.folder.name, snapshot.problem()) for snapshot in snapshots(paths.snapshots)]


def prune_snapshots(run: Path, keep_last: int) -> list[str]:
    """Delete all but the newest `keep_last` and the best; returns the names of what was deleted."""
    if keep_last < 1:
        raise ConfigError(f"--keep-last {keep_last} would delete every snapshot; keep at least 1.")
    _, paths = open_run(run)
    clear_leftovers(paths.snapshots)
    best = next((row["step"] for row in list_snapshots(run) if row["best"]), None)
    return [snapshot.folder.name for snapshot in prune(paths.snapshots, keep_last, best)]


def fork_snapshot(run: Path, name: str, output: Path, warn: Callable[[str], None]) -> Path:
    """A new run that begins as a copy of `run` at one snapshot; resume it with other settings."""
    _, snapshot = run_snapshot(run, name, warn)
    require_folder(output, "run")
    if read_mark(output) or is_unmarked(output, "run"):
        raise ConfigError(f"{output} holds a run already; fork into a new folder.")
    _, paths = open_run(run)
    config = recorded_config(run)
    here = config.training.model_copy(update={"checkpoint_dir": None, "logging_dir": None})
    config = config.model_copy(update={"training": here})
    try:
        make_folder(output.parent)
        with scratch(output.parent, is_folder=True) as new:
            forked = RunPaths(new)
            shutil.copytree(snapshot.folder, forked.snapshots / snapshot.folder.name)
            with filled_folder(forked.tokenizer, "tokenizer") as tokenizer:
                shutil.copytree(paths.tokenizer, tokenizer, ignore=shutil.ignore_patterns(MARK), dirs_exist_ok=True)
            for file, copy in ((paths.environment, forked.environment), (paths.metrics, forked.metrics)):
                shutil.copy2(file, copy)
            Metrics(forked.metrics, snapshot.step).close()
            claim_run(forked, config)
            save_config(config, forked.config)
            if output.exists():
                for path in sorted(new.iterdir()):  # the mark first
                    path.rename(output / path.name)
            else:
                new.rename(output)
    except OSError as error:
        raise SansGPUError(f"{output} cannot be written: {error.strerror or error}.") from None
    return output
