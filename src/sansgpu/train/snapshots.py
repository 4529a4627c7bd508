"""Snapshots: written atomically, and loaded without running code from them.

A snapshot is a folder `step-000500` with weights and optimizer moments as safetensors, everything else as JSON, and
MANIFEST.json with the SHA-256 of each file. It is written to a temporary folder, synced to disk and renamed.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import BaseModel, ConfigDict, Field

from sansgpu.config import ConfigError, SansGPUError
from sansgpu.config.plain_data import InvalidDataError
from sansgpu.events.progress import Warn
from sansgpu.events.schema import Count, Plain
from sansgpu.files.atomic import delete_abandoned, make_folder, sync_to_disk
from sansgpu.files.folders import delete_folder
from sansgpu.files.reading import read_validated
from sansgpu.machine.disk import file_sha256
from sansgpu.machine.execution import Environment
from sansgpu.models.formats.safetensors_file import GatherTensor, load_weights, open_weights, save_tensors, unchanged
from sansgpu.tasks.task import Sums, add_sums

WEIGHTS, MOMENTS, STATE, MANIFEST = "model.safetensors", "optimizer.safetensors", "state.json", "MANIFEST.json"
LOSS, TARGETS = "summed loss", "number of targets"  # a task's sums have names without spaces
TIME_DEPENDENT_KEY = "total_steps"  # the key of `progress` that depends on the time left, not on what was learned
_NAME = re.compile(r"step-([0-9]{6,18})")
_LEFTOVER = re.compile(r"\.(step-[0-9]{6,18})\.(?:partial|replaced|deleted)")
_MAX_STEP_DIGITS = 18

Metrics = dict[str, float | None]  # results of an evaluation; None replaces a non-finite value
# A saved loss may be NaN, which Python's JSON can express.
_Loss = Annotated[float, Field(allow_inf_nan=True)]


class Progress(BaseModel):
    """The counters of a run and its best validation loss, saved in state.json."""

    model_config = ConfigDict(strict=True)

    step: Count = 0
    tokens: Count = 0
    total_steps: Count | None = None  # estimated from the remaining time if the run is time-limited
    best_loss: _Loss | None = None
    best_step: Count | None = None
    evaluations_since_best: Count = 0  # in a row, each with a higher loss than the best or one that is not finite
    logged_loss: _Loss = 0.0  # loss sum since the last step event
    logged_targets: Count = 0
    logged_sums: Sums = {}  # the task's sums since the last step event

    def add_step(self, tokens: int) -> None:
        self.step += 1
        self.tokens += tokens

    def add_evaluation(self, loss: float | None) -> None:
        """Updates the best validation loss with that of the current step; None if it is not finite."""
        if not self.step:
            return  # untrained weights have no snapshot
        if loss is not None and (self.best_loss is None or loss < self.best_loss):
            self.best_loss, self.best_step, self.evaluations_since_best = loss, self.step, 0
        elif self.best_step is not None:
            self.evaluations_since_best += 1

    def add_logged(self, sums: Sums) -> None:
        """Adds the sums of steps: those of the task, and the ones named LOSS and TARGETS."""
        self.logged_loss += sums[LOSS]
        self.logged_targets += int(sums[TARGETS])
        add_sums(self.logged_sums, {name: value for name, value in sums.items() if name not in (LOSS, TARGETS)})


class _SnapshotFields(BaseModel):
    """A file of a snapshot. Additional fields are allowed."""

    model_config = ConfigDict(extra="allow", strict=True)


class _RecordedProgress(Progress):
    step: Count  # required
    tokens: Count


class _MetricsFields(_SnapshotFields):
    __pydantic_extra__: dict[str, _Loss | Plain]
    loss: _Loss | None = None


class SnapshotState(_SnapshotFields):
    """The content of state.json."""

    progress: _RecordedProgress
    metrics: _MetricsFields | None
    environment: Environment
    data: str


class SnapshotManifest(_SnapshotFields):
    """The content of MANIFEST.json, with the hexadecimal SHA-256 of each file."""

    step: Count
    files: dict[str, Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]]


@dataclass(frozen=True)
class Snapshot:
    """The folder of a snapshot."""

    folder: Path

    @classmethod
    def of(cls, folder: Path, step: int) -> Snapshot:
        """Returns the snapshot of `step` in `folder`; its folder need not exist."""
        return cls(folder / f"step-{step:06d}")

    @property
    def step(self) -> int:
        """The number of optimizer steps completed when the snapshot was taken."""
        return int(self.folder.name.removeprefix("step-"))

    def validation_loss(self) -> float | None:
        """Returns the validation loss at this step, or None if it was not evaluated, is not finite or is unreadable."""
        return self.validation_metric("loss")

    def validation_metric(self, name: str) -> float | None:
        """Returns a metric of the evaluation at this step, like `validation_loss`."""
        try:
            value = float((self.state()["metrics"] or {})[name])
        except (ConfigError, KeyError, TypeError):
            return None
        return value if math.isfinite(value) else None

    def manifest(self) -> dict[str, Any]:
        """Returns the content of MANIFEST.json. Raises ConfigError if it is missing or damaged."""
        return self._read(MANIFEST, SnapshotManifest)

    def _read(self, name: str, schema: type[BaseModel]) -> dict[str, Any]:
        try:
            return read_validated(self.folder / name, schema, finite=False)
        except InvalidDataError as error:
            reason = str(error)
        except OSError as error:
            reason = str(error.strerror)
        raise ConfigError(
            f"{self.folder} is not a complete snapshot: {name} cannot be read ({reason}); choose another one."
        )

    def content_id(self) -> str:
        """Returns the SHA-256 of canonical JSON with the hashes of weights and moments and the training progress.

        Equal training states have equal ids on any machine, whatever the elapsed time and the environment. Raises
        ConfigError if the snapshot is damaged.
        """
        files = self.manifest()["files"]
        learned = {key: value for key, value in self.state()["progress"].items() if key != TIME_DEPENDENT_KEY}
        if missing := {WEIGHTS, MOMENTS} - files.keys():
            raise ConfigError(
                f"{self.folder} is not a complete snapshot: {MANIFEST} does not list {min(missing)}; choose "
                "another one."
            )
        content = {"weights": files[WEIGHTS], "moments": files[MOMENTS], "progress": learned}
        text = json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
        return hashlib.sha256(text.encode()).hexdigest()

    def problem(self) -> str | None:
        """Returns a sentence about the first missing or altered file, or None if the snapshot is intact."""
        try:
            files: dict[str, Any] = self.manifest()["files"]
        except ConfigError as error:
            return str(error)
        for name in (WEIGHTS, MOMENTS, STATE):
            path = self.folder / name
            if name not in files or not path.is_file():
                return f"{path} is missing."
            if file_sha256(path) != files[name]:
                return f"{path} is damaged: its SHA-256 differs from the one in {MANIFEST}."
        return None

    def state(self) -> dict[str, Any]:
        """Returns the content of state.json. Raises ConfigError if it is missing or damaged."""
        return self._read(STATE, SnapshotState)

    def environment(self) -> Environment:
        """Returns the environment that the snapshot was made in."""
        recorded: Environment = self.state()["environment"]
        return recorded

    def shapes(self, file: str) -> dict[str, tuple[list[int], str]]:
        """Returns the shape and the safetensors dtype name of every tensor in one of the files."""
        with open_weights(self.folder / file) as tensors:
            slices = {name: tensors.get_slice(name) for name in sorted(tensors.keys())}
            return {name: (list(part.get_shape()), part.get_dtype()) for name, part in slices.items()}

    def tensors(self, file: str) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields the tensors of one of the files sorted by name, loading one at a time."""
        with open_weights(self.folder / file) as tensors:
            for name in sorted(tensors.keys()):
                yield name, tensors.get_tensor(name)

    def weights(self) -> dict[str, torch.Tensor]:
        return load_weights(self.folder / WEIGHTS)

    def size_bytes(self) -> int:
        return sum(path.stat().st_size for path in self.folder.iterdir())


