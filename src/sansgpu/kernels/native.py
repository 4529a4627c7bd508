"""Compiles the C++ kernels for this processor and loads them. If that fails, the plain torch code runs instead.

The compiler vectorizes the plain loops for `-march=native` (AVX-512, AVX2, NEON). Matmuls of tiles call oneDNN, which
supports AMX, AVX512_BF16, AVX-512 and AVX2. The Python module that uses an operator declares its schema; C++ registers
its CPU implementation.
"""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Callable
from pathlib import Path
from subprocess import SubprocessError

import torch
from filelock import FileLock

from sansgpu.machine.allocator import register_trim
from sansgpu.machine.compiled import compiled_in, make_private, require_own_file

SOURCES = Path(__file__).parent / "native"
NAME = "sansgpu_kernels"
# -ffast-math lets the compiler reorder sums to vectorize them; softmax needs infinities to work.
FLAGS = ["-O3", "-march=native", "-ffast-math", "-fno-finite-math-only", "-fopenmp", "-std=c++20"]
if platform.machine() in ("x86_64", "AMD64"):
    FLAGS.append("-mprefer-vector-width=512")

_loaded = _amx = False


def available() -> bool:
    """Returns True if the kernels are loaded in this process."""
    return _loaded


def install_caching_allocator(varying: bool = False) -> None:
    """Installs the caching allocator of memory.cpp, which reuses the memory of freed large tensors, in huge pages.

    Set `varying` if tensor sizes change from step to step, so that the cache does not grow without bound.
    `machine.allocator.trim_memory` returns free memory to the operating system.
    """
    if _loaded:
        torch.ops.sansgpu.use_blocks(varying)
        register_trim(torch.ops.sansgpu.give_back)


def has_amx() -> bool:
    """Returns True if the kernels are loaded and bf16 matmuls use AMX. It reads flags that torch.compile can inline."""
    return _loaded and _amx


def load(cache: Path, announce: Callable[[str], None] = lambda doing: None) -> str | None:
    """Loads the kernels, compiling them first if `cache` has none for this processor and torch version.

    Compiling takes up to a minute, so `announce` is called with a description before it starts.
    Loads libraries only from the private folder of the cache (see `machine.compiled`). Returns None, or the reason why
    plain torch runs instead: no compiler, unsupported instructions, or a folder that other users can write to.
    """
    global _loaded, _amx
    if _loaded:
        return None
    try:
        _load(compiled_in(cache) / "kernels" / _key(), announce)
    except (OSError, RuntimeError, ImportError, SubprocessError) as error:
        return next((line for line in str(error).splitlines() if "error:" in line), str(error).split("\n", 1)[0])
    _loaded, _amx = True, bool(torch.cpu.get_capabilities().get("amx_bf16"))
    return None


def _load(folder: Path, announce: Callable[[str], None]) -> None:
    library, ready = folder / f"{NAME}.so", folder / "ready"
    make_private(folder.parent)
    make_private(folder)
    if not ready.exists():
        announce("compiling the C++ kernels, once for this machine")
    with FileLock(folder / ".lock"):
        if ready.exists():
            require_own_file(library)
            torch.ops.load_library(library)
            return
        from torch.utils import cpp_extension  # slow to import, needed once per machine

        (folder / "lock").unlink(missing_ok=True)  # left by cpp_extension if its process was killed
        cpp_extension.load(
            NAME,
            [str(path) for path in sorted(SOURCES.glob("*.cpp"))],
            extra_cflags=FLAGS,
            extra_ldflags=["-fopenmp"],
            build_directory=str(folder),
            is_python_module=False,
        )
        ready.touch()


def _key() -> str:
    """Returns a hash of everything the compiled code depends on: sources, flags, torch version and CPU features."""
    parts = [str(torch.__version__), *FLAGS, *(f"{k}={v}" for k, v in sorted(torch.cpu.get_capabilities().items()))]
    key = hashlib.sha256("\n".join(parts).encode())
    for path in sorted(SOURCES.iterdir()):
        key.update(path.read_bytes())
    return key.hexdigest()[:16]
