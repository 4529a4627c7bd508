"""Loads the C++ kernels for this processor. Without them, the plain torch code runs instead.

The kernels are plain C functions of pointers, so they depend on no version of Python or torch. CMakeLists.txt compiles
one library for each set in `machine.instruction_sets`, when sansgpu is installed from source or a wheel is built.
"""

from __future__ import annotations

import ctypes
import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from sansgpu.machine.allocator import register_trim
from sansgpu.machine.instruction_sets import InstructionSet, allowed
from sansgpu.machine.openmp import share_openmp

LIBRARIES = Path(__file__).parent / "libraries"  # each with the name of its instruction set
ALLOCATOR = LIBRARIES / "allocator.so"

Argument = torch.Tensor | tuple[int, ...] | float | None
_C_VALUES = frozenset((int, bool, float, type(None)))  # arguments that ctypes converts; asking for tensors takes longer
_DTYPES = (torch.float32, torch.bfloat16)

_library: ctypes.CDLL | None = None
_set: InstructionSet | None = None
_loaded = False


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


def install_caching_allocator(varying: bool, warn: Callable[[str], None]) -> None:
    """Makes torch allocate large CPU tensors with memory.cpp, which reuses the memory of freed ones, in huge pages.

    Set `varying` if tensor sizes change from step to step, so that the cache does not grow without bound.
    `machine.allocator.trim_memory` returns free memory to the operating system. Does nothing where it was not built
    (see CMakeLists.txt), and calls `warn` if torch's own allocator cannot be replaced.
    """
    if not ALLOCATOR.exists():
        return
    library = ctypes.CDLL(str(ALLOCATOR))
    if not library.install(ctypes.c_int64(varying)):
        warn("torch's memory allocator could not be replaced, so steps take more time and memory.")
        return
    library.give_back.restype = ctypes.c_int64
    register_trim(library.give_back)


def load() -> str | None:
    """Loads the best kernels for this processor that are installed.

    Returns None, or the reason why plain torch runs instead. Raises ConfigError if SANSGPU_ISA names an instruction set
    that this processor does not have.
    """
    global _library, _set, _loaded
    if _loaded:
        return None
    installed = [instructions for instructions in allowed() if _path(instructions).exists()]
    if not installed:
        return f"this installation has none for {allowed()[-1].name} on {platform.machine()}"
    try:
        _library, _set = load_library(installed[-1]), installed[-1]
    except OSError as error:
        return str(error)
    _loaded = True
    return None


def load_library(instructions: InstructionSet) -> ctypes.CDLL:
    """Loads the library for an instruction set; its OpenMP functions are those that torch has loaded.

    Raises OSError if the library is missing or does not fit this system.
    """
    share_openmp()
    return ctypes.CDLL(str(_path(instructions)))


def _path(instructions: InstructionSet) -> Path:
    return LIBRARIES / f"{instructions.name}.so"
