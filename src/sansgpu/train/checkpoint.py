"""Snapshots: all or nothing, and nothing in them can run code.

A snapshot is a folder `step-000500` with weights and moments as safetensors, the rest as JSON, and MANIFEST.json
with the SHA-256 of each. It is written beside its place, synced to disk and renamed.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import re
import shutil
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel
from safetensors import safe_open

from sansgpu.config import ConfigError, SansGPUError
from sansgpu.config.plain import FlawError, read_json
from sansgpu.machine.disk import file_sha256
from sansgpu.models.weights_file import load_weights, readable_weights
from sansgpu.train.snapshot_schema import Manifest, State
from sansgpu.train.tensor_file import Whole, as_it_is, save_tensors
from sansgpu.watch.files import make_folder, sync_to_disk

WEIGHTS, MOMENTS, STATE, MANIFEST = "model.safetensors", "optimizer.safetensors", "state.json", "MANIFEST.json"
LAID = "total_steps"  # of the progress, what time has to do with: steps as laid over what is left of it
_NAME = re.compile(r"step-([0-9]{6,18})")
_LEFTOVER = re.compile(r"\.(step-[0-9]{6,18})\.(?:partial|replaced|deleted)")
_MOST_DIGITS = 18  # of a step


@dataclass(frozen=True)
class Snapshot:
    """One snapshot's folder."""

    folder: Path

    @classmethod
    def of(cls, folder: Path, step: int) -> Snapshot:
        """That of `step` among the snapshots in `folder`, whether or not it is there."""
        return cls(folder / f"step-{step:06d}")

    @property
    def step(self) -> int:
        """The step it was taken after."""
        return int(self.folder.name.removeprefix("step-"))

    def validation_loss(self) -> float | None:
        """The loss of the evaluation after its step; None if there was none, it is not finite or cannot be read."""
        try:
            loss = float((self.state()["metrics"] or {})["loss"])
        except (ConfigError, KeyError, TypeError):
            return None
        return loss if math.isfinite(loss) else None

    def manifest(self) -> dict[str, Any]:
        """MANIFEST.json. Raises ConfigError where it is missing or torn."""
        return self._read(MANIFEST, Manifest)

    def _read(self, name: str, schema: type[BaseModel]) -> dict[str, Any]:
        try:
            return read_json(self.folder / name, schema, finite=False)
        except FlawError as error:
            reason = str(error)
        except OSError as error:
            reason = str(error.strerror)
        raise ConfigError(f"{self.folder} is no whole snapshot: {name} cannot be read: {reason}.")

    def content_id(self) -> str:
        """SHA-256 of what was learned: the hashes of weights and moments, and how far the run is, as canonical JSON.

        Equal states have equal ids on any machine: neither the time taken nor the environment is part of it. Raises
        ConfigError where the snapshot is torn.
        """
        files = self.manifest()["files"]
        learned = {key: value for key, value in self.state()["progress"].items() if key != LAID}
        if missing := {WEIGHTS, MOMENTS} - files.keys():
            raise ConfigError(f"{self.folder} is no whole snapshot: {MANIFEST} names no {min(missing)}.")
        content = {"weights": files[WEIGHTS], "moments": files[MOMENTS], "progress": learned}
        text = json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
        return hashlib.sha256(text.encode()).hexdigest()

    def problem(self) -> str | None:
        """What is torn or altered, or None."""
        try:
            files: dict[str, Any] = self.manifest()["files"]
        except ConfigError as error:
            return str(error)
        for name in (WEIGHTS, MOMENTS, STATE):
            path = self.folder / name
            if name not in files or not path.is_file():
                return f"{path} is missing."
            if file_sha256(path) != files[name]:
                return f"{path} was altered: its SHA-256 is not the manifest's."
        return None

    def state(self) -> dict[str, Any]:
        """state.json. Raises ConfigError where it is missing or torn."""
        return self._read(STATE, State)

    def shapes(self, file: str) -> dict[str, tuple[list[int], str]]:
        """Shape and safetensors' name for the type of every tensor in one of the files."""
        with readable_weights(self.folder / file), safe_open(self.folder / file, "pt") as tensors:
            slices = {name: tensors.get_slice(name) for name in sorted(tensors.keys())}
            return {name: (list(part.get_shape()), part.get_dtype()) for name, part in slices.items()}

    def tensors(self, file: str) -> Iterator[tuple[str, torch.Tensor]]:
        """Every tensor of one of the files, in the order of their names, one at a time in memory."""
        with readable_weights(self.folder / file), safe_open(self.folder / file, "pt") as tensors:
            for name in sorted(tensors.keys()):
                yield name, tensors.get_tensor(name)

    def weights(self) -> dict[str, torch.Tensor]:
        """The model's weights."""
        return load_weights(self.folder / WEIGHTS)

    def size_bytes(self) -> int:
        """Its size on disk."""
        return sum(path.stat().st_size for path in self.folder.iterdir())


def snapshots(folder: Path) -> list[Snapshot]:
    """The snapshots in `folder`, oldest first, whole or not."""
    found = [Snapshot(p) for p in folder.glob("step-*") if p.is_dir() and _NAME.fullmatch(p.name)]
    return sorted(found, key=lambda snapshot: snapshot.step)


def newest_whole(folder: Path, warn: Callable[[str], None]) -> Snapshot | None:
    """The newest snapshot that is whole; newer ones that are not are named to `warn`.

    Raises ConfigError where there are snapshots but none is whole.
    """
    found = snapshots(folder)
    for snapshot in reversed(found):
        problem = snapshot.problem()
        if problem is None:
            return snapshot
        warn(f"{problem} It is skipped.")
    if found:
        raise ConfigError(f"none of the {len(found)} snapshots in {folder} is whole; there is nothing to resume from.")
    return None


def best_of(found: Sequence[Snapshot]) -> Snapshot | None:
    """The snapshot with the lowest validation loss, the first of equal ones; None if none was evaluated."""
    scored = [(loss, snapshot) for snapshot in found if (loss := snapshot.validation_loss()) is not None]
    return min(scored, key=lambda pair: pair[0])[1] if scored else None


def find_snapshot(folder: Path, name: str, warn: Callable[[str], None]) -> Snapshot | None:
    """The snapshot called `name`: `latest` (None if there is none yet), `best`, a step, a name in `folder`, or a path.

    Raises ConfigError if it does not exist or is not whole.
    """
    if name == "latest":
        return newest_whole(folder, warn)
    if name == "best":
        best = best_of(snapshots(folder))
        if best is None:
            raise ConfigError(f"{folder} has no snapshot that was evaluated, so none is the best; choose latest.")
        chosen = best.folder
    elif name.isdecimal() and len(name) <= _MOST_DIGITS:
        chosen = Snapshot.of(folder, int(name)).folder
    else:
        chosen = folder / name if (folder / name).is_dir() else Path(name)
    if not chosen.is_dir() or not _NAME.fullmatch(chosen.name):
        known = ", ".join(s.folder.name for s in snapshots(folder)) or "none"
        raise ConfigError(f"there is no snapshot {name}; {folder} has {known}.")
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
    whole: Whole = as_it_is,
) -> Snapshot:
    """Write `folder`/step-N. Raises SansGPUError where the disk refuses; what was there before stays.

    `whole` is asked for each tensor, where weights and moments only tell shapes and types. The run's `record`, where it
    is there, is synced first: who finds the snapshot finds the lines up to its step.
    """
    final = Snapshot.of(folder, step).folder
    partial, replaced = final.with_name(f".{final.name}.partial"), final.with_name(f".{final.name}.replaced")
    try:
        make_folder(folder)
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        files = {file: save_tensors(t, partial / file, whole) for file, t in ((WEIGHTS, weights), (MOMENTS, moments))}
        (partial / STATE).write_text(json.dumps(state, indent=2) + "\n", encoding="utf-8")
        files[STATE] = file_sha256(partial / STATE)
        (partial / MANIFEST).write_text(json.dumps({"step": step, "files": files}, indent=2) + "\n", encoding="utf-8")
        for path in [*partial.iterdir(), partial, *([record] if record.exists() else [])]:
            sync_to_disk(path)
        if final.exists():  # the same step again, after a resume from an earlier one
            shutil.rmtree(replaced, ignore_errors=True)
            final.rename(replaced)
        partial.rename(final)
        sync_to_disk(folder)
        _delete(replaced)
    except OSError as error:
        shutil.rmtree(partial, ignore_errors=True)
        reason = error.strerror or str(error)
        raise SansGPUError(
            f"the snapshot of step {step} cannot be written to {folder}: {reason}; earlier snapshots are untouched: "
            "free some space and resume."
        ) from None
    return Snapshot(final)


def prune(folder: Path, keep_last: int, keep: Collection[int | None]) -> list[Snapshot]:
    """Delete all but the newest `keep_last` snapshots and those of the steps in `keep`; returns what was deleted."""
    doomed = [s for s in snapshots(folder)[:-keep_last] if s.step not in keep and not s.folder.is_symlink()]
    for snapshot in doomed:
        trash = snapshot.folder.with_name(f".{snapshot.folder.name}.deleted")
        snapshot.folder.rename(trash)  # a snapshot is there whole or not at all
        _delete(trash)
    return doomed


def delete_snapshots(folder: Path) -> None:
    """Delete all snapshots in `folder`, and the folder if nothing else is in it."""
    clear_leftovers(folder)
    for snapshot in snapshots(folder):
        if not snapshot.folder.is_symlink():
            _delete(snapshot.folder)
    with contextlib.suppress(OSError):  # not there, or not empty
        folder.rmdir()


def _delete(folder: Path) -> None:
    """Delete the files of a snapshot. What somebody else put there goes to a folder `step-N.notes` beside it."""
    notes = folder.with_name(_LEFTOVER.sub(r"\1", folder.name) + ".notes")
    with contextlib.suppress(OSError):
        for name in (WEIGHTS, MOMENTS, STATE, MANIFEST):
            (folder / name).unlink(missing_ok=True)
        for path in folder.iterdir():
            notes.mkdir(exist_ok=True)
            if not os.path.lexists(notes / path.name):
                path.rename(notes / path.name)
        folder.rmdir()


def clear_leftovers(folder: Path) -> None:
    """Delete what a killed process left half written or half deleted; a replaced snapshot is put back."""
    for path in sorted(folder.glob(".step-*")):
        if (match := _LEFTOVER.fullmatch(path.name)) is None or path.is_symlink():
            continue
        if path.suffix == ".replaced" and not (place := path.with_name(match[1])).exists():
            path.rename(place)
        else:
            _delete(path)
