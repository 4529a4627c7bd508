"""Compiles the C++ kernels for this processor and loads them. If that fails, the plain torch code runs instead.

The kernels are plain C functions of pointers, so they depend on no version of torch. The compiler vectorizes their
loops for one of the sets in `machine.instruction_sets`. Only the caching allocator is an extension of torch, compiled
apart.
"""

from __future__ import annotations

import ctypes
import hashlib
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from subprocess import SubprocessError
from typing import Any

import torch
from filelock import FileLock

from sansgpu.machine import instruction_sets
from sansgpu.machine.allocator import register_trim
from sansgpu.machine.compilation import cxx
from sansgpu.machine.compiled import compiled_in, make_private, require_own_file
from sansgpu.machine.instruction_sets import InstructionSet
from sansgpu.machine.probe import allowed_cpus

SOURCES = Path(__file__).parent / "native"
ALLOCATOR = Path(__file__).parent / "allocator" / "memory.cpp"
ALLOCATOR_LIBRARY = "sansgpu_allocator.so"
# -ffast-math lets the compiler reorder sums to vectorize them; softmax needs infinities to work. Libraries of several
# instruction sets in one process must not share their functions. GCC's first scheduling, which is on for ARM, loads so
# early that the sums of matmuls no longer fit into the registers.
FLAGS = ["-O3", "-ffast-math", "-fno-finite-math-only", "-fno-schedule-insns", "-fopenmp", "-std=c++20"]
FLAGS += ["-fPIC", "-fvisibility=hidden"]

Argument = torch.Tensor | tuple[int, ...] | float | None
_C_VALUES = frozenset((int, bool, float, type(None)))  # arguments that ctypes converts; asking for tensors takes longer
_DTYPES = (torch.float32, torch.bfloat16)

FAILURES = (OSError, RuntimeError, ImportError, SubprocessError)  # exceptions of compiling and of loading a library

_library: ctypes.CDLL | None = None
_set: InstructionSet | None = None
_loaded = False
_allocator = False


def available() -> bool:
    """Returns True if the kernels are loaded in this process."""
    return _loaded


def name() -> str:
    """Returns `native` and the instruction set of the loaded kernels, or `torch` if none are loaded."""
    return f"native {_set.name}" if _loaded and _set is not None else "torch"


def call(name: str, *arguments: Argument) -> int:
    """Calls a kernel with the C values of the arguments.

    A tensor becomes a pointer to its data, a tuple of ints a pointer to int64_t, None a null pointer, an int or bool an
    int64_t, and a float a double. Returns the kernel's int64_t, which is meaningless if the kernel returns nothing.
    Tensors must be on the CPU, and their dtypes and strides must be those that the kernel expects.
    """
    return call_function(getattr(_library, name), *arguments)


def takes(*tensors: torch.Tensor) -> bool:
    """Returns True if the kernels are loaded and take these tensors: fp32 or bf16, on the CPU."""
    return _loaded and all(tensor.is_cpu and tensor.dtype in _DTYPES for tensor in tensors)


def usable(*tensors: torch.Tensor) -> bool:
    """Returns True if element-wise kernels can run on these tensors: `takes` without torch.compile.

    While torch.compile traces, plain code is better: it fuses that, but would leave a compiled graph to call a kernel.
    """
    return not torch.compiler.is_compiling() and takes(*tensors)


def call_function(function: Any, *arguments: Argument) -> int:
    """Calls a function of a loaded library; `call` describes the arguments."""
    if function.argtypes is None:
        function.argtypes, function.restype = [*map(_c_type, arguments)], ctypes.c_int64
    return int(function(*[a if type(a) in _C_VALUES else _pointer(a) for a in arguments]))


def _pointer(argument: Any) -> int | ctypes.Array[ctypes.c_int64]:
    return (ctypes.c_int64 * len(argument))(*argument) if isinstance(argument, tuple) else argument.data_ptr()


def _c_type(argument: Argument) -> type[ctypes.c_void_p] | type[ctypes.c_double] | type[ctypes.c_int64]:
    if argument is None or isinstance(argument, torch.Tensor | tuple):
        return ctypes.c_void_p
    return ctypes.c_double if isinstance(argument, float) else ctypes.c_int64


