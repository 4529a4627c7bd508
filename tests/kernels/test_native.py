"""Compiling the kernels is announced, because it takes up to a minute."""

import os
import subprocess
import sys
from pathlib import Path

SCRIPT = """
import sys
from pathlib import Path
from sansgpu.kernels import native

print(native.load(Path(sys.argv[1]), print) is None)
"""


def test_a_compilation_is_announced_before_it_starts(tmp_path: Path) -> None:
    without = {**os.environ, "CXX": "false"}  # a compiler that fails at once
    command = [sys.executable, "-c", SCRIPT, str(tmp_path)]
    done = subprocess.run(command, env=without, capture_output=True, text=True)
    assert done.stdout.splitlines() == ["compiling the C++ kernels, once for this machine", "False"]
