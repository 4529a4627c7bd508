"""Loads the C++ kernels for this processor. Without them, the plain torch code runs instead.

The kernels are plain C functions that take pointers, so they depend on no version of Python or torch. CMakeLists.txt
compiles one library for each set in `machine.instruction_sets`, when sansgpu is installed from source or a wheel is
built.
"""

from __future__ import annotations

import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from sansgpu.config import ConfigError
from sansgpu.events.progress import Warn
from sansgpu.kernels.c_functions import Argument, Function, functions
from sansgpu.machine import allocator
from sansgpu.machine.instruction_sets import InstructionSet, allowed
from sansgpu.machine.kernel_files import share_openmp

LIBRARIES = Path(__file__).parent / "libraries"  # one per instruction set, named after it
ALLOCATOR = LIBRARIES / "allocator.so"

_DTYPES = (torch.float32, torch.bfloat16)

_library: Mapping[str, Function] = {}
_set: InstructionSet | None = None
_loaded = False


def available() -> bool:
    """Returns True if the kernels are loaded in this process."""
    return _loaded


def name() -> str:
    """Returns `native` and the instruction set of the loaded kernels, or `torch` if none are loaded."""
    return f"native {_set.name}" if _loaded and _set is not None else "torch"


def multiplies_int8() -> bool:
    """Returns whether the loaded kernels multiply 8-bit integers faster than any other numbers."""
    return _loaded and _set is not None and _set.int8


def call(name: str, *arguments: Argument) -> Any:
    """Calls a kernel with arguments as described at `Function`. Returns its int64_t result, or None if it is void."""
    return _library[name](*arguments)


def takes(*tensors: torch.Tensor) -> bool:
    """Returns True if the kernels are loaded and support these tensors: fp32 or bf16, on the CPU."""
    return _loaded and all(tensor.is_cpu and tensor.dtype in _DTYPES for tensor in tensors)


def why_no_caching_allocator() -> str | None:
    """Returns the reason why runs on this machine leave large tensors to torch's own allocator, or None."""
    if not ALLOCATOR.exists():
        return "this installation does not include it, because it works only on Linux on x86-64"
    return f"{allocator.VARIABLE} is system" if allocator.keeps_system_allocator() else None


def install_caching_allocator(varying: bool, warn: Warn) -> None:
    """Makes torch allocate large CPU tensors with memory.cpp, which reuses the memory of freed ones, in huge pages.

    Set `varying` if tensor sizes change from step to step, so that the cache does not grow without bound.
    `machine.allocator.trim_memory` returns free memory to the operating system. Does nothing if the allocator was not
    built (see CMakeLists.txt) or is turned off. Calls `warn` if torch's own allocator cannot be replaced.
    """
    if why_no_caching_allocator() is not None:
        return
    caching = functions(ALLOCATOR)
    if not caching["install"](varying):
        warn("sansgpu's caching allocator could not be installed, so steps take more time and memory.")
        return
    allocator.register_trim(caching["give_back"])


def load() -> str | None:
    """Loads the best installed kernels for this processor.

    Returns None, or the reason why plain torch runs instead. Raises ConfigError if SANSGPU_ISA names an instruction set
    that this processor does not have.
    """
    global _library, _set, _loaded
    if _loaded:
        return None
    installed = [instructions for instructions in allowed() if _path(instructions).exists()]
    if not installed:
        return f"this installation does not include kernels for {allowed()[-1].name} on {platform.machine()}"
    try:
        _library, _set = load_library(installed[-1]), installed[-1]
    except OSError as error:
        return str(error)
    _loaded = True
    return None


def load_kernels(requested: str, device: torch.device, warn: Warn) -> str:
    """Loads the kernels that `training.kernels` (auto, native or torch) requests; returns `name()`.

    Raises ConfigError if native kernels are required but cannot be loaded.
    """
    if requested == "torch" or (requested == "auto" and device.type != "cpu"):
        return "torch"
    reason = load()
    if reason is None:
        return name()
    if requested == "native":
        raise ConfigError(
            f"training.kernels is native, but the C++ kernels cannot be loaded ({reason}); set it to auto."
        )
    warn(f"sansgpu's C++ kernels cannot be loaded ({reason}), so PyTorch operators are used, which are slower.")
    return "torch"


def load_kernels_and_allocators(requested: str, device: torch.device, varying: bool, warn: Warn) -> str:
    """Loads the kernels as `load_kernels` does, and lets the process reuse the memory of freed tensors.

    Without that, page faults take a tenth to a quarter of the time. Set `varying` as for `install_caching_allocator`.
    """
    allocator.keep_freed_memory()
    kernels = load_kernels(requested, device, warn)
    if kernels != "torch":
        install_caching_allocator(varying, warn)
    return kernels


def load_library(instructions: InstructionSet) -> Mapping[str, Function]:
    """Loads the kernels for an instruction set, which use the OpenMP runtime that torch has loaded.

    Raises OSError if the library is missing or this system cannot load it.
    """
    share_openmp()
    return functions(_path(instructions))


def _path(instructions: InstructionSet) -> Path:
    return LIBRARIES / f"{instructions.name}.so"