def install_caching_allocator(varying: bool = False) -> None:
    """Installs the caching allocator of memory.cpp, which reuses the memory of freed large tensors, in huge pages.

    Set `varying` if tensor sizes change from step to step, so that the cache does not grow without bound.
    `machine.allocator.trim_memory` returns free memory to the operating system.
    """
    if _allocator:
        torch.ops.sansgpu.use_blocks(varying)
        register_trim(torch.ops.sansgpu.give_back)


def load(
    cache: Path, announce: Callable[[str], None] = lambda doing: None, warn: Callable[[str], None] = lambda text: None
) -> str | None:
    """Loads the kernels, compiling them first if `cache` has none for this processor, and the caching allocator.

    Compiling takes up to a minute, so `announce` is called with a description before it starts. Loads libraries only
    from the private folder of the cache (see `machine.compiled`). Returns None, or the reason why plain torch runs
    instead: no compiler, or a folder that other users can write to. If only the allocator cannot be compiled, calls
    `warn`. Raises ConfigError if SANSGPU_ISA names an instruction set that this processor does not have.
    """
    global _library, _set, _loaded, _allocator
    if _loaded:
        return None
    chosen = instruction_sets.chosen()
    try:
        root = compiled_in(cache) / "kernels"
        make_private(root)
        _library, _set = load_library(root, chosen, announce), chosen
    except FAILURES as error:
        return _first_error(error)
    _loaded = True
    try:
        _load_allocator(root, announce)
        _allocator = True
    except FAILURES as error:
        warn(f"the memory allocator cannot be compiled ({_first_error(error)}), so steps take more time and memory.")
    return None


def _first_error(error: Exception) -> str:
    """Returns the line of a compiler's output that names the error, or the first line."""
    return next((line for line in str(error).splitlines() if "error:" in line), str(error).split("\n", 1)[0])


def load_library(root: Path, instructions: InstructionSet, announce: Callable[[str], None]) -> ctypes.CDLL:
    """Returns the library of the kernels for an instruction set from the folder `root`; compiles it if it is missing.

    Raises one of FAILURES.
    """
    library = root / library_name(instructions)
    with FileLock(root / f".{library.name}.lock"):
        if not library.exists():
            announce("compiling the C++ kernels, once for this machine")
            compile_kernels(library, [*FLAGS, *instructions.flags], sorted(SOURCES.glob("*.cpp")))
    require_own_file(library)
    return ctypes.CDLL(str(library))


def library_name(instructions: InstructionSet) -> str:
    """Returns the file name of the kernels' library, which differs for other instructions, flags or sources."""
    return f"{instructions.name}-{_key(sorted(SOURCES.iterdir()), [*FLAGS, *instructions.flags])}.so"


def allocator_name() -> str:
    """Returns the name of the folder of the allocator, which differs for another version of torch or other sources."""
    return f"allocator-{_key([ALLOCATOR], [str(torch.__version__)])}"


def compile_kernels(library: Path, flags: list[str], sources: list[Path]) -> None:
    """Compiles sources to a shared library, one on each processor. Raises OSError or SubprocessError with errors."""
    compiler = cxx()
    if compiler is None:
        raise SubprocessError("there is no C++ compiler")
    with tempfile.TemporaryDirectory(dir=library.parent) as folder, ThreadPoolExecutor(allowed_cpus()) as pool:
        objects = [str(Path(folder) / f"{path.stem}.o") for path in sources]
        commands = [[compiler, *flags, "-c", str(p), "-o", o] for p, o in zip(sources, objects, strict=True)]
        list(pool.map(_run_compiler, commands))
        made = Path(folder) / library.name
        _run_compiler([compiler, "-shared", "-fopenmp", *objects, "-o", str(made)])
        shutil.move(made, library)


def _run_compiler(command: list[str]) -> None:
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode != 0:
        raise SubprocessError(done.stdout or f"{command[0]} ended with status {done.returncode}")


def _load_allocator(root: Path, announce: Callable[[str], None]) -> None:
    """Loads the caching allocator, compiling it first if it is missing for this version of torch."""
    folder = root / allocator_name()
    make_private(folder)
    library, ready = folder / ALLOCATOR_LIBRARY, folder / "ready"
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
