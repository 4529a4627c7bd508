"""Abandoned branches: snapshots that a run took after the step from which it was later resumed.

Resuming from step 200 moves every later snapshot from `snapshots/` into `snapshots/abandoned-from-step-000200/`, next
to copies of metrics.jsonl and config.yaml. Resuming from one of those moves it back, and the snapshots that replaced it
are abandoned in turn. The step in the folder's name is the last one that the branch shares with the run's current
snapshots.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from sansgpu.config import ABANDONED_FOLDER, ConfigError, RunPaths, SansGPUError
from sansgpu.files.atomic import sync_to_disk, write_text
from sansgpu.train.snapshots import Snapshot, delete_snapshots, move_to_notes, snapshots

JOURNAL = ".moves.json"  # planned moves; if this process is killed, the next one finishes them
_FOLDER = rf"{ABANDONED_FOLDER}(\d{{6,}})(?:-(\d+))?"
_BRANCH = re.compile(_FOLDER)
_STEP = r"step-\d{6,}"
_MOVABLE = re.compile(rf"{_STEP}|\.{_FOLDER}\.partial|{_FOLDER}(/{_STEP})?")


@dataclass(frozen=True)
class Branch:
    """The folder of an abandoned branch."""

    folder: Path

    @property
    def _key(self) -> tuple[int, int]:
        step, number = _BRANCH.fullmatch(self.folder.name).groups()  # type: ignore[union-attr]  # `branches` matched it
        return int(step), int(number or 1)

    @property
    def step(self) -> int:
        """The step from which the run was resumed."""
        return self._key[0]

    @property
    def record(self) -> Path:
        """Path of the branch's metrics.jsonl, copied when the branch was abandoned."""
        return RunPaths(self.folder).metrics

    def snapshots(self) -> list[Snapshot]:
        """Returns the branch's snapshots, oldest first."""
        return snapshots(self.folder)

    def delete(self) -> None:
        """Deletes the branch with its snapshots. Files that users added move to the sibling folder `NAME.notes`.

        Raises SansGPUError if the file system refuses.
        """
        trash = self.folder.with_name(f".{self.folder.name}.partial")
        try:
            self.folder.rename(trash)
        except OSError as error:
            raise SansGPUError(
                f"{self.folder} cannot be deleted: {error.strerror}; check the permissions of its parent folder."
            ) from None
        _discard(trash)


def branches(folder: Path) -> list[Branch]:
    """Returns the abandoned branches in a run's `snapshots/` folder, ordered by step."""
    found = [Branch(p) for p in folder.glob(f"{ABANDONED_FOLDER}*") if _BRANCH.fullmatch(p.name)]
    real = [branch for branch in found if branch.folder.is_dir() and not branch.folder.is_symlink()]
    return sorted(real, key=lambda branch: branch._key)


def all_snapshots(folder: Path) -> list[Snapshot]:
    """Returns the snapshots in `folder` followed by those of its abandoned branches."""
    return [*snapshots(folder), *(s for branch in branches(folder) for s in branch.snapshots())]


def branch_of(snapshot: Snapshot, folder: Path) -> Branch | None:
    """Returns the branch that contains the snapshot, or None if the snapshot is not in an abandoned branch."""
    parent = snapshot.folder.absolute().parent
    return next((branch for branch in branches(folder) if branch.folder.absolute() == parent), None)


def ancestors(snapshot: Snapshot, folder: Path) -> list[Snapshot]:
    """Returns the snapshots that precede `snapshot` in its training history, itself included, oldest first."""
    branch = branch_of(snapshot, folder)
    trunk = [s for s in snapshots(folder) if s.step <= (branch.step if branch else snapshot.step)]
    return trunk + [s for s in (branch.snapshots() if branch else []) if s.step <= snapshot.step]


def record_of(snapshot: Snapshot, paths: RunPaths) -> Path:
    """Returns the path of the metrics.jsonl that records the training up to the snapshot."""
    branch = branch_of(snapshot, paths.snapshots)
    return branch.record if branch else paths.metrics


