"""Measurements that are worth making once."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sansgpu.machine.inspect import processor
from sansgpu.machine.usage import Strain

BUSY_CORES = 0.25  # of others: beyond, a measurement is of them, too
SURE_SECONDS = 0.5  # over which that can be told; the kernel counts in hundredths


def remembered(cache: Path, question: dict[str, Any], measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What `measure` answered when this very question was asked before, on such a processor; else ask it.

    What was measured while others kept cores busy is not kept. A cache that cannot be read or written only costs the
    measuring.
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
    start, strain = time.perf_counter(), Strain()
    answer = measure()
    seen = strain.seen()
    disturbed = seen["other_cores"] + seen["stolen_cores"] > BUSY_CORES
    if disturbed and time.perf_counter() - start > SURE_SECONDS:
        return answer
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        whole = path.with_suffix(f".{os.getpid()}")
        whole.write_text(json.dumps({"question": question, "answer": answer}, indent=2) + "\n", encoding="utf-8")
        whole.replace(path)
    except OSError:
        pass
    return answer
