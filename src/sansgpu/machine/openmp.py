"""The OpenMP runtimes of this process."""

from __future__ import annotations

import ctypes
import os
import re
from pathlib import Path

from sansgpu.machine.kernel_files import kernel_text


def openmp_files() -> set[Path]:
    """Returns the libraries of the OpenMP runtimes that this process has loaded. Empty where there is no /proc."""
    maps = kernel_text(Path("/proc/self/maps"))
    return {Path(file) for file in re.findall(r"/\S*/lib(?:gomp|iomp5|omp)[^/\s]*\.so[^/\s]*", maps)}


def share_openmp() -> None:
    """Lets libraries that are loaded from now on use the functions of the loaded OpenMP runtimes.

    On x86-64 torch has done that already, but not on ARM.
    """
    for file in sorted(openmp_files()):
        ctypes.CDLL(str(file), mode=ctypes.RTLD_GLOBAL | os.RTLD_NOLOAD)
