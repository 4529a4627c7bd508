"""What has to be set before torch, or a part of it, is loaded. Imports nothing of it."""

from __future__ import annotations

import os

SPINS = 20_000  # tens of microseconds: about as long as the next product takes to come


def share_cores() -> None:
    """Have OpenMP's threads wait for each other briefly, then sleep; what the user has set stays.

    By default GNU's spin for milliseconds. That gains nothing where the machine is ours, and where another process has
    one of two cores a step takes twice as long.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", str(SPINS))


def quiet_profiler() -> None:
    """Have torch's profiler write nothing to stderr; it reads this when it is first used."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # above every kind of message it has
