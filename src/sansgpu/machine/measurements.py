"""Measurements of this machine, cached on the disk, and the assumed duration of a run without a measurement."""

from __future__ import annotations

import contextlib
import hashlib
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sansgpu.files.atomic import PRIVATE_MODE, make_folder, write_text
from sansgpu.machine.description import processor
from sansgpu.machine.monitor import LoadMeter

BUSY_CORES = 0.25  # a measurement is not cached if other programs used more cores than this
MIN_SECONDS = 0.5  # shorter measurements are always cached: the kernel's CPU times are too coarse to judge them
# FLOP/s of a step per core. Assumed rather than measured, so that decisions that depend on it are reproducible.
ASSUMED_FLOPS_PER_SECOND = {"fp32": 35e9, "bf16": 80e9, "int16": 55e9, "int8": 100e9}


def cached_measurement(
    cache: Path, key: dict[str, Any], measure: Callable[[], dict[str, Any]], keep_disturbed: bool = False
) -> dict[str, Any]:
    """Returns the cached result of a measurement on this processor model, or calls `measure` and caches its result.

    `key` has the name of the measurement and everything else that the result depends on. Unless `keep_disturbed`,
    results are not cached if other programs used the cores meanwhile. Read and write errors of the cache are ignored.
    """
    path, text = _file_and_key(cache, key)
    known = _read(path, text)
    if isinstance(known, dict):
        return known
    start, load = time.perf_counter(), LoadMeter()
    result = measure()
    usage = load.sample()
    disturbed = usage["other_cores"] + usage["stolen_cores"] > BUSY_CORES
    if keep_disturbed or not (disturbed and time.perf_counter() - start > MIN_SECONDS):
        _write(path, text, result)
    return result


def best_measurement(cache: Path, key: dict[str, Any], measured: float) -> float:
    """Returns the largest value ever measured for `key` on this processor model, `measured` included, and caches it.

    Read and write errors of the cache are ignored.
    """
    path, text = _file_and_key(cache, key)
    known = _read(path, text)
    if isinstance(known, float) and measured <= known < float("inf"):
        return known
    _write(path, text, measured)
    return measured


def _file_and_key(cache: Path, key: dict[str, Any]) -> tuple[Path, str]:
    """Returns the file that caches the result, and the key as JSON."""
    text = json.dumps({**key, "processor": processor()}, sort_keys=True)  # machines may share a cache
    return cache / "measured" / f"{hashlib.sha256(text.encode()).hexdigest()[:16]}.json", text


def _read(path: Path, key: str) -> Any:
    """Returns the cached result, or None."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        known = json.loads(path.read_text(encoding="utf-8"))
        if known["question"] == json.loads(key):
            return known["answer"]
    return None


def _write(path: Path, key: str, result: Any) -> None:
    with contextlib.suppress(OSError):
        make_folder(path.parent, PRIVATE_MODE)
        write_text(path, json.dumps({"question": json.loads(key), "answer": result}, indent=2) + "\n")


def assumed_seconds(total_flops: float, precision: str, threads: int) -> float:
    """Returns the assumed duration of a run with these total FLOPs."""
    return total_flops / (ASSUMED_FLOPS_PER_SECOND[precision] * threads)


def flops_utilization(reached: float, peak: float) -> float | None:
    """Returns MFU, or None if the model exceeds the measured peak, which is then too low to compare with."""
    return reached / peak if reached <= peak else None
