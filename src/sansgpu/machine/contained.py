"""Runs what files of others make a library do in a child process, which may hang, abort or fill memory at no cost.

The child is forked: nothing has to be imported again, so that it answers after milliseconds.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import sys
import threading
from collections.abc import Callable
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

MEMORY_BYTES = 1 << 30  # that the child may take besides what this process has
IDLE_SECONDS = 2.0  # after which a child ends; as long as it lives, pages that this process writes are copied
_NO_MEMORY, _FAILED = 3, 4  # exit codes of a child


class ContainedError(Exception):
    """A request ended its child. The message is a clause: what it did."""


class Contained:
    """A function from bytes to bytes that runs in a child process with bounded time and memory.

    `cpu_seconds` are those of one request, counted in processor time: a busy machine changes no result.
    Where the system cannot fork (Windows), it runs in this process, without bounds.
    """

    def __init__(self, serve: Callable[[bytes], bytes], cpu_seconds: int) -> None:
        self._serve, self._cpu_seconds = serve, cpu_seconds
        self._lock = threading.Lock()
        self._child = self._parent = 0
        self._pipe: Connection | None = None

    def ask(self, request: bytes) -> bytes:
        """Returns what the function returns. Raises ContainedError if the child failed or was ended."""
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
                    if status != 0:  # else it had been idle and ended between two requests
                        raise ContainedError(_reason(status, self._cpu_seconds)) from None
                except BaseException:  # an interrupt: the answer would be taken for the next one's
                    os.kill(self._child, signal.SIGKILL)
                    self._reap()
                    raise

    def close(self) -> None:
        """Ends the child."""
        with self._lock:
            if self._pipe is not None and self._parent == os.getpid():
                self._reap()

    def _start(self) -> None:
        here, there = Pipe()
        self._parent = os.getpid()
        self._child = os.fork()
        if not self._child:
            here.close()
            _answer(there, self._serve, self._cpu_seconds)
        there.close()
        self._pipe = here

    def _reap(self) -> int:
        """Waits for the child's end and returns its exit status; a negative one is the signal that ended it."""
        assert self._pipe is not None
        self._pipe.close()
        self._pipe = None
        _, status = os.waitpid(self._child, 0)
        return os.waitstatus_to_exitcode(status)


def _answer(pipe: Connection, serve: Callable[[bytes], bytes], cpu_seconds: int) -> None:
    """The child's life. Never returns."""
    import resource  # not on Windows

    code = _FAILED
    faulthandler.disable()  # an abort is expected here
    try:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # a Rust library writes there why it fails
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, with which this process ends
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGPROF):
            signal.signal(number, signal.SIG_DFL)
        _limit(resource.RLIMIT_CORE, 0)
        if (used := _address_space_bytes()) is not None:
            _limit(resource.RLIMIT_AS, used + MEMORY_BYTES)
        while pipe.poll(IDLE_SECONDS):
            request = pipe.recv_bytes()
            signal.setitimer(signal.ITIMER_PROF, cpu_seconds)
            answer = serve(request)
            signal.setitimer(signal.ITIMER_PROF, 0)
            pipe.send_bytes(answer)
        code = 0
    except EOFError:  # the parent has ended, or needs no more
        code = 0
    except MemoryError:
        code = _NO_MEMORY
    finally:
        os._exit(code)


def _limit(kind: int, value: int) -> None:
    import resource

    _, hard = resource.getrlimit(kind)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(kind, (value if hard == resource.RLIM_INFINITY else min(value, hard), hard))


def _address_space_bytes() -> int | None:
    if sys.platform != "linux":
        return None  # where such a limit does nothing
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    return pages * os.sysconf("SC_PAGE_SIZE")


def _reason(status: int, cpu_seconds: int) -> str:
    if status == -signal.SIGPROF:
        return f"does not end within {cpu_seconds} seconds"
    if status == _NO_MEMORY:
        return f"needs more than {MEMORY_BYTES >> 30} GB of memory"
    return f"fails in its library ({f'signal {-status}' if status < 0 else 'it panics'})"


def is_panic(error: BaseException) -> bool:
    """Whether this is how a Rust library fails; its class is no Exception and has no public name."""
    kind: Any = type(error)
    return bool(kind.__name__ == "PanicException")
