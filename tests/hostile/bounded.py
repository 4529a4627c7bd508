"""Runs the command line with limits on time and memory."""

from __future__ import annotations

import atexit
import shutil
import tempfile
from functools import cache
from pathlib import Path

from tests.hostile.fuzz.harness import HANG_SECONDS, MOST_BYTES, Case, Runner
from tests.processes import messages


@cache
def _runner() -> Runner:
    home = Path(tempfile.mkdtemp(prefix="sansgpu-bounded-"))
    atexit.register(shutil.rmtree, home, ignore_errors=True)
    return Runner(home)


def outcome(*arguments: object) -> tuple[int, str]:
    """Returns the exit code and stderr of `sansgpu ARGUMENTS`; a negative code is the signal that ended the process."""
    found = _runner()(Case([str(argument) for argument in arguments]))
    assert not found.late, found.err[-2000:]
    assert found.cpu_seconds < HANG_SECONDS, found.err[-2000:]
    assert found.peak_bytes < MOST_BYTES, found.err[-2000:]
    return found.code, found.err


def assert_refused(fragment: str, *arguments: object) -> None:
    """Asserts that the command exits with code 2 and prints one error message that contains the fragment."""
    code, said = outcome(*arguments)
    assert code == 2, (code, said[-2000:])
    assert len(messages(said)) == 1, said[:2000]
    last = said.splitlines()[-1]
    assert last.startswith("sansgpu: "), said[-2000:]
    assert "warning: " not in said
    assert fragment in last, last
    assert len(last) < 1500
