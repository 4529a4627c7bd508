"""The limit of this process's address space, `ulimit -v`, beyond which allocations fail. Only Linux enforces it."""

from __future__ import annotations

import os
import sys
from pathlib import Path


def address_space_limit() -> int | None:
    """Returns the limit in bytes, or None without one."""
    if sys.platform != "linux":
        return None
    import resource  # not on Windows

    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    return None if limit == resource.RLIM_INFINITY else limit


def address_space_left() -> int | None:
    """Returns the bytes left of the limit, or None without one."""
    limit, used = address_space_limit(), used_address_space()
    return None if limit is None or used is None else max(0, limit - used)


def used_address_space() -> int | None:
    """Returns the size of the address space in bytes; None on systems other than Linux."""
    if sys.platform != "linux":
        return None
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    return pages * os.sysconf("SC_PAGE_SIZE")
