"""Writes outputs without overwriting users' files.

A folder is written to only if it is new, empty, or marked as the same kind of output. Of its files, only unchanged ones
that the mark lists are replaced or deleted. A single file is written only if it is new, empty, or recognized as an
output of sansgpu. Symlinks are not followed. All other cases raise ConfigError.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import shutil
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from sansgpu.config import ConfigError
from sansgpu.files.atomic import make_folder, scratch_folder, sync_to_disk, write_text
from sansgpu.files.folders import entries_below
from sansgpu.files.marks import (
    KINDS,
    MARK,
    FolderMark,
    fingerprint,
    fingerprint_of,
    has_link_in_path,
    is_output,
    is_unchanged,
    read_mark,
    write_mark,
)

Files = dict[str, list[str]]  # valid fingerprints of sansgpu's files, by relative path

REPLACED_KINDS = "model", "tokenizer"  # kinds of folders that are replaced as a unit, deleting old files
LOCK = ".lock"  # an empty lock file may be left by a command that was killed before it wrote anything
README = "README.md"  # an edited model card is not replaced
# Text near the start of files that sansgpu wrote.
PAGE, GGUF = b'<meta name="generator" content="sansgpu">', b", trained with sansgpu."
_HEAD_BYTES = 1 << 16  # these strings are searched for in this many bytes at the start of a file


def require_folder(folder: Path, kind: str, option: str = "--output-dir") -> None:
    """Raises ConfigError unless `folder` is new, empty, or an output of this kind."""
    _require_no_link(folder, option)
    if not folder.exists():
        return
    if not folder.is_dir():
        raise ConfigError(f"{folder} is a file, not a folder; choose another {option}.")
    mark = read_mark(folder)
    if mark is not None and mark.kind != kind:
        raise ConfigError(f"{folder} contains {KINDS[mark.kind]}, not {KINDS[kind]}; choose another {option}.")
    if mark is None and (other := _first_entry(folder, option)) and not is_output(folder, kind):
        raise ConfigError(
            f"{folder} contains files that sansgpu did not write, such as {other}; choose another {option}."
        )


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
def replace_folder(folder: Path, kind: str, option: str = "--output") -> Iterator[Path]:
    """Yields a hidden temporary folder, whose files then replace those of `folder`.

    Files of a model or a tokenizer are deleted if an earlier command wrote them and this one does not. Files that
    sansgpu did not write stay. An existing `folder` exists at all times, and is replaced atomically if it contains only
    files of sansgpu. File modes follow the umask. Raises ConfigError if `folder` may not be written, and OSError.
    """
    require_folder(folder, kind, option)
    folder = folder.resolve()
    before = _own_files(folder)
    make_folder(folder.parent)
    replaceable = _can_replace(folder, kind, before)
    beside = replaceable or not folder.exists()
    with scratch_folder(folder.parent if beside else folder, is_folder=True) as new:
        yield new
        files = _complete(new, kind)
        if not folder.exists():
            new.rename(folder)
        elif _can_replace(folder, kind, before) and _exchange(new, folder):
            _keep_late_files(new, folder, before)
        else:
            _move_in(new, folder, FolderMark(kind, files), before)
        sync_to_disk(folder.parent)


def write_into_folder(folder: Path, name: str, text: str) -> bool:
    """Writes a file of a marked folder. Returns False if it exists and is not an unchanged file of sansgpu.

    Raises OSError.
    """
    mark = read_mark(folder)
    assert mark is not None, f"{folder} has no mark"
    known = mark.files.get(name, [])
    if _is_taken(folder, name, known):
        return False
    write_mark(folder, FolderMark(mark.kind, {**mark.files, name: [*known, fingerprint_of(text.encode())]}))
    write_text(folder / name, text)
    return True


def remove_folder(folder: Path) -> None:
    """Deletes the files that sansgpu wrote to a folder, and the folder if it is then empty. Raises OSError."""
    if folder.is_symlink() or not folder.is_dir():
        return
    for name, known in _own_files(folder).items():
        _remove(folder, name, known)
    if [path.name for path in folder.iterdir()] in ([MARK], []):
        (folder / MARK).unlink(missing_ok=True)
        folder.rmdir()


def _require_no_link(path: Path, option: str) -> None:
    if path.is_symlink():
        target = os.readlink(path)
        raise ConfigError(f"{path} is a symlink to {target}, which is not followed; choose another {option}.")


def _first_entry(folder: Path, option: str) -> str | None:
    """Returns the name of an entry of a folder, or None if it has none except an empty lock file."""
    try:
        found = sorted(folder.iterdir())
        others = (path for path in found if path.name != LOCK or path.is_symlink() or path.lstat().st_size)
        return next((path.name for path in others), None)
    except OSError as error:
        raise ConfigError(f"{folder} cannot be read: {error.strerror}; choose another {option}.") from None


def _own_files(folder: Path) -> Files:
    mark = read_mark(folder)
    return mark.files if mark is not None else {}


def _is_taken(folder: Path, name: str, known: list[str]) -> bool:
    """Returns True if the path exists and is not an unchanged file of sansgpu."""
    return has_link_in_path(folder, name) or (os.path.lexists(folder / name) and not is_unchanged(folder, name, known))


def _others(folder: Path, ours: Files) -> Iterator[str]:
    """Yields paths in `folder` that sansgpu did not write or that were changed."""
    for path in entries_below(folder):
        name = path.relative_to(folder).as_posix()
        if (
            (path.is_symlink() or not path.is_dir())
            and name != MARK
            and not is_unchanged(folder, name, ours.get(name, []))
        ):
            yield name


def _can_replace(folder: Path, kind: str, ours: Files) -> bool:
    """Returns True if a folder is new, or has only sansgpu's own files and is not a mount point."""
    if not os.access(folder.parent, os.W_OK):
        return False
    if not folder.exists():
        return True
    return kind in REPLACED_KINDS and bool(ours) and not os.path.ismount(folder) and not any(_others(folder, ours))


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


