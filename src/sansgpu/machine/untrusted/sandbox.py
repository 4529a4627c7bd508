"""Runs library code on untrusted files in a child process, which may hang, abort or run out of memory harmlessly.

The child is forked, so it needs no imports and answers within milliseconds.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import threading
from collections.abc import Callable
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

from sansgpu.machine.address_space import used_address_space
from sansgpu.machine.interrupt import LIKE_SIGTERM

MEMORY_BYTES = 1 << 30  # the child's memory limit on top of what this process uses
IDLE_SECONDS = 2.0  # an idle child exits after this time, because copy-on-write slows this process down while it lives
_NO_MEMORY, _FAILED = 3, 4  # exit codes of the child


class SandboxError(Exception):
    """Raised if a request ended its child. The message is a verb phrase, e.g. "does not end within 2 seconds"."""


class Sandbox:
    """A function from bytes to bytes that runs in a child process with bounded time and memory.

    `cpu_seconds` limits the CPU time of a request, so that results do not depend on the load of the machine.
    On systems without fork (Windows) the function runs in this process without bounds.
    """

    def __init__(self, serve: Callable[[bytes], bytes], cpu_seconds: int) -> None:
        self._serve, self._cpu_seconds = serve, cpu_seconds
        self._lock = threading.Lock()
        self._child = self._parent = 0
        self._pipe: Connection | None = None

    def call(self, request: bytes) -> bytes:
        """Returns the function's result. Raises SandboxError if the child failed or was killed."""
        if not hasattr(os, "fork"):
            return self._serve(request)
        with self._lock:
            while True:
                if self._pipe is None or self._parent != os.getpid():
                    self._start()
                assert self._pipe is not None
                try:
                    self._pipe.send_bytes(request)
                    return self._pipe.recv_bytes()
                except (EOFError, OSError):
                    status = self._reap()
                    if status != 0:  # otherwise it was idle and exited between two requests
                        raise SandboxError(_reason(status, self._cpu_seconds)) from None
                except BaseException:  # an interrupt: its pending answer must not be read by the next request
                    os.kill(self._child, signal.SIGKILL)
                    self._reap()
                    raise

    def close(self) -> None:
        """Ends the child process."""
        with self._lock:
            if self._pipe is not None and self._parent == os.getpid():
                self._reap()

    def _start(self) -> None:
        here, there = Pipe()
        self._parent = os.getpid()
        self._child = os.fork()
        if not self._child:
            here.close()
            _serve_requests(there, self._serve, self._cpu_seconds)
        there.close()
        self._pipe = here

    def _reap(self) -> int:
        """Waits for the child to exit and returns its exit status, negative if a signal killed it."""
        assert self._pipe is not None
        self._pipe.close()
        self._pipe = None
        _, status = os.waitpid(self._child, 0)
        return os.waitstatus_to_exitcode(status)


def _serve_requests(pipe: Connection, serve: Callable[[bytes], bytes], cpu_seconds: int) -> None:
    """Answers requests in the child process. Never returns."""
    import resource  # not on Windows

    code = _FAILED
    faulthandler.disable()  # an abort is expected here
    try:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # Rust libraries print their panics to stderr
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C; this process exits with it
        for number in (signal.SIGTERM, signal.SIGPROF, *LIKE_SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        _limit(resource.RLIMIT_CORE, 0)
        if (used := used_address_space()) is not None:
            _limit(resource.RLIMIT_AS, used + MEMORY_BYTES)
        while pipe.poll(IDLE_SECONDS):
            request = pipe.recv_bytes()
            signal.setitimer(signal.ITIMER_PROF, cpu_seconds)
            answer = serve(request)
            signal.setitimer(signal.ITIMER_PROF, 0)
            pipe.send_bytes(answer)
        code = 0
    except EOFError:  # the parent exited or closed the pipe
        code = 0
    except MemoryError:
        code = _NO_MEMORY
    finally:
        os._exit(code)


def _limit(limit: int, value: int) -> None:
    import resource

    _, hard = resource.getrlimit(limit)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(limit, (value if hard == resource.RLIM_INFINITY else min(value, hard), hard))


def _reason(status: int, cpu_seconds: int) -> str:
    if status == -signal.SIGPROF:
        return f"takes more than {cpu_seconds} seconds"
    if status == _NO_MEMORY:
        return f"needs more than {MEMORY_BYTES >> 30} GB of memory"
    return f"crashes its library ({f'signal {-status}' if status < 0 else 'panic'})"


def is_panic(error: BaseException) -> bool:
    """Returns whether the error is a panic of a Rust library, whose class is not public and not an Exception."""
    error_type: Any = type(error)
    return bool(error_type.__name__ == "PanicException")
