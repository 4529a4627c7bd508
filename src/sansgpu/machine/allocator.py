"""The C allocator, tuned for tensors."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable

_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4  # of glibc's malloc.h


def keep_freed_memory() -> bool:
    """Have glibc reuse large blocks; by default it gives each back to the kernel, and takes page faults for the next.

    Worth 10-25 % of a step of a 7M-parameter model. Returns whether there was a glibc to ask.
    """
    if not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # musl has none
    return mallopt is not None and bool(mallopt(_M_MMAP_MAX, 0)) and bool(mallopt(_M_TRIM_THRESHOLD, -1))


_others: list[Callable[[], object]] = []


def also_give_back(give: Callable[[], object]) -> None:
    """Another allocator that can give memory back."""
    if give not in _others:
        _others.append(give)


def give_back_memory() -> None:
    """Give the kernel back what is free in the heap."""
    for give in _others:
        give()
    if sys.platform.startswith("linux"):
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)
