"""Runs cases of bad input and checks their outcomes."""

from __future__ import annotations

import os
import re
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.processes import environment, fork_server, messages

HANG_SECONDS, MOST_BYTES, LONGEST_MESSAGE = 10.0, 2 << 30, 3000
# How the command line reports an unexpected exception, which is a defect.
UNFORESEEN = re.compile(r"^sansgpu: \w+(Error|Exception|Interrupt|Warning)\b.*\(--debug shows where\)$")


@dataclass(frozen=True)
class Case:
    """A command line that runs in a new folder, for which `prepare` writes the files."""

    arguments: list[str]
    prepare: Callable[[Path], object] = lambda folder: None
    codes: tuple[int, ...] = (0, 2)
    environment: dict[str, str] = field(default_factory=dict)
    apart: bool = False  # run in a new process, because the environment acts when Python or torch starts
    about: str = ""


@dataclass(frozen=True)
class Outcome:
    """The result of a case."""

    code: int
    late: bool
    cpu_seconds: float
    peak_bytes: int
    out: str
    err: str

    def complaint(self, case: Case) -> str | None:
        """Returns a message if the outcome is unacceptable, else None."""
        lines = [line for line in messages(self.err) if line]
        if self.late or self.cpu_seconds > HANG_SECONDS:
            return f"it hangs: {self.cpu_seconds:.1f} s of processor time"
        if "Traceback" in self.err + self.out or "panicked" in self.err:
            return "a traceback"
        if self.code < 0:
            return f"it died of signal {-self.code}"
        if self.peak_bytes > MOST_BYTES:
            return f"it took {self.peak_bytes / 1e9:.1f} GB"
        if any(UNFORESEEN.match(line) for line in lines):
            return "an unexpected exception"
        if self.code not in case.codes:
            return f"the exit code is {self.code}"
        if self.code and "verify" not in case.arguments and (len(lines) != 1 or not lines[0].startswith("sansgpu: ")):
            return f"stderr has {len(lines)} lines, not one sentence"
        if self.code == 0 and lines:
            return "stderr has more than warnings"
        if any(len(line) > LONGEST_MESSAGE for line in lines):
            return f"a message of more than {LONGEST_MESSAGE} characters"
        return None


class Runner:
    """Runs cases, each in a new folder below `home`."""

    def __init__(self, home: Path) -> None:
        self._home, self._number = home, 0
        self._environment = environment(home / "cache") | {"HF_HUB_OFFLINE": "1", "OMP_WAIT_POLICY": "passive"}
        self._environment |= {"PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1", "COLUMNS": "200"}

    def __call__(self, case: Case) -> Outcome:
        self._number += 1
        folder = self._home / f"case-{self._number:04d}"
        here = folder / "here"
        here.mkdir(parents=True)
        case.prepare(here)
        found = self._apart(case, folder) if case.apart else self._forked(case, folder)
        out, err = ((folder / name).read_text(encoding="utf-8", errors="replace") for name in ("out", "err"))
        return Outcome(**found, out=out, err=err)

    def _forked(self, case: Case, folder: Path) -> dict[str, Any]:
        with (folder / "out").open("wb") as out, (folder / "err").open("wb") as err, open(os.devnull, "rb") as nothing:
            streams = [nothing.fileno(), out.fileno(), err.fileno()]
            environment = self._environment | case.environment
            return fork_server().run_limited(case.arguments, streams, environment, folder / "here")

    def _apart(self, case: Case, folder: Path) -> dict[str, Any]:
        with (folder / "out").open("wb") as out, (folder / "err").open("wb") as err:
            process = subprocess.Popen(
                [sys.executable, "-m", "sansgpu", *case.arguments],
                cwd=folder / "here",
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                env=self._environment | case.environment,
                preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_CORE, (0, 0)),
                start_new_session=True,
            )
            deadline, late = time.monotonic() + 120, False
            while not (done := os.wait4(process.pid, os.WNOHANG))[0]:
                if time.monotonic() > deadline and not late:
                    os.killpg(process.pid, 9)
                    late = True
                time.sleep(0.01)
        process.returncode = os.waitstatus_to_exitcode(done[1])
        seconds = max(0.0, done[2].ru_utime + done[2].ru_stime - START_SECONDS)
        return {
            "code": process.returncode,
            "late": late,
            "cpu_seconds": seconds,
            "peak_bytes": done[2].ru_maxrss * 1024,
        }


START_SECONDS = 10.0  # CPU time that imports may take on a slow machine, which is not counted
