"""`python -m tests.forks.server SOCKET` runs Python modules in forks of itself until its stdin is closed.

Before it forks, it computes with one thread only, because OpenMP's threads do not survive a fork.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import json
import os
import resource
import runpy
import select
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
import weakref
from pathlib import Path
from typing import Any, NoReturn

from sansgpu.machine.launch import set_openmp

CPU_SECONDS = 15  # a limited command is killed after this CPU time; tests fail at HANG_SECONDS
WALL_SECONDS = {True: 90, False: 900}  # wall time after which a command is killed; True: limited
MEMORY_BYTES = 6 << 30  # data a limited command may add to that of the imports; tests fail at MOST_BYTES
# Modules that most commands import when they run.
LAZY = (
    "datasets", "peft", "plotly.offline", "rich.progress", "sansgpu.cli.app", "sansgpu.jobs.embed",
    "sansgpu.jobs.export", "sansgpu.jobs.generate", "sansgpu.jobs.report", "sansgpu.jobs.snapshots",
    "sansgpu.jobs.train", "sansgpu.models.huggingface.generation", "sansgpu.planning.forecast",
    "sansgpu.views.results", "sansgpu.views.run_end", "sansgpu.views.tables", "sansgpu.views.terminal",
)  # fmt: skip


def prepare() -> None:
    """Imports the modules that commands import lazily, and fills the caches that each run would fill."""
    gc.disable()  # imports create objects that stay
    set_openmp()
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer  # noqa: F401

    for name in LAZY:
        importlib.import_module(name)
    from sansgpu.kernels.roofline import first_gemm_rate
    from sansgpu.tasks.registry import TASKS
    from sansgpu.views.page import templates

    for name in TASKS:
        TASKS[name]  # imports the task
    for name in templates().list_templates():
        templates().get_template(name)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    first_gemm_rate("fp32", "cpu", 1)  # most tests compute in fp32 with one thread
    torch.set_num_threads(threads)
    for finalizer in list(weakref.finalize._registry.values()):  # type: ignore[attr-defined]
        finalizer.atexit = False  # torch's delete its operators, which would copy much of the shared memory
    gc.freeze()  # a garbage collection in a fork would copy shared memory
    gc.enable()


def limit() -> None:
    """Limits the CPU time and the memory of this process."""
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS + 5))
    used = int(Path("/proc/self/statm").read_text().split()[5]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_DATA, (used + MEMORY_BYTES, used + MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def become(asked: dict[str, Any], streams: list[int]) -> None:
    """Runs the requested command in this fork and exits with its exit code."""
    import torch
    from huggingface_hub import constants

    os.setsid()
    os.chdir(asked["folder"])
    for place, stream in enumerate(streams):
        os.dup2(stream, place)
        os.close(stream)
    os.environ.clear()
    os.environ.update({**asked["environment"], "PYTHONHASHSEED": "0"})
    sys.path[:0] = [str(Path(part).resolve()) for part in os.environ.get("PYTHONPATH", "").split(os.pathsep) if part]
    tempfile.tempdir = None  # reads TMPDIR again
    if encoding := os.environ.get("PYTHONIOENCODING"):  # Python read it before the fork
        for stream in (sys.stdin, sys.stdout, sys.stderr):
            stream.reconfigure(encoding=encoding, errors=stream.errors)  # type: ignore[union-attr]
    if threads := os.environ.get("OMP_NUM_THREADS"):  # libgomp read it before the fork
        torch.set_num_threads(int(threads))
    if os.environ.get("HF_ENDPOINT", constants.ENDPOINT) != constants.ENDPOINT:  # the library read it before the fork
        importlib.reload(constants)
    if asked["limited"]:
        limit()
    sys.argv = [asked["module"], *asked["arguments"]]
    try:
        runpy.run_module(asked["module"], run_name="__main__", alter_sys=True)
        end(0)
    except SystemExit as asked_for:
        end(asked_for.code)


def end(code: str | int | None) -> NoReturn:
    """Exits as Python does, but without freeing objects, which would copy the memory of all imports."""
    threading._shutdown()  # type: ignore[attr-defined]  # waits for threads
    atexit._run_exitfuncs()
    if isinstance(code, str):
        print(code, file=sys.stderr)
        code = 1
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code or 0)


def outcome(pid: int, wall_seconds: float) -> dict[str, Any]:
    """Waits for a command, kills it if it takes too long, and returns its exit code and resource usage."""
    deadline, late = time.monotonic() + wall_seconds, False
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


def answer(connection: socket.socket) -> None:
    """Runs a connection's command in a fork and sends its PID and outcome. Returns only in the command's process."""
    _, streams, _, _ = socket.recv_fds(connection, 1, 3)
    with connection.makefile("rb") as sent:
        asked = json.loads(sent.read())
    if (pid := os.fork()) == 0:
        connection.close()
        become(asked, streams)
        return
    for stream in streams:
        os.close(stream)
    connection.sendall(f"{pid}\n".encode())
    connection.sendall(json.dumps(outcome(pid, WALL_SECONDS[asked["limited"]])).encode())
    os._exit(0)


def serve(listener: socket.socket) -> None:
    """Forks for every connection until stdin is closed, then removes the socket's folder.

    Returns only in the processes of commands.
    """
    while True:
        readable, _, _ = select.select([listener, sys.stdin], [], [])
        if sys.stdin in readable:
            shutil.rmtree(Path(listener.getsockname()).parent, ignore_errors=True)
            os._exit(0)
        connection, _ = listener.accept()
        if os.fork() == 0:
            listener.close()
            answer(connection)
            return
        connection.close()
        while any(os.waitpid(-1, os.WNOHANG)):
            pass


def main() -> None:
    prepare()
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(sys.argv[1])
    listener.listen()
    print("ready", flush=True)
    serve(listener)


if __name__ == "__main__":
    main()
