"""Direct writes, hashes and free disk space."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import mmap
import os
import shutil
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

Bytes = np.ndarray[Any, np.dtype[np.uint8]]

_MODE = 0o666  # permissions of new files before the umask is applied
_BLOCK_BYTES, _SECTOR_BYTES = 4 << 20, 4096  # size of a write; direct writes must be multiples of a sector


def free_disk_bytes(folder: Path) -> int:
    """Returns the free space on the disk of `folder`, which need not exist yet."""
    while not folder.exists():
        folder = folder.parent
    return shutil.disk_usage(folder).free


def file_sha256(path: Path) -> str:
    """Returns the hexadecimal SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_hashed(path: Path, parts: Iterable[Bytes]) -> str:
    """Writes `parts` to a new file, waits until it is on the disk and returns its hexadecimal SHA-256.

    Bypasses the page cache if the file system supports it, because copying into the cache costs most of the CPU time,
    which concurrent training steps need. Other threads keep running.
    """
    block = np.frombuffer(mmap.mmap(-1, _BLOCK_BYTES), np.uint8)  # aligned to pages, as direct writes must be
    digest, filled, size = hashlib.sha256(), 0, 0
    descriptor = _open_direct(path)
    try:
        for part in parts:
            taken = 0
            while taken < len(part):
                more = min(len(part) - taken, _BLOCK_BYTES - filled)
                np.copyto(block[filled : filled + more], part[taken : taken + more])
                taken, filled, size = taken + more, filled + more, size + more
                if filled == _BLOCK_BYTES:
                    digest.update(block.data)
                    _write_all(descriptor, block)
                    filled = 0
        digest.update(block[:filled].data)
        _write_all(descriptor, block[: -(-filled // _SECTOR_BYTES) * _SECTOR_BYTES])
        os.ftruncate(descriptor, size)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    return digest.hexdigest()


def _open_direct(path: Path) -> int:
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
    if sys.platform == "linux":
        with contextlib.suppress(OSError):  # tmpfs and others do not support direct writes
            return os.open(path, flags | os.O_DIRECT, _MODE)
    return os.open(path, flags, _MODE)


def _write_all(descriptor: int, block: Bytes) -> None:
    left = block.data
    while left:
        try:
            left = left[os.write(descriptor, left) :]
        except OSError as error:
            if error.errno != errno.EINVAL or not _leave_direct(descriptor):
                raise


def _leave_direct(descriptor: int) -> bool:
    """Switches to the page cache; returns False if it was already in use."""
    if sys.platform != "linux":
        return False
    import fcntl

    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    fcntl.fcntl(descriptor, fcntl.F_SETFL, flags & ~os.O_DIRECT)
    return bool(flags & os.O_DIRECT)
