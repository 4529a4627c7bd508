"""Output folders and files: whose they are, and how to write them without losing a user's file.

A folder is written to only if it is new, empty, or marked as the same kind of output. Of its files, only unchanged ones
that the mark lists are replaced or deleted. A single file is written only if it is new, empty, or recognized as an
output of sansgpu. Symlinks are not followed. All other cases raise ConfigError.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import errno
import os
import shutil
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

from filelock import FileLock, Timeout

from sansgpu.config import ConfigError, RunPaths
from sansgpu.files.atomic import make_folder, scratch_folder, sync_to_disk, write_failures_as, write_text
from sansgpu.files.folders import entries_below
from sansgpu.files.marks import (
    KINDS,
    MARK,
    FolderMark,
    fingerprint,
    fingerprint_of,
    has_link_in_path,
    is_copied_output,
    is_unchanged,
    read_mark,
    write_mark,
)

Files = dict[str, list[str]]  # valid fingerprints of sansgpu's files, by relative path

REPLACED_KINDS = "model", "tokenizer"  # kinds of folders that are replaced as a unit, deleting old files
LOCK = ".lock"  # an empty lock file may be left by a command that was killed before it wrote anything
PROBE_SECONDS = 0.5  # how long to wait for the lock, because `is_locked` in another process holds it for a moment
README = "README.md"  # an edited model card is not replaced
# Text near the start of files that sansgpu wrote.
HTML_SIGNATURE, GGUF_SIGNATURE = b'<meta name="generator" content="sansgpu">', b", trained with sansgpu."
_HEAD_BYTES = 1 << 16  # these strings are searched for in this many bytes at the start of a file


class OutputFolder:
    """A folder that a command writes to: which run owns it, which files are sansgpu's, and how to replace them.

    `option` is the setting that an error tells the user to change.
    """

    def __init__(self, path: Path, kind: str, option: str = "--output-dir") -> None:
        self.path, self.kind, self.option = path, kind, option
        self.mark = read_mark(path)

    @property
    def files(self) -> Files:
        return self.mark.files if self.mark else {}

    @property
    def is_own(self) -> bool:
        """True if the folder has a mark of its kind, or is a run or a search that was copied without its mark."""
        return self.mark.kind == self.kind if self.mark else is_copied_output(self.path, self.kind)

    @property
    def owner(self) -> str | None:
        """The identity of the run that the folder belongs to, by its mark or the run folder around it, or None.

        A run without an identity is identified by its path.
        """
        if self.mark and self.mark.run:
            return self.mark.run
        resolved = self.path.resolve()
        for folder in (OutputFolder(path, "run") for path in (resolved, *resolved.parents)):
            if folder.is_own:
                return (folder.mark and folder.mark.run) or str(folder.path)
        return None

    @property
    def is_used(self) -> bool:
        """True if the folder contains more than its mark."""
        return self.path.exists() and any(path.name != MARK for path in self.path.iterdir())

    def require(self) -> Self:
        """Raises ConfigError unless the folder is new, empty, or an output of its kind."""
        _require_no_link(self.path, self.option)
        if not self.path.exists():
            return self
        if not self.path.is_dir():
            raise ConfigError(f"{self.path} is a file, not a folder; choose another {self.option}.")
        if self.mark is not None and self.mark.kind != self.kind:
            raise ConfigError(
                f"{self.path} contains {KINDS[self.mark.kind]}, not {KINDS[self.kind]}; choose another {self.option}."
            )
        if self.mark is None and (other := self._first_entry()) and not self.is_own:
            raise ConfigError(
                f"{self.path} contains files that sansgpu did not write, such as {other}; choose another {self.option}."
            )
        return self

    def _first_entry(self) -> str | None:
        """Returns the name of an entry, or None if there is none except an empty lock file."""
        try:
            found = sorted(self.path.iterdir())
            others = (path for path in found if path.name != LOCK or path.is_symlink() or path.lstat().st_size)
            return next((path.name for path in others), None)
        except OSError as error:
            raise ConfigError(f"{self.path} cannot be read: {error.strerror}; choose another {self.option}.") from None

    def make(self) -> None:
        """Creates the folder. Raises ConfigError if nothing can be written there."""
        with write_failures_as(ConfigError, self.path, self.option):
            make_folder(self.path)
            with scratch_folder(self.path, is_folder=False) as probe:
                probe.write_bytes(b"x")

    def record(self, **values: Any) -> None:
        """Marks the folder as sansgpu's, and replaces fields of the mark by `values`. Raises OSError."""
        self.mark = dataclasses.replace(self.mark or FolderMark(self.kind), **values)
        write_mark(self.path, self.mark)

    def write(self, name: str, text: str) -> bool:
        """Writes a file of a marked folder. Returns False if it exists and is not an unchanged file of sansgpu.

        Raises OSError.
        """
        assert self.mark is not None, f"{self.path} has no mark"
        if self._is_taken(name):
            return False
        self.record(files={**self.files, name: [*self.files.get(name, []), fingerprint_of(text.encode())]})
        write_text(self.path / name, text)
        return True

    @contextmanager
    def replace(self) -> Iterator[Path]:
        """Yields a hidden temporary folder, whose files then replace those of the folder.

        Files of a model or a tokenizer are deleted if an earlier command wrote them and this one does not. Files that
        sansgpu did not write stay. An existing folder exists at all times, and is replaced atomically if it contains
        only files of sansgpu. File modes follow the umask. Raises ConfigError if it may not be written, and OSError.
        """
        self.mark = read_mark(self.path)  # again, because the command may have worked for hours since
        self.require()
        self.path = self.path.resolve()
        make_folder(self.path.parent)
        whole = self._is_replaceable() or not self.path.exists()
        with scratch_folder(self.path.parent if whole else self.path, is_folder=True) as new:
            yield new
            files = _complete(new, self.kind)
            if not self.path.exists():
                new.rename(self.path)
            elif self._is_replaceable() and _exchange(new, self.path):
                self._keep_late_files(new)
            else:
                self._move_in(new, files)
            sync_to_disk(self.path.parent)

    def remove(self) -> None:
        """Deletes the files that sansgpu wrote, and the folder if it is then empty. Raises OSError."""
        if self.path.is_symlink() or not self.path.is_dir():
            return
        for name in self.files:
            self._remove(name)
        if [path.name for path in self.path.iterdir()] in ([MARK], []):
            (self.path / MARK).unlink(missing_ok=True)
            self.path.rmdir()

    def _is_replaceable(self) -> bool:
        """Returns True if the folder is new, or has only sansgpu's own files and is not a mount point."""
        if not os.access(self.path.parent, os.W_OK):
            return False
        if not self.path.exists():
            return True
        is_whole = self.kind in REPLACED_KINDS and bool(self.files)
        return is_whole and not os.path.ismount(self.path) and not any(self._others(self.path))

    def _others(self, folder: Path) -> Iterator[str]:
        """Yields paths in `folder` that sansgpu did not write or that were changed."""
        for path in entries_below(folder):
            name = path.relative_to(folder).as_posix()
            is_file = path.is_symlink() or not path.is_dir()
            if is_file and name != MARK and not is_unchanged(folder, name, self.files.get(name, [])):
                yield name

    def _is_taken(self, name: str) -> bool:
        """Returns True if the path exists and is not an unchanged file of sansgpu."""
        if has_link_in_path(self.path, name):
            return True
        return os.path.lexists(self.path / name) and not is_unchanged(self.path, name, self.files.get(name, []))

    def _move_in(self, new: Path, files: Files) -> None:
        """Moves files one by one. Until all are moved, the mark has the old and new fingerprints, in case of a kill."""
        taken = {name for name in files if self._is_taken(name)}
        if other := min(taken - {README}, default=None):
            raise ConfigError(
                f"{self.path / other} was not written by sansgpu or has changed; move it to a different folder, or "
                "choose another output folder."
            )
        before, older = self.files, {name: known for name, known in self.files.items() if name not in files}
        files = {name: known for name, known in files.items() if name not in taken}
        both = {name: [*before.get(name, []), *files.get(name, [])] for name in {**before, **files}}
        write_mark(self.path, FolderMark(self.kind, both))
        for name in files:
            make_folder((self.path / name).parent)
            _rename(new / name, self.path / name)
        if self.kind in REPLACED_KINDS:
            for name in older:
                self._remove(name)
            older = {}
        write_mark(self.path, FolderMark(self.kind, {**older, **files}))

    def _remove(self, name: str) -> None:
        """Deletes an unchanged file, and parent folders that become empty."""
        if is_unchanged(self.path, name, self.files[name]):
            (self.path / name).unlink()
            with contextlib.suppress(OSError):  # not empty
                for parent in Path(name).parents[:-1]:
                    (self.path / parent).rmdir()

    def _keep_late_files(self, old: Path) -> None:
        """Moves files that were added to the old folder during the replacement to the new one."""
        for name in list(self._others(old)):
            if not os.path.lexists(self.path / name):
                make_folder((self.path / name).parent)
                (old / name).rename(self.path / name)


