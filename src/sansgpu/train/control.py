"""Signals and requests that stop, pause, save or evaluate a run between two steps."""

from __future__ import annotations

import signal
from typing import NamedTuple

from sansgpu.events.controls import Controls, Request
from sansgpu.machine.group import Group
from sansgpu.machine.interrupt import Interrupt, write_line
from sansgpu.machine.world import grace_seconds

FORWARD_SECONDS = 3.0  # within which a launcher may forward a signal that its processes already received


class Command(NamedTuple):
    """The instruction to all ranks between two steps. The run ends if `signal` is a number."""

    signal: int | None
    request: Request


class RunControl:
    """Agrees on one command for all ranks: a signal to any of them, or a request to rank 0."""

    def __init__(self, controls: Controls, group: Group) -> None:
        self._controls, self._group = controls, group

        def say(message: str) -> None:
            if group.is_main:
                write_line(message)

        self.interrupt = Interrupt(
            grace_seconds(),
            FORWARD_SECONDS if group.size > 1 else 0.0,
            say,
            lambda message: (controls.on_signal or say)(message),
            lambda: controls.on_exit(),
        )

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
