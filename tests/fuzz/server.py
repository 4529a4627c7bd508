"""Runs command lines in forks of one process that has imported everything: a case costs tenths of a second, not five.

Reads one JSON object a line from stdin (folder, arguments, environment) and answers each with an `Outcome` as JSON.
No computation runs in this process itself: OpenMP's threads do not survive a fork.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
import time
from pathlib import Path
from typing import Any

CPU_SECONDS = 15  # after which a case is killed; a test calls it a hang long before
WALL_SECONDS = 90  # the same on the clock, which a busy machine makes longer
MEMORY_BYTES = 6 << 30  # address space for data above what the imports take; a test calls much less too much


def import_everything() -> None:
    """Imports the modules that commands import lazily."""
    import datasets  # noqa: F401
    import peft  # noqa: F401
    import transformers  # noqa: F401
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer  # noqa: F401


def child(case: dict[str, Any]) -> None:
    """Runs one command line in this fork; never returns."""
    code = 70
    try:
        os.setsid()
        folder = Path(case["folder"])
        os.chdir(folder / "here")
        for stream, name in ((sys.stdin, os.devnull), (sys.stdout, folder / "out"), (sys.stderr, folder / "err")):
            flags = os.O_RDONLY if stream is sys.stdin else os.O_WRONLY | os.O_CREAT | os.O_TRUNC
            os.dup2(os.open(name, flags), stream.fileno())
        os.environ.update(case["environment"])
        resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS + 5))
        used = int(Path("/proc/self/statm").read_text().split()[5]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_DATA, (used + MEMORY_BYTES, used + MEMORY_BYTES))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        signal.signal(signal.SIGINT, signal.default_int_handler)
        from sansgpu.cli import run

        sys.argv = ["sansgpu", *case["arguments"]]
        code = run(case["arguments"])
        sys.stdout.flush()
        sys.stderr.flush()
    except BaseException:
        import traceback

        traceback.print_exc()
        sys.stderr.flush()
    finally:
        os._exit(code)


def outcome(pid: int) -> dict[str, Any]:
    """Waits for a case and kills it if it takes too long."""
    deadline, late = time.monotonic() + WALL_SECONDS, False
    while True:
        done, status, usage = os.wait4(pid, os.WNOHANG)
        if done:
            break
        if time.monotonic() > deadline and not late:
            os.killpg(pid, signal.SIGKILL)
            late = True
        time.sleep(0.005)
    return {
        "code": os.waitstatus_to_exitcode(status),
        "late": late,
        "cpu_seconds": usage.ru_utime + usage.ru_stime,
        "peak_bytes": usage.ru_maxrss * 1024,
    }


def main() -> None:
    """Answers cases until the end of stdin."""
    import_everything()
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    print("ready", file=answers, flush=True)
    for line in sys.stdin:
        case = json.loads(line)
        if (pid := os.fork()) == 0:
            child(case)
        print(json.dumps(outcome(pid)), file=answers, flush=True)


if __name__ == "__main__":
    main()
