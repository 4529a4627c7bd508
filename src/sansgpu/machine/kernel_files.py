"""Reads the small files in which the kernel reports its state."""

from __future__ import annotations

import ctypes
import os
import re
from pathlib import Path


def kernel_text(path: Path) -> str:
    """Returns the text of a file without surrounding white space, or "" if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def kernel_number(path: Path) -> int | None:
    """Returns the integer at the start of a file, or None if there is none."""
    word = next(iter(kernel_text(path).split()), "")
    return int(word) if word.lstrip("-").isdecimal() else None


def openmp_files() -> set[Path]:
    """Returns the libraries of the OpenMP runtimes that this process has loaded. Empty where there is no /proc."""
    mappings = [line.split(maxsplit=5) for line in kernel_text(Path("/proc/self/maps")).splitlines()]
    files = {Path(fields[5]) for fields in mappings if len(fields) == 6}  # the path may contain spaces
    return {file for file in files if re.fullmatch(r"lib(gomp|iomp5|omp)\S*\.so\S*", file.name)}


def share_openmp() -> None:
    """Lets libraries that are loaded from now on use the functions of the loaded OpenMP runtimes.

    On x86-64 torch has done that already, but not on ARM.
    """
    for file in sorted(openmp_files()):
        ctypes.CDLL(str(file), mode=ctypes.RTLD_GLOBAL | os.RTLD_NOLOAD)
