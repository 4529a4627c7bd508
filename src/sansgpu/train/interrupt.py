"""Handling of SIGINT, SIGTERM and SIGHUP: the first stops the run after its step, the second ends the process."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType, TracebackType


def _hangups() -> list[int]:
    """Returns SIGHUP unless the process ignores it (nohup) or the system lacks it."""
    number = getattr(signal, "SIGHUP", None)
    return [] if number is None or signal.getsignal(number) is signal.SIG_IGN else [number]


class Interrupt:
    """A context manager whose `signal` is the number of the first signal received, or None.

    A signal within `grace_seconds` of the first is ignored: a launcher forwards the signal that the terminal already
    sent to its processes. An ignored SIGHUP (nohup) stays ignored.
    """

    def __init__(self, grace_seconds: float = 0.0, leaving: Callable[[], None] = lambda: None) -> None:
        """`leaving` is called before a second signal ends the process."""
        self.signal: int | None = None
        self._grace_seconds, self._received_at = grace_seconds, 0.0
        self._leaving = leaving
        self._before: dict[int, object] = {}

    def __enter__(self) -> Interrupt:
        if threading.current_thread() is threading.main_thread():  # other threads cannot install handlers
            for number in (signal.SIGINT, signal.SIGTERM, *_hangups()):
                self._before[number] = signal.signal(number, self._received)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]  # what signal.signal returned

    def _received(self, number: int, frame: FrameType | None) -> None:
        if self.signal is None:
            self.signal, self._received_at = number, time.monotonic()
        elif time.monotonic() - self._received_at >= self._grace_seconds:
            self._leaving()
            os._exit(128 + number)
