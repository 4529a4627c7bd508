"""Ctrl-C outside of training: it ends a command with one sentence at whatever moment it comes."""

from __future__ import annotations

import contextlib
import os
import signal
import sys

TYPE_CHECKING = False  # type checkers take it for true; importing `typing` would delay the handling of Ctrl-C
if TYPE_CHECKING:
    from sys import UnraisableHookArgs
    from types import FrameType

CODE = 128 + signal.SIGINT
RETRY_SECONDS = 0.01

_came = False


def interrupted() -> bool:
    """Returns True once SIGINT has come. What a library then raises need not be a KeyboardInterrupt."""
    return _came


def handle_interrupts() -> None:
    """Have the first SIGINT raise KeyboardInterrupt, and a second one end the process at once.

    A SIGINT that the parent process made us ignore stays ignored.
    """
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, _interrupt)
        sys.unraisablehook = _unraisable
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])  # see `settle_randomness`


def stop_handling_interrupts() -> None:
    """End the process at once if it was interrupted, and otherwise as soon as SIGINT comes: while the interpreter shuts
    down it would show a traceback.
    """
    if _came:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        os._exit(CODE)
    if signal.getsignal(signal.SIGINT) is _interrupt:
        signal.signal(signal.SIGINT, signal.SIG_DFL)


def _interrupt(number: int, frame: FrameType | None) -> None:
    global _came
    if _came:
        os._exit(CODE)
    _came = True
    raise KeyboardInterrupt


def _unraisable(problem: UnraisableHookArgs) -> None:
    """Raise an interrupt again that was lost in a destructor or a callback, such as those of imports."""
    global _came
    if not issubclass(problem.exc_type, KeyboardInterrupt):
        sys.__unraisablehook__(problem)
        return
    import threading

    _came = False
    again = threading.Timer(RETRY_SECONDS, signal.raise_signal, (signal.SIGINT,))
    again.daemon = True
    again.start()
