"""Handling of signals outside of training: after Ctrl-C, a command ends with one sentence instead of a traceback."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time

from sansgpu.machine.interrupt import SignalWatch, as_sigterm, unhandled_signals, write_line

TYPE_CHECKING = False  # type checkers treat it as true; importing `typing` would delay the handling of Ctrl-C
if TYPE_CHECKING:
    from sys import UnraisableHookArgs
    from types import FrameType

CODE = 128 + signal.SIGINT
RETRY_SECONDS = 0.01
BUSY_SECONDS = 0.7  # a main thread that has not handled an interrupt after this time is busy in native code
INTERRUPTED = "interrupted; everything saved so far is kept."

_received = False
_arrived: float | None = None  # when the thread of SignalWatch noticed the interrupt


def interrupted() -> bool:
    """Returns True after a SIGINT, even if a library turned its KeyboardInterrupt into a different exception."""
    return _received


def handle_interrupts() -> None:
    """Makes the first SIGINT raise KeyboardInterrupt and the second one end the process immediately.

    SIGUSR1 and others act like SIGTERM. Signals stay ignored if the parent process ignored them.
    """
    others = unhandled_signals()
    for number in others:
        signal.signal(number, as_sigterm)
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, _interrupt)
        sys.unraisablehook = _unraisable
    SignalWatch(_notice)
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT, *others])  # see `make_deterministic`


def stop_handling_interrupts() -> None:
    """Exits at once after an interrupt. Otherwise restores the default handler: while the interpreter shuts down,
    KeyboardInterrupt would print a traceback.
    """
    if _received:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        os._exit(CODE)
    if signal.getsignal(signal.SIGINT) is _interrupt:
        signal.signal(signal.SIGINT, signal.SIG_DFL)


def _notice(number: int) -> None:
    """Runs in the thread of SignalWatch, and acknowledges an interrupt while the main thread is busy in native code.

    A second interrupt then ends the process, because `_interrupt` cannot run until the native code returns. Nor can
    `as_sigterm`.
    """
    global _arrived
    if signal.getsignal(number) is as_sigterm:
        os.kill(os.getpid(), signal.SIGTERM)
    if signal.getsignal(number) is not _interrupt:
        return
    if _arrived is None:
        _arrived = time.monotonic()
        timer = threading.Timer(BUSY_SECONDS, _acknowledge)
        timer.daemon = True
        timer.start()
    elif time.monotonic() - _arrived >= BUSY_SECONDS:
        if not _received:
            write_line(f"sansgpu: {INTERRUPTED}")
        os._exit(CODE)


def _acknowledge() -> None:
    if not _received:
        write_line("stopping after the current computation; press Ctrl-C again to stop now")


def _interrupt(number: int, frame: FrameType | None) -> None:
    global _received
    if _received:
        os._exit(CODE)
    _received = True
    raise KeyboardInterrupt


def _unraisable(problem: UnraisableHookArgs) -> None:
    """Raises an interrupt again if a destructor or a callback, e.g. of an import, swallowed it."""
    global _received, _arrived
    if not issubclass(problem.exc_type, KeyboardInterrupt):
        sys.__unraisablehook__(problem)
        return
    _received, _arrived = False, None
    timer = threading.Timer(RETRY_SECONDS, signal.raise_signal, (signal.SIGINT,))
    timer.daemon = True
    timer.start()
