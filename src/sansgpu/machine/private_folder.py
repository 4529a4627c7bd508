"""Folders whose content is trusted, because nobody but this user and root can write to them."""

from __future__ import annotations

import atexit
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from sansgpu.files.atomic import PRIVATE_MODE, make_folder

ROOT_UID = 0

_temporary_folders: list[Path] = []  # created by this process; random names make them safe anywhere


class NotPrivateError(OSError):
    """Raised if other users could change the content of a folder."""


def private_in(root: Path) -> Path:
    """Returns this user's folder `compiled-UID` in a cache, and creates it with mode 0700 if it is missing.

    Raises NotPrivateError if other users could change it, and OSError if it cannot be created.
    """
    folder = root / (f"compiled-{os.getuid()}" if hasattr(os, "getuid") else "compiled")
    make_folder(root, PRIVATE_MODE)
    make_private(folder)
    return folder


def make_private(folder: Path) -> None:
    """Creates a folder that only this user can access, or checks that an existing one is private.

    Raises NotPrivateError if it is a link, belongs to another user or has a wider mode, or if other users could replace
    one of its parent folders (like sshd's StrictModes). Raises OSError if it cannot be created.
    """
    folder.mkdir(mode=PRIVATE_MODE, exist_ok=True)
    if not hasattr(os, "getuid"):
        return  # on Windows, access control lists keep user profiles private
    facts = folder.lstat()
    if stat.S_ISLNK(facts.st_mode):
        raise NotPrivateError(f"{folder} is a symlink")
    if facts.st_uid != os.getuid():
        raise NotPrivateError(f"{folder} belongs to another user")
    if facts.st_mode & 0o077:
        raise NotPrivateError(
            f"{folder} is accessible to other users (mode {stat.S_IMODE(facts.st_mode):o} instead of 700)"
        )
    require_safe_path(folder.parent)


def require_safe_path(folder: Path) -> None:
    """Raises NotPrivateError if another user could replace `folder` or a folder or link in its path."""
    if not hasattr(os, "getuid") or any(folder.is_relative_to(made) for made in _temporary_folders):
        return
    for step in _steps(folder):
        facts = step.lstat()
        if facts.st_uid not in (ROOT_UID, os.getuid()):
            raise NotPrivateError(f"{step} belongs to another user")
        if not stat.S_ISLNK(facts.st_mode) and _is_open(facts):
            raise NotPrivateError(f"{step} is writable by other users")


def require_own_file(path: Path) -> None:
    """Raises NotPrivateError unless `path` is a regular file owned by this user."""
    facts = path.lstat()
    if not stat.S_ISREG(facts.st_mode):
        raise NotPrivateError(f"{path} is not a regular file")
    if hasattr(os, "getuid") and facts.st_uid != os.getuid():
        raise NotPrivateError(f"{path} belongs to another user")


def _is_open(facts: os.stat_result) -> bool:
    """Returns whether users other than the owner could rename entries of a folder."""
    if facts.st_mode & stat.S_ISVTX:  # sticky, like /tmp: only the owner of an entry can rename it
        return False
    own_group = facts.st_gid == os.getuid()  # a user's private group has the user's id
    return bool(facts.st_mode & stat.S_IWOTH or (facts.st_mode & stat.S_IWGRP and not own_group))


def _steps(path: Path) -> Iterator[Path]:
    """Yields every folder and link that resolving the existing `path` visits."""
    left = list(reversed(path.absolute().parts))
    here = Path(left.pop())
    yield here
    while left:
        part = left.pop()
        if part == os.pardir:
            here = here.parent
            continue
        here = here / part
        yield here
        if here.is_symlink():
            left.extend(reversed(here.readlink().parts))  # an absolute target starts with /, and `here / "/"` is /
            here = here.parent


@cache
def temporary_folder() -> Path:
    """Creates a folder that is deleted when the process ends."""
    folder = Path(tempfile.mkdtemp(prefix="sansgpu-compiled-"))
    _temporary_folders.append(folder)
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder
