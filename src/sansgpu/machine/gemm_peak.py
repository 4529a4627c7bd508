"""The peak rate of matrix products on this machine, which MFU is relative to."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from sansgpu.machine.cached_measurement import best_measurement
from sansgpu.machine.probe import is_emulated
from sansgpu.machine.roofline import gemm_rate

# FLOP/s of a step per core. Assumed rather than measured, so that decisions that depend on it are reproducible.
ASSUMED_FLOPS_PER_SECOND = {"fp32": 35e9, "bf16": 80e9}
GEMM_SIZE = 2048  # large enough for the peak rate, and takes only tenths of a second on a slow core


def assumed_seconds(total_flops: float, precision: str, threads: int) -> float:
    """Returns the assumed duration of a run with these total FLOPs."""
    return total_flops / (ASSUMED_FLOPS_PER_SECOND[precision] * threads)


def peak_gemm_rate(
    folder: Path, precision: str, device: str, threads: int, processes: int = 1, again: bool = False
) -> float:
    """Returns the best rate of a square product in FLOP/s that was measured here, now or earlier.

    A busy neighbor makes a measurement too low, never too high, so the cache `folder` keeps the best one. Each process
    measures once, and once more with `again`. `threads` and `processes`, the run's number of processes on this machine,
    only tell apart what is measured. Emulated bf16 counts as fp32, because its products are computed in fp32.
    """
    if is_emulated(precision, device):
        precision = "fp32"
    question = {"gemm": GEMM_SIZE, "precision": precision, "device": device, "threads": threads, "processes": processes}
    rate = gemm_rate(GEMM_SIZE, precision, device) if again else first_gemm_rate(precision, device, threads)
    return best_measurement(folder, question, rate)


@cache
def first_gemm_rate(precision: str, device: str, threads: int) -> float:
    """Measures the rate in FLOP/s once per process; `threads` only tells measurements apart."""
    return gemm_rate(GEMM_SIZE, precision, device)


def flops_utilization(reached: float, peak: float) -> float | None:
    """Returns MFU, or None if the model exceeds the measured peak, which is then too low to compare with."""
    return reached / peak if reached <= peak else None
