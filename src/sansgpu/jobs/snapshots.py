"""`sansgpu snapshots`: list, show, verify, prune, fork."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sansgpu.config import ConfigError, SansGPUError
from sansgpu.jobs.folders import open_run, run_paths
from sansgpu.jobs.loading import run_snapshot
from sansgpu.train.checkpoint import Snapshot, clear_leftovers, prune, snapshots
from sansgpu.watch.jsonl import Metrics


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
    if output.exists():
        raise ConfigError(f"{output} exists; fork into a new folder.")
    paths, forked = open_run(run)[1], run_paths(output)
    partial = output.with_name(output.name + ".partial")
    try:
        shutil.rmtree(partial, ignore_errors=True)
        shutil.copytree(snapshot.folder, partial / "snapshots" / snapshot.folder.name)
        shutil.copytree(paths.tokenizer, partial / forked.tokenizer.name)
        for file in (paths.config, paths.environment, paths.metrics):
            shutil.copy2(file, partial / file.name)
        Metrics(partial / paths.metrics.name, snapshot.step).close()
        partial.rename(output)
    except OSError as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise SansGPUError(f"{output} cannot be written: {error.strerror or error}.") from None
    return output
