"""Environment settings that must precede the import of torch. This module does not import torch."""

from __future__ import annotations

import math
import os
import signal
import sys

from sansgpu.machine import cgroup

SPINS = 20_000  # tens of microseconds: about the time between two matrix products
CONTENDED_SPINS = 3_000  # faster while other programs use some cores, a few percent slower on an idle machine
SPARE_CORES = 0.5  # tolerance: the load may exceed the cores left to other programs by this


def set_openmp_spin() -> None:
    """Lets OpenMP threads spin briefly before they sleep, unless the user has set OMP_WAIT_POLICY or GOMP_SPINCOUNT.

    GNU OpenMP spins for milliseconds by default. That gains nothing on an idle machine, and slows a step down several
    times if another process uses one of two cores. libgomp reads the setting once, when torch is loaded, so the load at
    the start of the run decides.
    """
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
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # makes cuBLAS reductions deterministic
    os.environ.setdefault("OMP_DYNAMIC", "FALSE")  # use the requested number of threads at any load
    if "PYTHONHASHSEED" not in os.environ:
        os.environ["PYTHONHASHSEED"] = "0"
        if os.name == "posix" and sys.executable:
            # Blocked until the new process installs its handler; during startup it would print a traceback.
            signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
            os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def quiet_profiler() -> None:
    """Silences torch's profiler; call it before the profiler is first used."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # above all severities
