"""What has to be set before torch, or a part of it, is loaded. Imports nothing of it."""

from __future__ import annotations

import math
import os
import signal
import sys

from sansgpu.machine import cgroup

SPINS = 20_000  # tens of microseconds: about as long as the next product takes to come
CONTENDED_SPINS = 3_000  # 6 % slower alone; beside a program on one of two cores 7,140 tokens/s, 10,000 spins 5,800
SPARE = 0.5  # of a core, by which the load of others may exceed the cores left to them


def share_cores() -> None:
    """Have OpenMP's threads wait for each other briefly, then sleep; a setting of the user is kept.

    GNU's OpenMP spins for milliseconds by default. That gains nothing on an idle machine, and where another process
    uses one of two cores a step takes several times as long. libgomp reads the setting once, when torch is loaded, so
    that a machine which is busy at the start of a run gets the shorter wait.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", str(CONTENDED_SPINS if _contended() else SPINS))


def _contended() -> bool:
    """Returns whether the load of the last minute leaves this process fewer cores than it may use."""
    if not hasattr(os, "getloadavg") or not hasattr(os, "sched_getaffinity"):
        return False
    usable = min(len(os.sched_getaffinity(0)), cgroup.cpu_quota() or math.inf)
    return (os.cpu_count() or 1) - os.getloadavg()[0] < usable - SPARE


def settle_randomness() -> None:
    """Have everything that may differ between two equal processes be equal; what the user has set stays.

    The order of Python's sets is fixed when the interpreter starts, so another takes this process's place.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # else its sums take whatever order
    os.environ.setdefault("OMP_DYNAMIC", "FALSE")  # as many threads as were asked for, at any load
    if "PYTHONHASHSEED" not in os.environ:
        os.environ["PYTHONHASHSEED"] = "0"
        if os.name == "posix" and sys.executable:
            # Held back until the new process handles it; the interpreter, as it starts, would show a traceback.
            signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
            os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def quiet_profiler() -> None:
    """Have torch's profiler write nothing to stderr; it reads this when it is first used."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # above every kind of message it has
