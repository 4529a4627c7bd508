"""A private folder for compiled code.

Loading a shared library runs it. So the folder that libraries are loaded from is never named by a run or a
configuration, and is used only if nobody but this user (and root) could have put anything into it.
"""

from __future__ import annotations

import atexit
import os
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

from sansgpu.machine.probe import cache_dir, user_cache_dir

ROOT = 0  # the superuser's id
PRIVATE = 0o700

_made: list[Path] = []  # temporary folders of this process: safe by their random names, whatever is above them


class NotPrivateError(OSError):
    """Other users could change what is in a folder."""


def compiled_cache(warn: Callable[[str], None]) -> Path:
    """The cache that compiled code is read from and written to: $SANSGPU_CACHE, or else the user's own cache folder.

    `compiled_in` gives the private folder in it. If other users could change that folder in both caches, `warn` gets
    the reason, and the code is compiled for this process alone in a temporary folder.
    """
    for root in dict.fromkeys([cache_dir(None), user_cache_dir()]):
        try:
            compiled_in(root)
            return root
        except OSError as error:
            reason = str(error) if isinstance(error, NotPrivateError) else f"{root}: {error.strerror or error}"
            warn(
                f"no compiled code is loaded from {root}, because {reason}; set SANSGPU_CACHE to a folder that only "
                "you can write."
            )
    return _temporary()


def compiled_in(root: Path) -> Path:
    """This user's folder of compiled code in a cache, `compiled-UID`, made with mode 0700 if it is missing.

    Raises NotPrivateError if other users could change it, and OSError if it cannot be made.
    """
    folder = root / (f"compiled-{os.getuid()}" if hasattr(os, "getuid") else "compiled")
    root.mkdir(parents=True, exist_ok=True)
    make_private(folder)
    return folder


def make_private(folder: Path) -> None:
    """Make a folder that only this user can read and write, or check that an existing one is.

    Raises NotPrivateError if it is a link, belongs to another user or lets others in, or if others could replace a
    folder on the way to it, as sshd's StrictModes; and OSError if it cannot be made.
    """
    folder.mkdir(mode=PRIVATE, exist_ok=True)
    if not hasattr(os, "getuid"):
        return  # Windows: profiles are private by their access lists
    facts = folder.lstat()
    if stat.S_ISLNK(facts.st_mode):
        raise NotPrivateError(f"{folder} is a link")
    if facts.st_uid != os.getuid():
        raise NotPrivateError(f"{folder} belongs to another user")
    if facts.st_mode & 0o077:
        raise NotPrivateError(f"{folder} lets other users in (mode {stat.S_IMODE(facts.st_mode):o}, not 700)")
    require_safe_path(folder.parent)


def require_safe_path(folder: Path) -> None:
    """Raises NotPrivateError if another user could replace `folder`, or a folder or link on the way to it."""
    if not hasattr(os, "getuid") or any(folder.is_relative_to(made) for made in _made):
        return
    for step in _steps(folder):
        facts = step.lstat()
        if facts.st_uid not in (ROOT, os.getuid()):
            raise NotPrivateError(f"{step} belongs to another user")
        if not stat.S_ISLNK(facts.st_mode) and _is_open(facts):
            raise NotPrivateError(f"{step} can be written by other users")


def require_own_file(path: Path) -> None:
    """Raises NotPrivateError unless `path` is a plain file of this user's."""
    facts = path.lstat()
    if not stat.S_ISREG(facts.st_mode):
        raise NotPrivateError(f"{path} is no plain file")
    if hasattr(os, "getuid") and facts.st_uid != os.getuid():
        raise NotPrivateError(f"{path} belongs to another user")


def _is_open(facts: os.stat_result) -> bool:
    """Whether users other than the owner could rename what is in a folder."""
    if facts.st_mode & stat.S_ISVTX:  # as /tmp: only the owner of an entry renames it
        return False
    own_group = facts.st_gid == os.getuid()  # a user's private group has the user's number
    return bool(facts.st_mode & stat.S_IWOTH or (facts.st_mode & stat.S_IWGRP and not own_group))


def _steps(path: Path) -> Iterator[Path]:
    """Every folder and link that the system passes on the way to `path`, which exists."""
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
            left.extend(reversed(here.readlink().parts))  # an absolute one begins with /, and `here / "/"` is /
            here = here.parent


@cache
def _temporary() -> Path:
    """A folder that is deleted when the process ends."""
    folder = Path(tempfile.mkdtemp(prefix="sansgpu-compiled-"))
    _made.append(folder)
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder
