"""Environment settings that must precede the import of torch. This module does not import torch."""

from __future__ import annotations

import math
import os
import signal
import sys

from sansgpu.machine import cgroup
from sansgpu.machine.interrupt import unhandled_signals

SPINS = 20_000  # x86 pauses, which take half a millisecond on Zen 4
CONTENDED_SPINS = 3_000  # faster while other programs use some cores, a few percent slower on an idle machine
SPARE_CORES = 0.5  # tolerance: the load may exceed the cores left to other programs by this


def set_openmp() -> None:
    """Makes OpenMP use the requested number of threads, and lets them spin briefly before they sleep.

    GNU OpenMP spins for milliseconds by default. That gains nothing on an idle machine, and slows a step down several
    times if another process uses one of two cores. libgomp reads the settings once, when torch is loaded, so the load
    at the start of the run decides. The user's OMP_DYNAMIC, OMP_WAIT_POLICY and GOMP_SPINCOUNT win.
    """
    os.environ.setdefault("OMP_DYNAMIC", "FALSE")  # also while other programs use the cores
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", str(CONTENDED_SPINS if _contended() else SPINS))


def _contended() -> bool:
    """Returns whether the load average of the last minute leaves this process fewer cores than it may use."""
    if not hasattr(os, "getloadavg") or not hasattr(os, "sched_getaffinity"):
        return False
    usable = min(len(os.sched_getaffinity(0)), cgroup.cpu_quota() or math.inf)
    return (os.cpu_count() or 1) - os.getloadavg()[0] < usable - SPARE_CORES


def make_deterministic() -> None:
    """Sets environment variables for reproducible runs, without overriding the user's.

    Python fixes its hash seed at startup, so if PYTHONHASHSEED is not set, this re-executes the process.
    """
    make_cublas_deterministic()
    if "PYTHONHASHSEED" not in os.environ:
        os.environ["PYTHONHASHSEED"] = "0"
        if os.name == "posix" and sys.executable:
            # Blocked until the new process installs its handlers; during startup SIGINT would print a traceback.
            signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT, *unhandled_signals()])
            os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def make_cublas_deterministic() -> bool:
    """Makes reductions of cuBLAS deterministic, unless the user chose otherwise. Returns False if it is too late.

    cuBLAS reads the variable when CUDA is first used.
    """
    torch = sys.modules.get("torch")
    late = "CUBLAS_WORKSPACE_CONFIG" not in os.environ and torch is not None and torch.cuda.is_initialized()
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    return not late


def has_random_hashes() -> bool:
    """Returns whether the hashes of strings, which order sets, differ between processes."""
    seed = os.environ.get("PYTHONHASHSEED", "random")
    return bool(sys.flags.hash_randomization) and seed in ("random", "0")  # 0 had no effect if it was set too late


def quiet_profiler() -> None:
    """Silences torch's profiler; call it before the profiler is first used."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # above all severities
