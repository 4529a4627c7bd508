"""Runs benchmark commands in new processes."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.processes import environment
from tests.project import ROOT


def benchmark(module: str, *arguments: str, cache: Path, result: Path) -> dict[str, Any]:
    command = [sys.executable, "-m", module, *arguments, "--json", str(result)]
    done = subprocess.run(command, cwd=ROOT, env=environment(cache), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    results: dict[str, Any] = json.loads(result.read_text())
    assert results["machine"]["packages"]["torch"]
    return results
