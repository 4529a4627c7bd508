"""Where commands may write: one rule that keeps users' files safe.

A folder is written to only if it is new, empty, or marked as the same kind of output. Of its files only those that the
mark lists are replaced or deleted, and only while they are as they were written. A single file is written only if it is
new, empty, or begins as ours do. No link is followed. Anything else is refused.
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
from sansgpu.watch.files import make_folder, scratch, sync_to_disk, write_text
from sansgpu.watch.marks import (
    KINDS,
    MARK,
    Mark,
    fingerprint,
    fingerprint_of,
    is_behind_link,
    is_unchanged,
    read_mark,
    write_mark,
)
from sansgpu.watch.unmarked import files_of_unmarked, is_unmarked

Files = dict[str, list[str]]  # by path in a folder: the fingerprints that a file of ours may have

WHOLE = "model", "tokenizer"  # kinds of folders whose files belong together: older ones are deleted
LOCK = ".lock"  # an empty one is left by a command that was refused
README = "README.md"  # people complete a model card: a changed one stays
# Words near the beginning of single files of ours. Of pages, version 0.1.0 wrote only the second.
PAGE = (
    b'<meta name="generator" content="sansgpu">',
    b"style-src 'unsafe-inline'; img-src data: blob:; form-action 'none'",
)
GGUF = (b", trained with sansgpu.",)
_HEAD_BYTES = 1 << 16  # that are searched for these


def require_folder(folder: Path, kind: str, option: str = "--output-dir") -> None:
    """Raises ConfigError unless `folder` is new, empty, or made by sansgpu as one of this kind."""
    _require_no_link(folder, option)
    if not folder.exists():
        return
    if not folder.is_dir():
        raise ConfigError(f"{folder} cannot be written: it is a file, not a folder; choose another {option}.")
    mark = read_mark(folder)
    if mark is not None and mark.kind != kind:
        raise ConfigError(f"{folder} holds {KINDS[mark.kind]}, not {KINDS[kind]}; choose another {option}.")
    if mark is None and (other := _first_entry(folder, option)) and not is_unmarked(folder, kind):
        raise ConfigError(f"{folder} holds files that sansgpu did not write, such as {other}; choose another {option}.")


def require_file(path: Path, ours: Sequence[bytes] = (), option: str = "--output") -> None:
    """Raises ConfigError unless `path` is new, empty, or has some words of `ours` near its beginning."""
    _require_no_link(path, option)
    if not path.exists():
        return
    if path.is_dir():
        raise ConfigError(f"{path} is a folder; give the name of a file as {option}.")
    if not path.is_file():
        raise ConfigError(f"{path} is no regular file; choose another {option}.")
    with path.open("rb") as file:
        head = file.read(_HEAD_BYTES)
    if head and not any(words in head for words in ours):
        problem = "exists and was not written by this command" if ours else "exists already"
        raise ConfigError(f"{path} {problem}; choose another {option}, or delete it.")


def require_no_links(paths: Sequence[Path]) -> None:
    """Raises ConfigError at the first path that is a link, as what it points to would be written."""
    for path in paths:
        if path.is_symlink():
            raise ConfigError(f"{path} is a link, and links are not followed; put the file or folder in its place.")


@contextmanager
def filled_folder(folder: Path, kind: str, option: str = "--output") -> Iterator[Path]:
    """Yields a new hidden folder to fill, whose files then become those of `folder`.

    Files of a model or a tokenizer that an earlier command wrote there and this one does not are deleted; files of
    other people stay. `folder` is never missing in between, and changes at once if it is new or holds only files of
    ours. The modes of files follow the umask. Raises ConfigError where this module's rule forbids it, and OSError.
    """
    require_folder(folder, kind, option)
    folder = folder.resolve()
    before = _files_of_ours(folder, kind)
    make_folder(folder.parent)
    beside = _can_change_at_once(folder, kind, before)
    with scratch(folder.parent if beside else folder, is_folder=True) as new:
        yield new
        files = _complete(new, kind)
        if not folder.exists():
            new.rename(folder)
        elif _can_change_at_once(folder, kind, before) and _exchanged(new, folder):
            _bring_back(new, folder, before)
        else:
            _move_in(new, folder, Mark(kind, files), before)
        sync_to_disk(folder.parent)


def add_text(folder: Path, name: str, text: str) -> bool:
    """Write a file of a marked folder; False if one of that name is not as sansgpu wrote it. Raises OSError."""
    mark = read_mark(folder)
    assert mark is not None, f"{folder} has no mark"
    known = mark.files.get(name, [])
    if _is_taken(folder, name, known):
        return False
    write_mark(folder, Mark(mark.kind, {**mark.files, name: [*known, fingerprint_of(text.encode())]}))
    write_text(folder / name, text)
    return True


def remove_folder(folder: Path, kind: str) -> None:
    """Delete the files that sansgpu wrote to a folder, and the folder if nothing else is in it. Raises OSError."""
    if folder.is_symlink() or not folder.is_dir():
        return
    for name, known in _files_of_ours(folder, kind).items():
        _remove(folder, name, known)
    if [path.name for path in folder.iterdir()] in ([MARK], []):
        (folder / MARK).unlink(missing_ok=True)
        folder.rmdir()


def _require_no_link(path: Path, option: str) -> None:
    if path.is_symlink():
        target = os.readlink(path)
        raise ConfigError(f"{path} is a link to {target}, and links are not followed; choose another {option}.")


def _first_entry(folder: Path, option: str) -> str | None:
    """The name of something in the folder; None if it is empty but for the lock of a refused command."""
    try:
        found = sorted(folder.iterdir())
        others = (path for path in found if path.name != LOCK or path.is_symlink() or path.lstat().st_size)
        return next((path.name for path in others), None)
    except OSError as error:
        raise ConfigError(f"{folder} cannot be read: {error.strerror}; choose another {option}.") from None


def _files_of_ours(folder: Path, kind: str) -> Files:
    if (mark := read_mark(folder)) is not None:
        return mark.files
    found = files_of_unmarked(folder, kind) if is_unmarked(folder, kind) else []
    return {path.name: [fingerprint(path)] for path in found if not path.is_symlink()}


def _is_taken(folder: Path, name: str, known: list[str]) -> bool:
    """Whether there is something of that name that is not as sansgpu wrote it."""
    return is_behind_link(folder, name) or (os.path.lexists(folder / name) and not is_unchanged(folder, name, known))


def _others(folder: Path, ours: Files) -> Iterator[str]:
    """Paths in `folder` that sansgpu did not write, or that somebody changed."""
    for path in folder.rglob("*"):
        name = path.relative_to(folder).as_posix()
        if (
            (path.is_symlink() or not path.is_dir())
            and name != MARK
            and not is_unchanged(folder, name, ours.get(name, []))
        ):
            yield name


def _can_change_at_once(folder: Path, kind: str, ours: Files) -> bool:
    """Whether another folder can take its place: it is new, or holds only what is to go and is no mount point."""
    if not os.access(folder.parent, os.W_OK):
        return False
    if not folder.exists():
        return True
    return kind in WHOLE and bool(ours) and not os.path.ismount(folder) and not any(_others(folder, ours))


def _complete(folder: Path, kind: str) -> Files:
    """Mark a new folder, give its files the modes that the umask asks for, and wait until all is on the disk."""
    names = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    files = {name: [fingerprint(folder / name)] for name in names}
    write_mark(folder, Mark(kind, files))
    mode = stat.S_IMODE((folder / MARK).stat().st_mode)
    for path in (folder / name for name in names):
        can_run = path.stat().st_mode & stat.S_IXUSR
        path.chmod(mode | (mode & 0o444) >> 2 if can_run else mode)
        sync_to_disk(path)
    for path in (folder, *(path for path in folder.rglob("*") if path.is_dir())):
        sync_to_disk(path)
    return files


def _move_in(new: Path, folder: Path, mark: Mark, before: Files) -> None:
    """Move file by file; a kill meanwhile leaves a mark that knows the old and the new ones."""
    taken = {name for name in mark.files if _is_taken(folder, name, before.get(name, []))}
    if other := next(iter(sorted(taken - {README})), None):
        raise ConfigError(f"{folder / other} is not as sansgpu wrote it; move it away, or choose another folder.")
    files = {name: known for name, known in mark.files.items() if name not in taken}
    older = {name: known for name, known in before.items() if name not in mark.files}
    write_mark(
        folder, Mark(mark.kind, {name: [*before.get(name, []), *files.get(name, [])] for name in {**before, **files}})
    )
    for name in files:
        make_folder((folder / name).parent)
        _rename(new / name, folder / name)
    for name, known in older.items() if mark.kind in WHOLE else ():
        _remove(folder, name, known)
    write_mark(folder, Mark(mark.kind, files if mark.kind in WHOLE else {**older, **files}))


def _rename(source: Path, target: Path) -> None:
    try:
        source.replace(target)
    except OSError as error:
        if error.errno != errno.EXDEV:  # they are in different mounts
            raise
        with scratch(target.parent, is_folder=False) as copied:
            shutil.copyfile(source, copied)
            shutil.copymode(source, copied)
            sync_to_disk(copied)
            copied.replace(target)


def _remove(folder: Path, name: str, known: list[str]) -> None:
    """Delete a file that is as it was written, and the folders that it leaves empty."""
    if is_unchanged(folder, name, known):
        (folder / name).unlink()
        with contextlib.suppress(OSError):  # not empty
            for parent in Path(name).parents[:-1]:
                (folder / parent).rmdir()


def _exchanged(one: Path, other: Path) -> bool:
    """Let two folders swap their names in one operation; False where the system cannot."""
    at_working_folder, exchange = -100, 2  # AT_FDCWD and RENAME_EXCHANGE, see renameat2(2)
    try:
        rename = ctypes.CDLL(None).renameat2
    except (AttributeError, OSError, TypeError):  # not Linux
        return False
    return bool(rename(at_working_folder, os.fsencode(one), at_working_folder, os.fsencode(other), exchange) == 0)


def _bring_back(old: Path, folder: Path, ours: Files) -> None:
    """Move what somebody put into the old folder at the last moment to the new one."""
    for name in list(_others(old, ours)):
        if not os.path.lexists(folder / name):
            make_folder((folder / name).parent)
            (old / name).rename(folder / name)
