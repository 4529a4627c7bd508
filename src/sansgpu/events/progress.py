"""Shows the progress of a command: the callbacks that long activities report to."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

Warn = Callable[[str], None]  # shows a warning to the user


class ReportProgress(Protocol):
    """A callback that shows the progress of a command."""

    def __call__(self, doing: str, done: int, total: int, unit: str = "byte", /) -> None:
        """Reports the progress of the activity `doing` in bytes or another `unit`. A `total` of 0 means unknown."""


def counting(progress: ReportProgress, doing: str, before: int, total: int, unit: str) -> Callable[[int], None]:
    """Returns a callback for one part of an activity. It adds `before`, the units done in earlier parts."""
    return lambda done: progress(doing, before + done, total, unit)


def ignore_progress(*_: object) -> None:
    """Does nothing: a ReportProgress for callers without a display."""
