"""The time a run may take, and the steps that fit into it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime, timedelta

from sansgpu.config import ConfigError, TrainingConfig

FIRST_STEPS, RECENT_STEPS = 25, 100  # looked at one by one; whose mean stands for those to come
DISK_BYTES_PER_SECOND = 100e6  # of the last snapshot and the export, hashed; assumed, and slow for a disk
MARGIN_RATIO, MARGIN_SECONDS = 0.01, 1.0  # of the whole budget, kept for what was not foreseen
# What the first evaluation takes besides, as it compiles; but no more than this share of the budget.
FIRST_EVALUATION_SECONDS, FIRST_EVALUATION_RATIO = 10.0, 0.03
EVALUATED_IN_A_STEP = 3.0  # times the tokens that are learned from in the same time
WORTH_RATIO = 0.05  # of the whole budget
LOOK_RATIO, LOOK_AHEAD = 0.02, 0.2  # look again after this share of the budget, or of what is left of it


def finish_time(until: str, now: datetime) -> datetime:
    """`07:00` as the next time it is that; a date with a time as it stands. Raises ConfigError where it is over."""
    if "T" not in until:
        clock = datetime.strptime(until, "%H:%M")
        today = now.replace(hour=clock.hour, minute=clock.minute, second=0, microsecond=0)
        return today if today > now else today + timedelta(days=1)
    finish = datetime.fromisoformat(until)
    if finish <= now:
        raise ConfigError(f"training.until is {until}, which is over; give a later one with --until.")
    return finish


@dataclass
class Budget:
    """What is left of the time, and what a step takes of it. Steps are laid anew as the run goes on.

    `elapsed` tells the seconds the run has taken, over all its processes.
    """

    training: TrainingConfig
    elapsed: Callable[[], float]
    validation_share: float  # tokens of an evaluation over those of a step
    written_bytes: int  # at the end: a snapshot and the export
    wall_clock: Callable[[], datetime] = datetime.now
    _steps: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT_STEPS))
    _evaluation_seconds: float | None = None
    _looked: float = float("-inf")
    _whole: float | None = None

    def seconds_left(self) -> float:
        """Until the end of the time allowed; infinite without a limit."""
        limits = [float("inf")]
        if self.training.max_hours is not None:
            limits.append(self.training.max_hours * 3600 - self.elapsed())
        if self.training.until is not None:
            limits.append((datetime.fromisoformat(self.training.until) - self.wall_clock()).total_seconds())
        return min(limits)

    def stepped(self, seconds: float) -> None:
        """A step took so long; not the first of a process, which compiles."""
        self._steps.append(seconds)

    def evaluated(self, seconds: float) -> None:
        """An evaluation took so long."""
        self._evaluation_seconds = seconds

    def step_seconds(self) -> float:
        """What a step takes with its share of the evaluations between steps."""
        step = sum(self._steps) / len(self._steps)
        every = self.training.eval_steps
        return step + (self._evaluation(step) / every if every else 0.0)

    def steps_left(self) -> int | None:
        """Steps that fit into what is left, with a last evaluation, snapshot and export behind them; None before any
        step was timed.
        """
        left = self.seconds_left()
        if self._whole is None:
            self._whole = left
        self._looked = self.elapsed()
        if left <= 0:
            return 0
        if not self._steps:
            return None
        return max(0, int((left - self._reserve()) / self.step_seconds()))

    def worth_more(self) -> bool:
        """Whether what is left of the time is enough to go on with a run that was over."""
        hours = self.training.max_hours or 0.0
        return self.seconds_left() > 2 * self._reserve() + WORTH_RATIO * hours * 3600

    def due(self) -> bool:
        """Whether it is time to lay the steps anew: often at first and near the end."""
        if not self.training.time_limited:
            return False
        if self._whole is None or len(self._steps) < FIRST_STEPS:
            return True
        wait = min(LOOK_RATIO * self._whole, LOOK_AHEAD * max(0.0, self.seconds_left() - self._reserve()))
        return self.elapsed() - self._looked >= wait

    def _reserve(self) -> float:
        step = sum(self._steps) / max(1, len(self._steps))
        margin = MARGIN_RATIO * (self._whole or 0.0) + MARGIN_SECONDS
        if self._evaluation_seconds is None:
            margin += min(FIRST_EVALUATION_SECONDS, FIRST_EVALUATION_RATIO * (self._whole or 0.0))
        return self._evaluation(step) + self.written_bytes / DISK_BYTES_PER_SECOND + margin

    def _evaluation(self, step: float) -> float:
        if self._evaluation_seconds is not None:
            return self._evaluation_seconds
        return step * self.validation_share / EVALUATED_IN_A_STEP
