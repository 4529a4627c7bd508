"""Signals and requests that stop, pause, save or evaluate a run between two steps."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import NamedTuple

from sansgpu.machine.group import Group
from sansgpu.reporting.controls import Controls, Request

SIGNAL_GRACE_SECONDS = 3.0  # within which a launcher may forward a signal that its processes already received


def _hangups() -> list[int]:
    """Returns SIGHUP unless the process ignores it (nohup) or the system lacks it."""
    number = getattr(signal, "SIGHUP", None)
    return [] if number is None or signal.getsignal(number) is signal.SIG_IGN else [number]


class Interrupt:
    """Handles SIGINT, SIGTERM and SIGHUP within its context: the first is stored, a second one ends the process.

    `signal` is the number of the first signal, or None. A signal within `grace_seconds` of the first is ignored: a
    launcher forwards the signal that the terminal already sent to its processes. An ignored SIGHUP (nohup) stays
    ignored.
    """

    def __init__(self, grace_seconds: float = 0.0, on_exit: Callable[[], None] = lambda: None) -> None:
        """`on_exit` is called before a second signal ends the process."""
        self.signal: int | None = None
        self._grace_seconds, self._received_at = grace_seconds, 0.0
        self._on_exit = on_exit
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
            self._on_exit()
            os._exit(128 + number)


class Command(NamedTuple):
    """The instruction to all ranks between two steps. The run ends if `signal` is a number."""

    signal: int | None
    request: Request


class RunControl:
    """Agrees on one command for all ranks: a signal to any of them, or a request to rank 0."""

    def __init__(self, controls: Controls, group: Group) -> None:
        self._controls, self._group = controls, group
        grace_seconds = SIGNAL_GRACE_SECONDS if group.size > 1 else 0.0
        self.interrupt = Interrupt(grace_seconds, lambda: controls.on_exit())

    def command(self) -> Command:
        """Returns the next command; all ranks must call it."""
        request = self._controls.take() if self._group.is_main else Request.NONE
        number, flags = map(int, self._group.all_reduce_maxima([self.interrupt.signal or 0, request]))
        request = Request(flags)
        if not number and Request.STOP in request:
            number = signal.SIGINT
        return Command(number or None, request)

    def is_interrupted(self) -> bool:
        """Returns whether this rank received a signal."""
        return self.interrupt.signal is not None