def require_file(path: Path, own: bytes | None = None, option: str = "--output") -> None:
    """Raises ConfigError unless `path` is new, empty, or contains the text `own` near its start."""
    _require_no_link(path, option)
    if not path.exists():
        return
    if path.is_dir():
        raise ConfigError(f"{path} is a folder; set {option} to a file.")
    if not path.is_file():
        raise ConfigError(f"{path} is not a regular file; choose another {option}.")
    with path.open("rb") as file:
        head = file.read(_HEAD_BYTES)
    if head and (own is None or own not in head):
        problem = "already exists" if own is None else "exists and was not written by this command"
        raise ConfigError(f"{path} {problem}; choose another {option}, or delete it.")


def require_no_links(paths: Sequence[Path]) -> None:
    """Raises ConfigError if a path is a symlink, whose target would be overwritten."""
    for path in paths:
        if path.is_symlink():
            raise ConfigError(f"{path} is a symlink, which is not followed; replace it with a regular file or folder.")


@contextmanager
def lock_run(folder: Path) -> Iterator[None]:
    """Locks `folder` for training; the lock is released when the process dies.

    Raises ConfigError if another process holds it.
    """
    try:
        with FileLock(RunPaths(folder).lock, timeout=PROBE_SECONDS):
            yield
    except Timeout:
        raise ConfigError(f"{folder} is being trained by another process; wait for it, or stop it first.") from None


