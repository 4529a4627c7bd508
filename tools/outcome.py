"""Reads the results of runs, without the parts that differ between identical runs, for tests and benchmarks."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from sansgpu.events.event import MEASURED_CAUSES, MEASURED_KEYS


def json_lines(path: Path) -> list[dict[str, Any]]:
    """Parses every non-empty line of a JSON Lines file; only "\\n" ends a line."""
    return [json.loads(line) for line in path.read_bytes().decode().split("\n") if line]


def record(run: Path) -> list[dict[str, object]]:
    """Returns the events of a run without measured times and rates and without the name of its folder."""
    lines = [line for line in json_lines(run / "metrics.jsonl") if line.get("cause") not in MEASURED_CAUSES]
    measured = {*MEASURED_KEYS, "output_dir", "available_bytes"}
    return [{key: value for key, value in line.items() if key not in measured} for line in lines]


def file_digests(folder: Path, pattern: str = "*") -> dict[str, str]:
    """Returns the SHA-256 of the files in `folder` that match `pattern`, by relative path."""
    files = sorted(path for path in folder.rglob(pattern) if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}
