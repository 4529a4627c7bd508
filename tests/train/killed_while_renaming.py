"""Runs a command that kills itself before a certain rename of an abandoned branch: `NUMBER ARGUMENTS`."""

import os
import signal
import sys
from pathlib import Path

from sansgpu.cli import run

_rename = Path.rename


def _counted(self: Path, target: Path) -> Path:
    global _left
    if "abandoned" in f"{self} {target}":
        _left -= 1
        if _left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
    return _rename(self, target)


if __name__ == "__main__":
    _left = int(sys.argv[1])
    Path.rename = _counted  # type: ignore[method-assign]
    sys.exit(run(sys.argv[2:]))
