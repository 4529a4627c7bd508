"""Compiles the C++ kernels for this processor and loads them. If that fails, the plain torch code runs instead.

The kernels are plain C functions of pointers, so they depend on no version of torch. The compiler vectorizes their
loops for one of the sets in `instruction_sets`. Only the caching allocator is an extension of torch, compiled apart.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from subprocess import SubprocessError

import torch
from filelock import FileLock

from sansgpu.kernels import instruction_sets
from sansgpu.kernels.instruction_sets import InstructionSet
from sansgpu.machine.allocator import register_trim
from sansgpu.machine.compiled import compiled_in, make_private, require_own_file

SOURCES = Path(__file__).parent / "native"
ALLOCATOR = Path(__file__).parent / "allocator" / "memory.cpp"
# -ffast-math lets the compiler reorder sums to vectorize them; softmax needs infinities to work. Libraries of several
# instruction sets in one process must not share their functions.
FLAGS = ["-O3", "-ffast-math", "-fno-finite-math-only", "-fopenmp", "-std=c++20", "-fPIC", "-fvisibility=hidden"]

_library: ctypes.CDLL | None = None
_set: InstructionSet | None = None
_loaded = _allocator = False


def available() -> bool:
    """Returns True if the kernels are loaded in this process."""
    return _loaded


def call(name: str, *arguments: torch.Tensor | float | None) -> int:
    """Calls a kernel with tensors as pointers to their data, None as null, int and bool as int64_t, float as double.

    Returns its int64_t, which is meaningless if the kernel returns nothing. Tensors must be on the CPU, and their
    dtypes and strides must be those that the kernel expects.
    """
    function = getattr(_library, name)
    function.restype = ctypes.c_int64
    return int(function(*map(_c_value, arguments)))


def _c_value(argument: torch.Tensor | float | None) -> ctypes.c_void_p | ctypes.c_double | ctypes.c_int64:
    if isinstance(argument, torch.Tensor):
        return ctypes.c_void_p(argument.data_ptr())
    if argument is None:
        return ctypes.c_void_p(None)
    return ctypes.c_double(argument) if isinstance(argument, float) else ctypes.c_int64(argument)


def install_caching_allocator(varying: bool = False) -> None:
    """Installs the caching allocator of memory.cpp, which reuses the memory of freed large tensors, in huge pages.

    Set `varying` if tensor sizes change from step to step, so that the cache does not grow without bound.
    `machine.allocator.trim_memory` returns free memory to the operating system.
    """
    if _allocator:
        torch.ops.sansgpu.use_blocks(varying)
        register_trim(torch.ops.sansgpu.give_back)


def has_amx() -> bool:
    """Returns True if the kernels are loaded and bf16 matmuls use AMX. It reads flags that torch.compile can inline."""
    return _loaded and _set is not None and _set.name == "amx"


def load(cache: Path, announce: Callable[[str], None] = lambda doing: None) -> str | None:
    """Loads the kernels, compiling them first if `cache` has none for this processor and torch version.

    Compiling takes up to a minute, so `announce` is called with a description before it starts.
    Loads libraries only from the private folder of the cache (see `machine.compiled`). Returns None, or the reason why
    plain torch runs instead: no compiler, unsupported instructions, or a folder that other users can write to.
    Raises ConfigError if SANSGPU_ISA names an instruction set that this processor does not have.
    """
    global _library, _set, _loaded, _allocator
    if _loaded:
        return None
    chosen = instruction_sets.chosen()
    try:
        root = compiled_in(cache) / "kernels"
        make_private(root)
        _library, _set = ctypes.CDLL(str(_kernels(root, chosen, announce))), chosen
        _load_allocator(root, announce)
    except (OSError, RuntimeError, ImportError, SubprocessError) as error:
        return next((line for line in str(error).splitlines() if "error:" in line), str(error).split("\n", 1)[0])
    _loaded = _allocator = True
    return None


def _kernels(root: Path, chosen: InstructionSet, announce: Callable[[str], None]) -> Path:
    """Returns the path of the kernels' library for an instruction set; compiles it if it is missing."""
    sources = sorted(SOURCES.iterdir())
    flags = [*FLAGS, *chosen.flags]
    library = root / f"{chosen.name}-{_key(sources, flags)}.so"
    with FileLock(root / f".{library.name}.lock"):
        if not library.exists():
            announce("compiling the C++ kernels, once for this machine")
            ready = [p for p in sources if p.suffix == ".cpp" and "torch/" not in p.read_text()]
            compile_kernels(library, flags, ready)
    require_own_file(library)
    return library


def compile_kernels(library: Path, flags: list[str], sources: list[Path], compiler: str | None = None) -> None:
    """Compiles sources to a shared library, all at once. Raises OSError or SubprocessError with its errors."""
    compiler = compiler or os.environ.get("CXX") or "g++"
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        objects = [Path(folder) / f"{path.stem}.o" for path in sources]
        commands = [[compiler, *flags, "-c", str(p), "-o", str(o)] for p, o in zip(sources, objects, strict=True)]
        running = [subprocess.Popen(c, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) for c in commands]
        outputs = [process.communicate()[0] for process in running]
        for process, output in zip(running, outputs, strict=True):
            if process.returncode != 0:
                raise SubprocessError(output or f"{compiler} ended with status {process.returncode}")
        made = Path(folder) / library.name
        link = [compiler, "-shared", "-fopenmp", *map(str, objects), "-o", str(made)]
        subprocess.run(link, check=True, capture_output=True, text=True)
        shutil.move(made, library)


def _load_allocator(root: Path, announce: Callable[[str], None]) -> None:
    """Loads the caching allocator, compiling it first if it is missing for this version of torch."""
    folder = root / f"allocator-{_key([ALLOCATOR], [str(torch.__version__)])}"
    make_private(folder)
    library, ready = folder / "sansgpu_allocator.so", folder / "ready"
    with FileLock(folder / ".lock"):
        if ready.exists():
            require_own_file(library)
            torch.ops.load_library(library)
            return
        announce("compiling the memory allocator, once for this version of torch")
        from torch.utils import cpp_extension  # slow to import, needed once per machine

        (folder / "lock").unlink(missing_ok=True)  # left by cpp_extension if its process was killed
        cpp_extension.load(
            library.stem,
            [str(ALLOCATOR)],
            extra_cflags=["-O3", "-std=c++20"],
            build_directory=str(folder),
            is_python_module=False,
        )
        ready.touch()


def _key(sources: list[Path], parts: list[str]) -> str:
    """Returns a hash of everything that compiled code depends on."""
    key = hashlib.sha256("\n".join(parts).encode())
    for path in sources:
        key.update(path.read_bytes())
    return key.hexdigest()[:16]
