"""What a person, or a program, asks of a run that goes on."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from enum import IntFlag


class Wish(IntFlag):
    """What the loop is to do between two steps."""

    NONE = 0
    PAUSE = 1
    SAVE = 2
    EVALUATE = 4
    STOP = 8


class Controls:
    """Wishes: any thread may have them, the loop heeds them after the step that it is at."""

    def __init__(self) -> None:
        self._once: deque[Wish] = deque()
        self.paused = self.stopping = False
        self.leaving: Callable[[], None] = lambda: None  # to be done before the process ends in the middle of a step

    def pause(self) -> None:
        """Wait; what waits goes on."""
        self.paused = not self.paused

    def save(self) -> None:
        """Write a snapshot."""
        self._once.append(Wish.SAVE)

    def evaluate(self) -> None:
        """Evaluate."""
        self._once.append(Wish.EVALUATE)

    def stop(self) -> None:
        """Save and end; the run can be resumed."""
        self.stopping = True

    def take(self) -> Wish:
        """All that is wished for now. Saving and evaluating are told once."""
        wish = (Wish.PAUSE if self.paused else Wish.NONE) | (Wish.STOP if self.stopping else Wish.NONE)
        while self._once:
            wish |= self._once.popleft()
        return wish
