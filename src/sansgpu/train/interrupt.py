"""SIGINT, SIGTERM and SIGHUP: the first is acted on between steps, the second ends the process at once."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType, TracebackType


def _hangups() -> list[int]:
    """SIGHUP, unless the process was started to ignore it or the system has none."""
    number = getattr(signal, "SIGHUP", None)
    return [] if number is None or signal.getsignal(number) is signal.SIG_IGN else [number]


class Interrupt:
    """While entered, `signal` is the number of the signal that came, None if none did. An ignored SIGHUP (nohup) stays
    ignored.

    What comes within `same_wish` seconds is no second one: a terminal tells all processes, and their launcher too.
    """

    def __init__(self, same_wish: float = 0.0, leaving: Callable[[], None] = lambda: None) -> None:
        """`leaving` is done before the process ends at once."""
        self.signal: int | None = None
        self._same_wish, self._came = same_wish, 0.0
        self._leaving = leaving
        self._before: dict[int, object] = {}

    def __enter__(self) -> Interrupt:
        if threading.current_thread() is threading.main_thread():  # others may not install handlers
            for number in (signal.SIGINT, signal.SIGTERM, *_hangups()):
                self._before[number] = signal.signal(number, self._received)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]  # what signal.signal returned

    def _received(self, number: int, frame: FrameType | None) -> None:
        if self.signal is None:
            self.signal, self._came = number, time.monotonic()
        elif time.monotonic() - self._came >= self._same_wish:
            self._leaving()
            os._exit(128 + number)
