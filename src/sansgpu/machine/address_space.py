"""The limit of this process's address space, `ulimit -v`, and the errors of allocations that fail.

Only Linux enforces the limit.
"""

from __future__ import annotations

import errno
import os
import sys
from pathlib import Path

from sansgpu.config import SansGPUError

# Parts of messages of Python, glibc, torch, oneDNN, the dynamic linker and the kernels of this package.
_MESSAGES = (
    "out of memory", "not enough memory", "allocate memory", "bad_alloc", "can't start new thread",
    "could not create a primitive", "could not create a memory", "failed to map segment",
)  # fmt: skip
_NEARLY_NONE_BYTES = 32 << 20  # if less address space is left, any error counts as a failed allocation


def address_space_limit() -> int | None:
    """Returns the limit in bytes, or None without one."""
    if sys.platform != "linux":
        return None
    import resource  # not on Windows

    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    return None if limit == resource.RLIM_INFINITY else limit


def address_space_left() -> int | None:
    """Returns the bytes left before the limit is reached, or None without a limit."""
    limit, used = address_space_limit(), used_address_space()
    return None if limit is None or used is None else max(0, limit - used)


def used_address_space() -> int | None:
    """Returns the size of the address space in bytes; None on systems other than Linux."""
    if sys.platform != "linux":
        return None
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    return pages * os.sysconf("SC_PAGE_SIZE")


def out_of_memory(error: BaseException, remedy: str) -> SansGPUError | None:
    """Returns the error to raise instead of `error` if an allocation failed, or None. `remedy` ends its message."""
    if isinstance(error, SansGPUError) or not (_says_so(error) or _is_exhausted(error)):
        return None
    limit = address_space_limit()
    if limit is None:
        return SansGPUError(f"out of memory; stop other programs, {remedy}.")
    return SansGPUError(f"out of memory, because `ulimit -v` allows {limit / 1e9:.1f} GB; raise that limit, {remedy}.")


def _says_so(error: BaseException) -> bool:
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM or "failed to map segment" in str(error)
    return isinstance(error, MemoryError) or any(part in str(error) for part in _MESSAGES)


def _is_exhausted(error: BaseException) -> bool:
    left = address_space_left()
    return isinstance(error, Exception) and left is not None and left < _NEARLY_NONE_BYTES
