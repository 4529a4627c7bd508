"""Measurements that are worth making once."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sansgpu.machine.inspect import processor


def remembered(cache: Path, question: dict[str, Any], measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What `measure` answered when this very question was asked before, on such a processor; else ask it.

    A cache that cannot be read or written only costs the measuring.
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
    answer = measure()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        whole = path.with_suffix(f".{os.getpid()}")
        whole.write_text(json.dumps({"question": question, "answer": answer}, indent=2) + "\n", encoding="utf-8")
        whole.replace(path)
    except OSError:
        pass
    return answer