def snapshots(folder: Path) -> list[Snapshot]:
    """Returns the snapshots in `folder`, oldest first, including damaged ones."""
    found = [Snapshot(p) for p in folder.glob("step-*") if p.is_dir() and _NAME.fullmatch(p.name)]
    return sorted(found, key=lambda snapshot: snapshot.step)


def latest_intact_snapshot(folder: Path, warn: Warn) -> Snapshot | None:
    """Returns the newest intact snapshot and warns about newer damaged ones; None if there are no snapshots.

    Raises ConfigError if there are snapshots but all are damaged.
    """
    found = snapshots(folder)
    for snapshot in reversed(found):
        problem = snapshot.problem()
        if problem is None:
            return snapshot
        warn(f"{problem} The snapshot is skipped.")
    if found:
        raise ConfigError(
            f"all snapshots in {folder} are damaged ({len(found)}), so the run cannot be continued; start a new run in "
            "another --output-dir, or use the model in its final/ if there is one."
        )
    return None


def best_snapshot(found: Sequence[Snapshot]) -> Snapshot | None:
    """Returns the snapshot with the lowest validation loss, the first on a tie, or None if none was evaluated."""
    scored = [(loss, snapshot) for snapshot in found if (loss := snapshot.validation_loss()) is not None]
    return min(scored, key=lambda pair: pair[0])[1] if scored else None


