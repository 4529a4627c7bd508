"""A disk cache of measurements."""

from __future__ import annotations

import contextlib
import hashlib
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sansgpu.config.atomic import write_text
from sansgpu.machine.description import processor
from sansgpu.machine.usage import LoadMeter

BUSY_CORES = 0.25  # a measurement is not cached if other programs used more cores than this
MIN_SECONDS = 0.5  # shorter measurements are always cached: the kernel's CPU times are too coarse to judge them


def cached_measurement(cache: Path, question: dict[str, Any], measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Returns the cached result for `question` on this processor model, or calls `measure` and caches its result.

    `question` describes the measurement: its name and everything that the result depends on.

    Results are not cached if other programs used the cores meanwhile. Read and write errors of the cache are ignored.
    """
    question = {**question, "processor": processor()}  # machines may share a cache
    text = json.dumps(question, sort_keys=True)
    path = cache / "measured" / f"{hashlib.sha256(text.encode()).hexdigest()[:16]}.json"
    try:
        known = json.loads(path.read_text(encoding="utf-8"))
        if known["question"] == json.loads(text):
            return dict(known["answer"])
    except (OSError, ValueError, KeyError, TypeError):
        pass
    start, load = time.perf_counter(), LoadMeter()
    answer = measure()
    usage = load.sample()
    disturbed = usage["other_cores"] + usage["stolen_cores"] > BUSY_CORES
    if disturbed and time.perf_counter() - start > MIN_SECONDS:
        return answer
    with contextlib.suppress(OSError):
        write_text(path, json.dumps({"question": question, "answer": answer}, indent=2) + "\n")
    return answer
