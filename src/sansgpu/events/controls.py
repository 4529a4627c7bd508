"""Requests from the user or a program to a running training loop."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from enum import IntFlag


class Request(IntFlag):
    """Actions for the training loop between two steps."""

    NONE = 0
    PAUSE = 1
    SAVE = 2
    EVALUATE = 4
    STOP = 8


class Controls:
    """Thread-safe requests, which the training loop executes after the current step."""

    def __init__(self) -> None:
        self._one_time: deque[Request] = deque()
        self.paused = self.stopping = False
        self.on_exit: Callable[[], None] = lambda: None  # called before the process exits within a step
        self.on_signal: Callable[[str], None] | None = None  # shows that a signal arrived. Default: a line on stderr

    def pause(self) -> None:
        """Pauses the run, or resumes a paused run."""
        self.paused = not self.paused

    def save(self) -> None:
        self._one_time.append(Request.SAVE)

    def evaluate(self) -> None:
        self._one_time.append(Request.EVALUATE)

    def stop(self) -> None:
        """Saves and ends the run, which can be resumed."""
        self.stopping = True

    def take(self) -> Request:
        """Returns all current requests and clears the requests to save and to evaluate."""
        request = (Request.PAUSE if self.paused else Request.NONE) | (Request.STOP if self.stopping else Request.NONE)
        while self._one_time:
            request |= self._one_time.popleft()
        return request
