"""Decides whether to use torch.compile: on a GPU or with `training.kernels: torch`, i.e. without our kernels."""

from __future__ import annotations

import os
import shutil
import sysconfig
from pathlib import Path

from sansgpu.config import ConfigError
from sansgpu.events.progress import Warn
from sansgpu.files.atomic import PRIVATE_MODE, make_folder
from sansgpu.machine.cache_folder import private_cache
from sansgpu.machine.private_folder import require_safe_path

COMPILE_SECONDS = 30.0  # measured: compiling all graphs of a 12-layer model on two cores
SAVED_RATIO = 0.25  # share of an eager step that compiling saves, measured for 10M-100M parameters
INDUCTOR_DIR = "TORCHINDUCTOR_CACHE_DIR"


def is_compiled(asked: str, kernels: str, device: str) -> bool:
    """Returns True if `training.compile` is on and has an effect; it has none where our kernels are used."""
    return asked == "on" and (kernels == "torch" or device != "cpu")


def resolve_compile(asked: str, recorded: str | None, seconds: float, kernels: str, device: str, warn: Warn) -> str:
    """Returns `on` or `off` for `training.compile`; `auto` repeats the choice `recorded` when the run began.

    With `auto`, a new run compiles if that saves time. `seconds` is its assumed duration without compilation.
    Raises ConfigError if compilation is requested but impossible here.
    """
    if not is_compiled("on", kernels, device):
        if asked == "on":
            warn(
                "training.compile is on, but has no effect, because this model uses sansgpu's C++ kernels; set it to "
                "auto."
            )
        return "off"
    missing = missing_compiler() if device == "cpu" else None
    if asked == "on" and missing:
        raise ConfigError(f"training.compile is on, but {missing} is missing; install it or set compile to auto.")
    if asked != "auto":
        return asked
    pays_off = seconds * SAVED_RATIO > COMPILE_SECONDS
    if missing:
        if pays_off:
            warn(f"torch.compile would make this run faster, but {missing} is missing; install it.")
        return "off"
    return recorded or ("on" if pays_off else "off")


def cxx() -> str | None:
    """Returns the path of the C++ compiler, $CXX if it is set, or None."""
    names = (os.environ.get("CXX", ""), "c++", "g++", "clang++")
    return next((path for name in names if (path := shutil.which(name))), None)


def missing_compiler() -> str | None:
    """Returns the name of the first requirement of torch.compile that this machine lacks, or None."""
    if cxx() is None:
        return "a C++ compiler"
    if not (Path(sysconfig.get_paths()["include"]) / "Python.h").exists():
        return "the header file Python.h"
    return None


def keep_graphs(warn: Warn) -> None:
    """Keeps compiled graphs in the private cache folder, because torch's default is a temporary folder.

    $TORCHINDUCTOR_CACHE_DIR takes precedence unless other users could change its content.
    """
    if chosen := os.environ.get(INDUCTOR_DIR):
        try:
            make_folder(Path(chosen), PRIVATE_MODE)
            require_safe_path(Path(chosen))
            return
        except OSError as error:
            reason = error.strerror or error
            warn(f"{INDUCTOR_DIR} is not used, because {reason}; set it to a folder that only you can write to.")
    os.environ[INDUCTOR_DIR] = str(private_cache(warn) / "inductor")


def ignore_cached_graphs() -> None:
    """Disables the cache of compiled graphs in this process."""
    os.environ["TORCHINDUCTOR_FORCE_DISABLE_CACHES"] = "1"