def find_snapshot(folder: Path, name: str, warn: Warn) -> Snapshot | None:
    """Returns the snapshot that `name` selects: `latest`, `best`, a step, a name in `folder`, or a path.

    Returns None for `latest` if there are no snapshots. Raises ConfigError if the snapshot does not exist or is
    damaged.
    """
    if name == "latest":
        return latest_intact_snapshot(folder, warn)
    if name == "best":
        best = best_snapshot(snapshots(folder))
        if best is None:
            raise ConfigError(f"no snapshot in {folder} has a validation loss, so there is no best one; choose latest.")
        chosen = best.folder
    elif name.isdecimal() and len(name) <= _MAX_STEP_DIGITS:
        chosen = Snapshot.of(folder, int(name)).folder
    else:
        chosen = folder / name if (folder / name).is_dir() else Path(name)
    if not chosen.is_dir() or not _NAME.fullmatch(chosen.name):
        known = ", ".join(s.folder.name for s in snapshots(folder)) or "none"
        raise ConfigError(f"there is no snapshot {name}; {folder} contains {known}.")
    snapshot = Snapshot(chosen)
    if problem := snapshot.problem():
        raise ConfigError(problem)
    return snapshot


def save_snapshot(
    folder: Path,
    step: int,
    weights: dict[str, torch.Tensor],
    moments: dict[str, torch.Tensor],
    state: dict[str, Any],
    record: Path,
    gather: GatherTensor = unchanged,
) -> Snapshot:
    """Writes `folder`/step-N. Raises SansGPUError if that fails; an existing snapshot then stays in place.

    `gather` is called for each tensor when it is written, so `weights` and `moments` may hold only shapes and dtypes.
    The metrics file `record` is synced first if it exists, so that the disk has a snapshot's metrics, too.
    """
    final = Snapshot.of(folder, step).folder
    partial, replaced = final.with_name(f".{final.name}.partial"), final.with_name(f".{final.name}.replaced")
    try:
        make_folder(folder)
        delete_folder(partial)
        partial.mkdir()
        files = {file: save_tensors(t, partial / file, gather) for file, t in ((WEIGHTS, weights), (MOMENTS, moments))}
        (partial / STATE).write_text(json.dumps(state, indent=2) + "\n", encoding="utf-8")
        files[STATE] = file_sha256(partial / STATE)
        (partial / MANIFEST).write_text(json.dumps({"step": step, "files": files}, indent=2) + "\n", encoding="utf-8")
        for path in [*partial.iterdir(), partial, *([record] if record.exists() else [])]:
            sync_to_disk(path)
        if final.exists():  # the run was resumed from an earlier step and reached this one again
            delete_folder(replaced)
            final.rename(replaced)
        partial.rename(final)
        sync_to_disk(folder)
        _delete(replaced)
    except OSError as error:
        delete_folder(partial)
        reason = error.strerror or str(error)
        raise SansGPUError(
            f"the snapshot of step {step} cannot be written to {folder}: {reason}; earlier snapshots are intact, so "
            "free some space and resume."
        ) from None
    return Snapshot(final)


def prune(folder: Path, keep_last: int, keep: Collection[int | None]) -> list[Snapshot]:
    """Deletes and returns all snapshots but the newest `keep_last` and those of the steps in `keep`."""
    return _delete_all(s for s in snapshots(folder)[:-keep_last] if s.step not in keep)


def delete_snapshots(folder: Path) -> None:
    """Deletes all snapshots in `folder`, and the folder if nothing else is in it."""
    clear_leftovers(folder)
    _delete_all(snapshots(folder))
    with contextlib.suppress(OSError):  # not there, or not empty
        folder.rmdir()


def _delete_all(doomed: Iterable[Snapshot]) -> list[Snapshot]:
    """Deletes snapshots, except symlinks to folders, and returns the deleted ones."""
    deleted = [snapshot for snapshot in doomed if not snapshot.folder.is_symlink()]
    for snapshot in deleted:
        trash = snapshot.folder.with_name(f".{snapshot.folder.name}.deleted")
        snapshot.folder.rename(trash)  # a partly deleted folder must not look like a snapshot
        _delete(trash)
    return deleted


def _delete(folder: Path) -> None:
    """Deletes the files of a snapshot and moves files that users added to the sibling folder `step-N.notes`."""
    with contextlib.suppress(OSError):
        for name in (WEIGHTS, MOMENTS, STATE, MANIFEST):
            (folder / name).unlink(missing_ok=True)
        move_to_notes(folder, _LEFTOVER.sub(r"\1", folder.name))


def move_to_notes(folder: Path, name: str) -> None:
    """Moves what is left in `folder` to the sibling folder `NAME.notes`, and deletes `folder`. Raises OSError."""
    notes = folder.with_name(f"{name}.notes")
    for path in folder.iterdir():
        notes.mkdir(exist_ok=True)
        if not os.path.lexists(notes / path.name):
            path.rename(notes / path.name)
    folder.rmdir()


def clear_leftovers(folder: Path) -> None:
    """Deletes partly written or partly deleted folders of a killed process and restores a snapshot being replaced."""
    if folder.is_dir():
        delete_abandoned(folder)
    for path in sorted(folder.glob(".step-*")):
        if (match := _LEFTOVER.fullmatch(path.name)) is None or path.is_symlink():
            continue
        if path.suffix == ".replaced" and not (place := path.with_name(match[1])).exists():
            path.rename(place)
        else:
            _delete(path)
