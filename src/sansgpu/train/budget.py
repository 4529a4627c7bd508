"""The time a run may take, and the steps that fit into it."""

from __future__ import annotations

from bisect import bisect_right
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
    snapshot_bytes: int
    export_bytes: int
    wall_clock: Callable[[], datetime] = datetime.now
    _steps: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT_STEPS))
    _evaluation_seconds: float | None = None
    _save_seconds: float = 0.0
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
        """An evaluation took so long, with its sample and what else the loop waited for behind that step."""
        self._evaluation_seconds = seconds

    def saved(self, seconds: float) -> None:
        """The loop waited so long for a snapshot."""
        self._save_seconds = seconds

    def steps_left(self, done: int) -> int | None:
        """Steps behind the `done` ones that fit into what is left, with what falls due between them, step `done`
        included, and a last evaluation, snapshot and export behind them; None before any step was timed.
        """
        left = self.seconds_left()
        if self._whole is None:
            self._whole = left
        self._looked = self.elapsed()
        if left <= 0:
            return 0
        if not self._steps:
            return None
        room, step = left - self._reserve(), self._step()
        if room < 0:
            return 0
        return bisect_right(range(int(room / step) + 1), room, key=lambda n: n * step + self._pauses(done, n)) - 1

    def idle_ratio(self, steps: int) -> float:
        """Of the whole budget, what is left over behind so many more steps."""
        spare = self.seconds_left() - self._reserve() - steps * self._step()
        return spare / self._whole if self._whole else 0.0

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

    def _step(self) -> float:
        return sum(self._steps) / max(1, len(self._steps))

    def _pauses(self, done: int, more: int) -> float:
        """Seconds of evaluations and snapshots from step `done` to the one before the last of `more`."""
        training = self.training
        pauses = ((training.eval_steps, self._evaluation()), (training.save_steps, self._save_seconds))
        return sum(seconds * ((done + more - 1) // n - (done - 1) // n) for n, seconds in pauses if n)

    def _reserve(self) -> float:
        margin = MARGIN_RATIO * (self._whole or 0.0) + MARGIN_SECONDS
        if self._evaluation_seconds is None:
            margin += min(FIRST_EVALUATION_SECONDS, FIRST_EVALUATION_RATIO * (self._whole or 0.0))
        # The last snapshot waits for one that is still being written.
        snapshots = 2 if self.training.save_steps or self.training.eval_steps else 1
        written = snapshots * self.snapshot_bytes + self.export_bytes
        return self._evaluation() + written / DISK_BYTES_PER_SECOND + margin

    def _evaluation(self) -> float:
        if self._evaluation_seconds is not None:
            return self._evaluation_seconds
        return self._step() * self.validation_share / EVALUATED_IN_A_STEP
