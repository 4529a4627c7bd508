"""The command line in a forked process with bounds on time and memory, for inputs that must not cost either."""

from __future__ import annotations

import os
import resource
import signal
import sys
import tempfile
from pathlib import Path

import torch

from sansgpu.cli import run

CPU_SECONDS, WALL_SECONDS, MEMORY_BYTES = 10, 90, 2 << 30  # a pipe that is waited for costs no processor time
PROGRESS = ("training the tokenizer", "tokenizing", "reading")  # what is written to stderr before an input is refused


def outcome(*arguments: object) -> tuple[int, str]:
    """Exit code and stderr of `sansgpu ARGUMENTS`; a negative code is the signal that ended the process."""
    with tempfile.TemporaryFile() as said:
        child = os.fork()
        if not child:
            _run([str(argument) for argument in arguments], said.fileno())
        _, status = os.waitpid(child, 0)
        said.seek(0)
        return os.waitstatus_to_exitcode(status), said.read().decode()


def _run(arguments: list[str], said: int) -> None:
    code = 99
    try:
        os.dup2(os.open(os.devnull, os.O_RDWR), 0)
        os.dup2(0, 1)
        os.dup2(said, 2)
        sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")  # not what pytest has put in their places
        signal.signal(signal.SIGPROF, signal.SIG_DFL)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        used = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
        resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY_BYTES, used + MEMORY_BYTES))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)
        signal.alarm(WALL_SECONDS)
        torch.set_num_threads(1)  # the threads of the process that was forked are not here
        code = run(arguments)
        sys.stderr.flush()
    finally:
        os._exit(code)


def assert_refused(fragment: str, *arguments: object) -> None:
    """The command ends with exit code 2 and one sentence that has the fragment."""
    code, said = outcome(*arguments)
    assert code == 2, (code, said[-2000:])
    *before, last = said.splitlines()
    assert last.startswith("sansgpu: "), said[-2000:]
    assert fragment in last
    assert len(last) < 1500
    assert all(line.split(" (")[0] in PROGRESS for line in before), said[:2000]
