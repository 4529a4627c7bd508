"""The cache folder, and the private folder in it for compiled code.

Loading a shared library runs it. Therefore the private folder is never taken from a run or a configuration, and is used
only if nobody but this user and root can write to it.
"""

from __future__ import annotations

import errno
import os
import tempfile
from contextlib import suppress
from functools import cache, partial
from pathlib import Path

from sansgpu.config import ConfigError
from sansgpu.config.paths import local_path
from sansgpu.events.escape import printable_line
from sansgpu.events.progress import Warn
from sansgpu.files.atomic import PRIVATE_MODE, make_folder
from sansgpu.machine.distributed.world import find_world
from sansgpu.machine.interrupt import write_line
from sansgpu.machine.private_folder import NotPrivateError, make_private, private_in, temporary_folder

CACHE = "SANSGPU_CACHE"  # environment variable


def cache_dir(configured: str | None) -> Path:
    """Returns the folder for tokens and measurements: as configured, else $SANSGPU_CACHE, else `own_cache`.

    Compiled code is not loaded from it; see `private_cache`. Raises ConfigError as `own_cache`.
    """
    chosen = configured or os.environ.get(CACHE)
    return local_path(chosen) if chosen else own_cache()


def own_cache() -> Path:
    """Returns the user's cache folder, or a folder for temporary files if that cannot be written.

    Raises ConfigError if neither can be written.
    """
    folder: Path | None = None  # remains None if $HOME is not set and the user id has no name
    with suppress(ConfigError):
        folder = Path(os.environ.get("XDG_CACHE_HOME") or local_path("~/.cache")) / "sansgpu"
    return _writable(folder)


def private_cache(warn: Warn) -> Path:
    """Returns the private folder in $SANSGPU_CACHE, or else in the user's own cache folder.

    If it is not private in either cache, warns with the reason and returns a temporary folder for this process.
    """
    tried: list[Path] = []
    for find in (partial(cache_dir, None), own_cache):
        if (root := find()) in tried:
            continue
        tried.append(root)
        try:
            return private_in(root)
        except OSError as error:
            reason = str(error) if isinstance(error, NotPrivateError) else f"{root}: {error.strerror or error}"
            warn(
                f"the cache {root} is not used for compiled code, because {reason}; set {CACHE} to a folder that only "
                "you can write to."
            )
    return private_in(temporary_folder())


@cache
def _writable(folder: Path | None) -> Path:
    """Returns `folder` if it can be written, otherwise a folder for temporary files, with a warning.

    All processes of this user find the same folder, and child processes inherit it, so only one of them warns.
    """
    try:
        if folder is None:
            raise FileNotFoundError(errno.ENOENT, "this user has no home folder")
        make_folder(folder, PRIVATE_MODE)
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except OSError as error:
        problem = f"the cache {folder or '~/.cache/sansgpu'} cannot be written ({error.strerror or error})"
    try:
        other = _in_temporary_files()
    except OSError:
        raise ConfigError(
            f"{problem}, and neither can a folder for temporary files; set {CACHE} to a folder that you can write to."
        ) from None
    if find_world().rank == 0:
        write_line(f"warning: {printable_line(problem)}, so {other} is used; set {CACHE} to a folder that is kept.")
    os.environ[CACHE] = os.environ.get(CACHE) or str(other)
    return other


def _in_temporary_files() -> Path:
    """Returns this user's folder among the temporary files, or one of this process if others can write to it."""
    folder = Path(tempfile.gettempdir()) / (f"sansgpu-{os.getuid()}" if hasattr(os, "getuid") else "sansgpu")
    try:
        make_private(folder)
        return folder
    except NotPrivateError:
        return temporary_folder()
