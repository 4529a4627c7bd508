"""When torch.compile pays for a run, and the folder of its graphs."""

from __future__ import annotations

import os
import shutil
import sysconfig
from collections.abc import Callable
from pathlib import Path

from sansgpu.config import ConfigError, TrainingConfig
from sansgpu.machine.compiled import compiled_in, require_safe_path

INDUCTOR_DIR = "TORCHINDUCTOR_CACHE_DIR"
COMPILE_SECONDS = 30.0  # of a 12-layer model on two cores, training and evaluation graphs, and timing it
SHAPES = 64  # of a block in one process: micro-batches that are measured, or cut as memory runs short; torch stops at 8
SAVED_SHARE = 0.25  # of an eager step, as measured for 10M-100M parameters
# What an eager step reaches a core. An assumption and no measurement, so that equal runs decide alike.
EAGER_FLOPS_PER_SECOND = {"fp32": 35e9, "bf16": 80e9}


def is_long(total_flops: float, precision: str, threads: int) -> bool:
    """Whether a run is so long that what compiling may save exceeds what it takes."""
    return is_long_time(total_flops / (EAGER_FLOPS_PER_SECOND[precision] * threads))


def is_long_time(seconds: float) -> bool:
    """The same, where the time is known."""
    return seconds * SAVED_SHARE > COMPILE_SECONDS


def resolve_compile(training: TrainingConfig, long: bool, device: str) -> str:
    """`on`, `off`, or `measure` where it is left to us and the run is long.

    Raises ConfigError where it was asked for and cannot be had.
    """
    missing = missing_for_compile() if device == "cpu" else None
    if training.compile == "on" and missing:
        raise ConfigError(f"training.compile is on, but {missing} is missing; install it or set compile to auto.")
    if training.compile != "auto":
        return training.compile
    return "measure" if long and not missing else "off"


def cxx() -> str | None:
    """The C++ compiler's path, or None."""
    return next((path for name in ("c++", "g++", "clang++") if (path := shutil.which(name))), None)


def missing_for_compile() -> str | None:
    """What torch.compile lacks on this machine, or None."""
    if cxx() is None:
        return "a C++ compiler"
    if not (Path(sysconfig.get_paths()["include"]) / "Python.h").exists():
        return "Python's header Python.h"
    return None


def compile_into(folder: Path) -> None:
    """Start without compiled graphs, and write new ones to `folder`."""
    os.environ[INDUCTOR_DIR] = str(folder / "inductor")


def keep_compiled(cache: Path, warn: Callable[[str], None]) -> None:
    """Have torch.compile read and write its graphs in `cache`, not in the temporary folder, which a reboot empties.

    The user's own $TORCHINDUCTOR_CACHE_DIR goes first, unless other users could change what is in it.
    """
    if chosen := os.environ.get(INDUCTOR_DIR):
        try:
            Path(chosen).mkdir(parents=True, exist_ok=True)
            require_safe_path(Path(chosen))
            return
        except OSError as error:
            reason = error.strerror or error
            warn(f"{INDUCTOR_DIR} is not used, because {reason}; set it to a folder that only you can write.")
    os.environ[INDUCTOR_DIR] = str(compiled_in(cache) / "inductor")


def expect_shapes() -> None:
    """Have torch compile one graph for each shape there may be in a process."""
    import torch._dynamo.config  # two seconds of imports that only compiling needs

    torch._dynamo.config.recompile_limit = SHAPES
