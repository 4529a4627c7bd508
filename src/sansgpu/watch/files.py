"""Writing files whole: a reader, a kill or a power cut finds the old content or the new one, never a part."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

_SCRATCH = re.compile(r"\.sansgpu-[0-9a-f]{16}")


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """Yields a new hidden file to write, which then replaces `path`; a link there is replaced, not followed.

    Missing folders are made. Raises OSError.
    """
    make_folder(path.parent)
    with scratch(path.parent, is_folder=False) as partial:
        yield partial
        sync_to_disk(partial)
        partial.replace(path)
        sync_to_disk(path.parent)


def write_text(path: Path, text: str) -> None:
    """Write a text as a whole file. Raises OSError."""
    with whole_file(path) as partial:
        partial.write_text(text, encoding="utf-8")


@contextmanager
def scratch(parent: Path, is_folder: bool) -> Iterator[Path]:
    """Yields a new hidden file or folder in `parent`, deleted at the end unless it was renamed.

    It is locked while in use: one that is not locked was left by a process that was killed, and is deleted here.
    """
    _delete_abandoned(parent)
    while True:
        place = parent / f".sansgpu-{secrets.token_hex(8)}"
        place.mkdir() if is_folder else place.touch(exist_ok=False)
        lock = _locked(place)
        if place.exists():  # else another process deleted it before it was locked
            break
    try:
        yield place
    finally:
        _delete(place)
        if lock is not None:
            os.close(lock)


def make_folder(folder: Path) -> None:
    """Make a folder and its missing parents, so that they survive a power cut. Raises OSError."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    for path in reversed(missing):
        path.mkdir(exist_ok=True)
        sync_to_disk(path.parent)
    if not missing and not folder.is_dir():
        folder.mkdir()  # raises what is wrong


def sync_to_disk(path: Path) -> None:
    """Wait until a file, or a folder's list of names, survives a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def to_nowhere(stream: IO[str]) -> None:
    """Drop what is written to a stream from now on and what is still in its buffer: its reader has left."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)


def _delete_abandoned(parent: Path) -> None:
    for path in list(parent.iterdir()):
        if _SCRATCH.fullmatch(path.name) and not path.is_symlink() and (lock := _locked(path)) is not None:
            _delete(path)
            os.close(lock)


def _locked(path: Path) -> int | None:
    """A descriptor that holds the lock of `path`; None if another process has it or the file system has no locks."""
    try:
        import fcntl  # not on Windows

        descriptor = os.open(path, os.O_RDONLY)
    except (ImportError, OSError):
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        return None
    return descriptor


def _delete(place: Path) -> None:
    if place.is_dir():
        shutil.rmtree(place, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            place.unlink(missing_ok=True)
