"""Confidence intervals of measured shares (Wilson 1927)."""

from __future__ import annotations

import math

WILSON_Z = 1.96  # normal quantile of a two-sided 95 % interval


def wilson(share: float, count: float) -> list[float]:
    """Returns the interval [low, high] of a proportion `share` observed in `count` samples."""
    z2 = WILSON_Z**2 / count
    middle = (share + z2 / 2) / (1 + z2)
    half = WILSON_Z / (1 + z2) * math.sqrt(share * (1 - share) / count + z2 / (4 * count))
    return [max(0.0, middle - half), min(1.0, middle + half)]
