"""Atomic writes: after a kill or a power failure, a file or folder has either its old or its new content, complete."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from sansgpu.config.errors import SansGPUError
from sansgpu.files.folders import delete_folder

PRIVATE_MODE = 0o700  # mode of caches, whatever the umask, because their content is trusted
# Errors with which network and FUSE file systems, and Windows (EACCES), refuse to flush a folder
_FOLDER_FLUSH_REFUSED = {errno.EINVAL, errno.EBADF, errno.EACCES, errno.EISDIR, errno.ENOTSUP, errno.ENOSYS}
_SCRATCH = re.compile(r"\.sansgpu-[0-9a-f]{16}")


@contextmanager
def atomic_write(path: Path) -> Iterator[Path]:
    """Yields a hidden temporary file that then atomically replaces `path`. A symlink is replaced, not followed.

    Creates missing folders. Raises OSError.
    """
    make_folder(path.parent)
    with scratch_folder(path.parent, is_folder=False) as partial:
        yield partial
        sync_to_disk(partial)
        partial.replace(path)
        sync_to_disk(path.parent)


@contextmanager
def atomic_folder(folder: Path) -> Iterator[Path]:
    """Yields a hidden temporary folder that then becomes `folder`, which must not exist yet.

    Creates missing parents. Raises OSError.
    """
    make_folder(folder.parent)
    with scratch_folder(folder.parent, is_folder=True) as partial:
        yield partial
        for path in [*partial.iterdir(), partial]:
            sync_to_disk(path)
        partial.rename(folder)
        sync_to_disk(folder.parent)


@contextmanager
def write_failures_as(raised: type[SansGPUError], path: Path, option: str | None = None) -> Iterator[None]:
    """Converts an OSError to `raised`. The message names `path` and, if given, the `option` to change."""
    try:
        yield
    except OSError as error:
        advice = f"; choose another {option}" if option else ""
        raise raised(f"{path} cannot be written: {error.strerror or error}{advice}.") from None


def write_text(path: Path, text: str) -> None:
    """Writes a text file atomically. Raises OSError."""
    with atomic_write(path) as partial:
        partial.write_text(text, encoding="utf-8")


@contextmanager
def scratch_folder(parent: Path, is_folder: bool) -> Iterator[Path]:
    """Yields a hidden temporary file or folder in `parent`, and deletes it at the end unless it was renamed.

    It is locked while in use. Unlocked ones were left by killed processes and are deleted first.
    """
    delete_abandoned(parent)
    while True:
        path = parent / f".sansgpu-{secrets.token_hex(8)}"
        path.mkdir() if is_folder else path.touch(exist_ok=False)
        lock = _try_lock(path)
        if path.exists():  # otherwise another process deleted it before it was locked
            break
    try:
        yield path
    finally:
        _delete(path)
        if lock is not None:
            os.close(lock)


def make_folder(folder: Path, mode: int = 0o777) -> None:
    """Creates a folder and its missing parents with `mode`, less the umask, and syncs them to disk. Raises OSError."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    for path in reversed(missing):
        path.mkdir(mode, exist_ok=True)
        sync_to_disk(path.parent)
    if not missing and not folder.is_dir():
        folder.mkdir()  # raises the appropriate error


def cleanup_of(folder: Path, *unimportant: str) -> Callable[[], None]:
    """Returns a function that undoes the creation of `folder`, if the folder then has only `unimportant` files.

    The function deletes these files, the folder and its parents, except those that exist when `cleanup_of` is called.
    """
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    before = {name for name in unimportant if os.path.lexists(folder / name)}

    def clean_up() -> None:
        with contextlib.suppress(OSError):  # the folder is missing, has other files, or is read-only
            names = {path.name for path in folder.iterdir()}
            if names <= set(unimportant):
                for name in names - before:
                    (folder / name).unlink()
            for path in missing:
                path.rmdir()

    return clean_up


def sync_to_disk(path: Path) -> None:
    """Flushes a file, or the entries of a folder, to disk. Does nothing if the file system cannot flush folders."""
    try:
        _flush(path)
    except OSError as error:
        if error.errno not in _FOLDER_FLUSH_REFUSED or not path.is_dir():
            raise


def flush_refusal(folder: Path) -> str | None:
    """Returns why the file system of a folder cannot flush the folder's entries to disk, or None if it can."""
    try:
        _flush(folder)
    except OSError as error:
        return error.strerror or str(error)
    return None


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def delete_abandoned(parent: Path) -> None:
    """Deletes the temporary files and folders that killed processes left in `parent`."""
    for path in list(parent.iterdir()):
        if _SCRATCH.fullmatch(path.name) and not path.is_symlink() and (lock := _try_lock(path)) is not None:
            _delete(path)
            os.close(lock)


def _try_lock(path: Path) -> int | None:
    """Locks `path` and returns its descriptor; None if it is locked or the file system does not support locks."""
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


def _delete(path: Path) -> None:
    if path.is_dir():
        delete_folder(path)
    else:
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)
