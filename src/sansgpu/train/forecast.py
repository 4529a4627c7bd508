"""Estimates the duration of a run."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta

from sansgpu.config import TrainingConfig

MAX_SECONDS = 1e10  # about 300 years; later dates may overflow datetime


@dataclass(frozen=True)
class Forecast:
    """The durations of the parts of a run."""

    startup_seconds: float  # loading and compiling before the first step
    step_seconds: float
    evaluation_seconds: float
    save_seconds: float  # time the loop waits for a snapshot
    end_seconds: float  # last snapshot and export after the last step

    def seconds(self, training: TrainingConfig, steps: int, first: int = 0) -> float:
        """Returns the time to train from step `first` to step `steps`, including evaluations and snapshots."""
        evaluations = _due(training.eval_steps, first, steps)
        saves = _due(training.save_steps, first, steps)
        between = evaluations * self.evaluation_seconds + saves * self.save_seconds
        return self.startup_seconds + (steps - first) * self.step_seconds + between + self.end_seconds


def done_at(seconds: float) -> str:
    """Returns the local time `seconds` from now, to the minute."""
    return (datetime.now() + timedelta(seconds=min(seconds, MAX_SECONDS))).isoformat(timespec="minutes")


def _due(every: int, first: int, steps: int) -> int:
    """Counts the occurrences of an event due every `every` steps and at the last step."""
    inside = (steps - 1) // every - first // every if every else 0
    return max(0, inside) + 1
