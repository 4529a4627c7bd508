"""What has to be set before torch, or a part of it, is loaded. Imports nothing of it."""

from __future__ import annotations

import os
import sys

SPINS = 20_000  # tens of microseconds: about as long as the next product takes to come


def share_cores() -> None:
    """Have OpenMP's threads wait for each other briefly, then sleep; what the user has set stays.

    By default GNU's spin for milliseconds. That gains nothing where the machine is ours, and where another process has
    one of two cores a step takes twice as long.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", str(SPINS))


def settle_randomness() -> None:
    """Have everything that may differ between two equal processes be equal; what the user has set stays.

    The order of Python's sets is fixed when the interpreter starts, so another takes this process's place.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # else its sums take whatever order
    os.environ.setdefault("OMP_DYNAMIC", "FALSE")  # as many threads as were asked for, at any load
    if "PYTHONHASHSEED" not in os.environ:
        os.environ["PYTHONHASHSEED"] = "0"
        if os.name == "posix" and sys.executable:
            os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def quiet_profiler() -> None:
    """Have torch's profiler write nothing to stderr; it reads this when it is first used."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # above every kind of message it has