def switch_to(snapshot: Snapshot, paths: RunPaths) -> tuple[Snapshot, list[Path]]:
    """Makes `snapshot` the newest in `snapshots/` and moves the snapshots that are not its ancestors into a branch.

    Returns the snapshot at its new path and the folders of newly abandoned branches. If the process is killed, either
    nothing has moved, or `finish_pending_moves` completes the moves. Raises SansGPUError if the file system refuses.
    """
    folder, home = paths.snapshots, branch_of(snapshot, paths.snapshots)
    base = home.step if home else snapshot.step
    taken = {branch.folder.name for branch in branches(folder)}
    moves: list[tuple[str, str]] = []
    abandoned = []
    if leaving := [s.folder.name for s in snapshots(folder) if s.step > base]:
        name = _free_name(base, taken)
        moves = [(f".{name}.partial", name), *((step, f"{name}/{step}") for step in leaving)]
        abandoned.append(folder / name)
    for branch in branches(folder):  # branches that start from a snapshot abandoned now
        if branch.step > base and branch != home:
            moves.append((branch.folder.name, _free_name(base, taken)))
    if home:
        steps = home.snapshots()
        moves += [(f"{home.folder.name}/{s.folder.name}", s.folder.name) for s in steps if s.step <= snapshot.step]
        if steps[-1].step > snapshot.step and snapshot.step != home.step:
            moves.append((home.folder.name, _free_name(snapshot.step, taken)))
    if moves:
        try:
            if leaving:
                _copy_files(folder / moves[0][0], _own_files(paths.root))
            own_files = _own_files(home.folder) if home else []
            texts = {file.name: file.read_bytes().decode() for file in own_files if file.is_file()}
            write_text(folder / JOURNAL, json.dumps({"moves": moves, "texts": texts}) + "\n")
        except OSError as error:
            raise SansGPUError(
                f"the snapshots after step {base} cannot be moved to {folder}: {error.strerror or error}; nothing was "
                "moved, so free some space and resume."
            ) from None
    finish_pending_moves(paths)
    return Snapshot.of(folder, snapshot.step) if home else snapshot, abandoned


def finish_pending_moves(paths: RunPaths) -> None:
    """Completes the moves that an earlier process planned and deletes its partial folders.

    Raises ConfigError if the list of moves was not written by this program, SansGPUError if a move fails.
    """
    folder, journal = paths.snapshots, paths.snapshots / JOURNAL
    try:
        if journal.is_file():
            moves, texts = _read_journal(journal)
            for source, target in moves:
                if (folder / source).exists() and not (folder / target).exists():
                    (folder / source).rename(folder / target)
            for changed in [*(branch.folder for branch in branches(folder)), folder]:
                sync_to_disk(changed)
            for file in _own_files(paths.root):
                if file.name in texts:
                    write_text(file, texts[file.name])
            for branch in branches(folder):
                if not branch.snapshots():
                    branch.delete()
            journal.unlink()
            sync_to_disk(folder)
    except OSError as error:
        raise SansGPUError(
            f"the snapshots in {folder} cannot be moved: {error.strerror or error}; none is lost, so free some space "
            "and run train --resume again to finish."
        ) from None
    for path in folder.glob(f".{ABANDONED_FOLDER}*.partial"):
        if re.fullmatch(rf"\.{_FOLDER}\.partial", path.name) and not path.is_symlink():
            _discard(path)


def _read_journal(journal: Path) -> tuple[Sequence[tuple[str, str]], dict[str, str]]:
    """Returns moves as pairs of names relative to `snapshots/`, and the new contents of changed run files by name."""
    try:
        found = json.loads(journal.read_text(encoding="utf-8"))
        moves, texts = [(str(source), str(target)) for source, target in found["moves"]], dict(found["texts"])
        known = (
            all(_MOVABLE.fullmatch(name) for move in moves for name in move)
            and not any((journal.parent / name.partition("/")[0]).is_symlink() for move in moves for name in move)
            and all(isinstance(text, str) for text in texts.values())
        )
    except (ValueError, KeyError, TypeError, RecursionError):
        known = False
    if not known:
        raise ConfigError(f"{journal} was not written by sansgpu; delete it.")
    return moves, texts


def _own_files(folder: Path) -> list[Path]:
    """Returns the paths of the files of which a run and each of its branches have their own version."""
    return [RunPaths(folder).metrics, RunPaths(folder).config]


def _copy_files(folder: Path, files: Iterable[Path]) -> None:
    """Copies the existing files among `files` into a new folder."""
    _discard(folder)
    folder.mkdir()
    for file in files:
        if file.is_file():
            (folder / file.name).write_bytes(file.read_bytes())
            sync_to_disk(folder / file.name)
    sync_to_disk(folder)


def _discard(folder: Path) -> None:
    """Deletes the files of the partly written or deleted branch `.NAME.partial`; others move to `NAME.notes`."""
    with contextlib.suppress(OSError):
        for file in _own_files(folder):
            file.unlink(missing_ok=True)
        delete_snapshots(folder)
        if folder.exists():
            move_to_notes(folder, folder.name.removeprefix(".").removesuffix(".partial"))


def _free_name(step: int, taken: set[str]) -> str:
    """Returns an unused branch name and adds it to `taken`."""
    name, number = f"{ABANDONED_FOLDER}{step:06d}", 1
    while name in taken:
        number += 1
        name = f"{ABANDONED_FOLDER}{step:06d}-{number}"
    taken.add(name)
    return name
