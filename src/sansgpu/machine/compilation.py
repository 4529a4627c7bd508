"""Decides when torch.compile pays off, and sets it up."""

from __future__ import annotations

import os
import shutil
import sysconfig
from collections.abc import Callable
from pathlib import Path

from sansgpu.config import ConfigError, TrainingConfig
from sansgpu.files.atomic import PRIVATE_MODE, make_folder
from sansgpu.machine.compiled import compiled_in, require_safe_path

INDUCTOR_DIR = "TORCHINDUCTOR_CACHE_DIR"
COMPILE_SECONDS = 30.0  # measured: compiling and timing all graphs of a 12-layer model on two cores
MAX_GRAPHS = 64  # limit of a block in a process (default 8): calibration and memory pressure vary the micro-batch
# Share of an eager step that compiling saves, measured for 10M-100M parameters. Our kernels leave little to fuse.
NATIVE_SAVED_RATIO, TORCH_SAVED_RATIO = 0.03, 0.25
# FLOP/s of an eager step per core. Assumed rather than measured, so that the decision is reproducible.
EAGER_FLOPS_PER_SECOND = {"fp32": 35e9, "bf16": 80e9}


def eager_seconds(total_flops: float, precision: str, threads: int) -> float:
    """Returns the assumed duration of a run with these total FLOPs if nothing is compiled."""
    return total_flops / (EAGER_FLOPS_PER_SECOND[precision] * threads)


def saves_compile_time(seconds: float, kernels: str) -> bool:
    """Returns whether a run that takes `seconds` if nothing is compiled is long enough for compilation to pay off.

    `kernels` is `native.name()`.
    """
    return seconds * (TORCH_SAVED_RATIO if kernels == "torch" else NATIVE_SAVED_RATIO) > COMPILE_SECONDS


def resolve_compile(training: TrainingConfig, pays_off: bool, device: str) -> str:
    """Returns `on` or `off`, or `measure` if `training.compile` is auto and the run is long enough to pay for it.

    Raises ConfigError if compilation is requested but impossible here.
    """
    missing = missing_compiler() if device == "cpu" else None
    if training.compile == "on" and missing:
        raise ConfigError(f"training.compile is on, but {missing} is missing; install it or set compile to auto.")
    if training.compile != "auto":
        return training.compile
    return "measure" if pays_off and not missing else "off"


def cxx() -> str | None:
    """Returns the path of the C++ compiler, $CXX if it is set, or None."""
    names = (os.environ.get("CXX", ""), "c++", "g++", "clang++")
    return next((path for name in names if (path := shutil.which(name))), None)


def missing_compiler() -> str | None:
    """Returns the name of the first requirement of torch.compile that this machine lacks, or None."""
    if cxx() is None:
        return "a C++ compiler"
    if not (Path(sysconfig.get_paths()["include"]) / "Python.h").exists():
        return "Python's header Python.h"
    return None


def compile_into(folder: Path) -> None:
    """Sets `folder` as the cache of compiled graphs for this process."""
    os.environ[INDUCTOR_DIR] = str(folder / "inductor")


def keep_compiled(cache: Path, warn: Callable[[str], None]) -> None:
    """Sets `cache` as the cache of compiled graphs, because torch's default is a temporary folder.

    $TORCHINDUCTOR_CACHE_DIR takes precedence unless other users could change its content.
    """
    if chosen := os.environ.get(INDUCTOR_DIR):
        try:
            make_folder(Path(chosen), PRIVATE_MODE)
            require_safe_path(Path(chosen))
            return
        except OSError as error:
            reason = error.strerror or error
            warn(f"{INDUCTOR_DIR} is not used, because {reason}; set it to a folder that only you can write.")
    os.environ[INDUCTOR_DIR] = str(compiled_in(cache) / "inductor")


def set_up_compiler() -> None:
    """Raises torch's limit on recompilations, because micro-batch shapes vary within a process.

    Also tells torch which vector instructions it supports. Otherwise it would compile and load a program for each set
    of them before the first graph, which takes a third of all compilation.
    """
    import torch._dynamo.config  # takes two seconds to import
    import torch._inductor.config

    torch._dynamo.config.recompile_limit = MAX_GRAPHS
    best = "AVX512" if torch.cpu.get_capabilities().get("avx512_f") else "AVX2"
    if torch._inductor.config.cpp.vec_isa_ok is None and torch.backends.cpu.get_cpu_capability() == best:
        torch._inductor.config.cpp.vec_isa_ok = True
