"""Keeps the user's code, e.g. a reward function, from ending the process silently or changing global state."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

from sansgpu.machine.interrupt import write_line

_SIGNALS = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]
LAST_SECONDS = 5.0  # time for threads and processes that other code has started to end after the command


@contextlib.contextmanager
def no_silent_exit() -> Iterator[None]:
    """Turns `sys.exit` and `os._exit(0)` of other code into an error, because the command did not end by itself.

    Raises SansGPUError with the place of the call. In another thread than the caller's, `os._exit(0)` ends the process
    with exit code 1.
    """
    leave, process, thread = os._exit, os.getpid(), threading.current_thread()

    def exit_loudly(status: int = 0) -> NoReturn:
        if status or os.getpid() != process:  # a failure, or the end of a forked process
            leave(status)
        caller = sys._getframe(1)
        call = f"os._exit(0) was called in {caller.f_code.co_filename}, line {caller.f_lineno}"
        if threading.current_thread() is thread:
            raise SystemExit(call)
        write_line(f"sansgpu: {call}, before the command was done; remove it.")
        leave(1)

    os._exit = exit_loudly
    try:
        yield
    except SystemExit as error:
        if isinstance(error.__context__, BrokenPipeError):  # the reader of our output is gone, e.g. `head`
            raise
        from sansgpu.config import SansGPUError  # importing the schema takes time

        last = traceback.extract_tb(error.__traceback__)[-1]
        raise SansGPUError(
            f"{last.filename}, line {last.lineno}, ended the command with SystemExit: {error.code}; remove this call."
        ) from error
    finally:
        os._exit = leave


def exit_soon(code: int) -> NoReturn:
    """Exits. Waits only LAST_SECONDS for threads and child processes of other code, which may never end."""
    timer = threading.Timer(LAST_SECONDS, _abandon_others, (code,))
    timer.daemon = True
    with contextlib.suppress(RuntimeError):  # a process without memory cannot start a thread
        timer.start()
    sys.exit(code)


def _abandon_others(code: int) -> None:
    main = threading.main_thread()
    threads = [thread for thread in threading.enumerate() if thread is not main and not thread.daemon]
    loaded = sys.modules.get("multiprocessing")
    children = [child for child in loaded.active_children() if not child.daemon] if loaded else []
    if not threads and not children:
        return
    names = ", ".join([*(f"thread {thread.name}" for thread in threads), *(child.name for child in children)])
    write_line(f"warning: {names} did not end, so this process ends without waiting any longer.")
    for child in children:
        child.terminate()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


@contextlib.contextmanager
def preserved_state() -> Iterator[None]:
    """Restores torch's settings, the working directory and the handlers of signals that end a run.

    Random generators are not restored: training seeds its own before each use.
    """
    import torch  # not needed by commands that run no such code

    settings: tuple[tuple[Callable[[], Any], Callable[[Any], Any]], ...] = (
        (torch.is_grad_enabled, torch.set_grad_enabled),
        (torch.get_num_threads, torch.set_num_threads),
        (torch.get_default_dtype, torch.set_default_dtype),
        (torch.get_default_device, torch.set_default_device),
        (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
        (torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms),
    )
    before = [get() for get, _ in settings]
    folder = None
    with contextlib.suppress(OSError):  # it was deleted
        folder = os.getcwd()
    handlers = {number: signal.getsignal(number) for number in _SIGNALS}
    try:
        yield
    finally:
        for (get, put), value in zip(settings, before, strict=True):
            if get() != value:
                put(value)
        with contextlib.suppress(OSError):
            if folder is not None and os.getcwd() != folder:
                os.chdir(folder)
        if threading.current_thread() is threading.main_thread():  # other threads cannot set handlers
            for number, handler in handlers.items():
                if signal.getsignal(number) is not handler and handler is not None:
                    signal.signal(number, handler)
