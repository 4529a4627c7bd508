"""C++ kernels, compiled for this processor once and then loaded. If that fails, plain torch does the work.

Compilers vectorise the plain loops for what `-march=native` finds (AVX-512, AVX2, NEON); products of tiles are
oneDNN's, which has AMX, AVX512_BF16, AVX-512 and AVX2 forms. The operators are declared in Python, beside what uses
them; C++ adds their CPU form.
"""

from __future__ import annotations

import hashlib
import platform
from pathlib import Path

import torch
from filelock import FileLock

from sansgpu.machine.allocator import also_give_back
from sansgpu.machine.compiled import compiled_in, make_private, require_own_file

SOURCES = Path(__file__).parent / "native"
NAME = "sansgpu_kernels"
# Reassociation lets sums vectorise; infinities must keep their meaning.
FLAGS = ["-O3", "-march=native", "-ffast-math", "-fno-finite-math-only", "-fopenmp", "-std=c++20"]
if platform.machine() in ("x86_64", "AMD64"):
    FLAGS.append("-mprefer-vector-width=512")

_loaded = _amx = False


def available() -> bool:
    """Whether this process has the kernels."""
    return _loaded


def keep_blocks(varying: bool = False) -> None:
    """From now on, have large tensors' memory kept when it is freed and used again, in huge pages; see memory.cpp.

    `varying` where tensors have other sizes at every step, and what is kept would become ever more.
    `machine.allocator.give_back_memory` gives the kernel back what is free.
    """
    if _loaded:
        torch.ops.sansgpu.use_blocks(varying)
        also_give_back(torch.ops.sansgpu.give_back)


def has_amx() -> bool:
    """Whether it has them on a processor whose bf16 products are AMX's. A plain flag, so that it can be compiled in."""
    return _loaded and _amx


def load(cache: Path) -> str | None:
    """Load the kernels, compiling them first if `cache` has none for this processor and this torch.

    Libraries are read from the private folder of the cache alone (`machine.compiled`). Returns None, or the reason for
    which plain torch does the work: no compiler, a processor without the instructions, a folder that others can write.
    """
    global _loaded, _amx
    if _loaded:
        return None
    try:
        _load(compiled_in(cache) / "kernels" / _key())
    except (OSError, RuntimeError, ImportError) as error:
        return next((line for line in str(error).splitlines() if "error:" in line), str(error).split("\n", 1)[0])
    _loaded, _amx = True, bool(torch.cpu.get_capabilities().get("amx_bf16"))
    return None


def _load(folder: Path) -> None:
    library, ready = folder / f"{NAME}.so", folder / "ready"
    make_private(folder.parent)
    make_private(folder)
    with FileLock(folder / ".lock"):
        if ready.exists():
            require_own_file(library)
            torch.ops.load_library(library)
            return
        from torch.utils import cpp_extension  # slow to import, and needed once a machine

        (folder / "lock").unlink(missing_ok=True)  # cpp_extension's own, of a process that was killed
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
    """Of all the compiled code depends on: sources, flags, torch, and what `native` stands for."""
    parts = [str(torch.__version__), *FLAGS, *(f"{k}={v}" for k, v in sorted(torch.cpu.get_capabilities().items()))]
    key = hashlib.sha256("\n".join(parts).encode())
    for path in sorted(SOURCES.iterdir()):
        key.update(path.read_bytes())
    return key.hexdigest()[:16]