def _move_in(new: Path, folder: Path, mark: FolderMark, before: Files) -> None:
    """Moves files one by one. Until all are moved, the mark has the old and the new fingerprints, in case of a kill."""
    taken = {name for name in mark.files if _is_taken(folder, name, before.get(name, []))}
    if other := next(iter(sorted(taken - {README})), None):
        raise ConfigError(
            f"{folder / other} was not written by sansgpu or has changed; move it to a different folder, or choose "
            "another output folder."
        )
    files = {name: known for name, known in mark.files.items() if name not in taken}
    older = {name: known for name, known in before.items() if name not in mark.files}
    write_mark(
        folder,
        FolderMark(mark.kind, {name: [*before.get(name, []), *files.get(name, [])] for name in {**before, **files}}),
    )
    for name in files:
        make_folder((folder / name).parent)
        _rename(new / name, folder / name)
    for name, known in older.items() if mark.kind in REPLACED_KINDS else ():
        _remove(folder, name, known)
    write_mark(folder, FolderMark(mark.kind, files if mark.kind in REPLACED_KINDS else {**older, **files}))


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


def _remove(folder: Path, name: str, known: list[str]) -> None:
    """Deletes an unchanged file, and parent folders that become empty."""
    if is_unchanged(folder, name, known):
        (folder / name).unlink()
        with contextlib.suppress(OSError):  # not empty
            for parent in Path(name).parents[:-1]:
                (folder / parent).rmdir()


def _exchange(one: Path, other: Path) -> bool:
    """Atomically exchanges two folders. Returns False if the system does not support it."""
    at_working_folder, exchange = -100, 2  # AT_FDCWD and RENAME_EXCHANGE, see renameat2(2)
    try:
        rename = ctypes.CDLL(None).renameat2
    except (AttributeError, OSError, TypeError):  # not Linux
        return False
    return bool(rename(at_working_folder, os.fsencode(one), at_working_folder, os.fsencode(other), exchange) == 0)


def _keep_late_files(old: Path, folder: Path, ours: Files) -> None:
    """Moves files that were added to the old folder during the replacement to the new one."""
    for name in list(_others(old, ours)):
        if not os.path.lexists(folder / name):
            make_folder((folder / name).parent)
            (old / name).rename(folder / name)