def is_locked(paths: RunPaths) -> bool:
    """Returns whether a process is training the run now."""
    if paths.lock.is_symlink() or not paths.lock.is_file():
        return False
    try:
        with FileLock(paths.lock, timeout=0):
            return False
    except Timeout:
        return True
    except OSError:  # the lock belongs to another user
        return False


def _require_no_link(path: Path, option: str) -> None:
    if path.is_symlink():
        target = os.readlink(path)
        raise ConfigError(f"{path} is a symlink to {target}, which is not followed; choose another {option}.")


def _complete(folder: Path, kind: str) -> Files:
    """Marks a new folder, sets file modes according to the umask, and syncs everything to disk."""
    names = sorted(path.relative_to(folder).as_posix() for path in entries_below(folder) if path.is_file())
    files = {name: [fingerprint(folder / name)] for name in names}
    write_mark(folder, FolderMark(kind, files))
    mode = stat.S_IMODE((folder / MARK).stat().st_mode)
    for path in (folder / name for name in names):
        can_run = path.stat().st_mode & stat.S_IXUSR
        path.chmod(mode | (mode & 0o444) >> 2 if can_run else mode)
        sync_to_disk(path)
    for path in (folder, *(path for path in entries_below(folder) if path.is_dir())):
        sync_to_disk(path)
    return files


def _rename(source: Path, target: Path) -> None:
    try:
        source.replace(target)
    except OSError as error:
        if error.errno != errno.EXDEV:  # EXDEV: the folders are on different mounts
            raise
        with scratch_folder(target.parent, is_folder=False) as copied:
            shutil.copyfile(source, copied)
            shutil.copymode(source, copied)
            sync_to_disk(copied)
            copied.replace(target)


def _exchange(one: Path, other: Path) -> bool:
    """Atomically exchanges two folders. Returns False if the system does not support it."""
    at_working_folder, exchange = -100, 2  # AT_FDCWD and RENAME_EXCHANGE, see renameat2(2)
    try:
        rename = ctypes.CDLL(None).renameat2
    except (AttributeError, OSError, TypeError):  # not Linux
        return False
    return bool(rename(at_working_folder, os.fsencode(one), at_working_folder, os.fsencode(other), exchange) == 0)
