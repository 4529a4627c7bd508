"""How long a run takes: its steps, and what happens between them."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta

from sansgpu.config import TrainingConfig

LONGEST_SECONDS = 1e10  # 300 years: calendars end, too


@dataclass(frozen=True)
class Forecast:
    """Seconds of each thing that a run does."""

    startup_seconds: float  # until the first step: loading, compiling
    step_seconds: float
    evaluation_seconds: float
    save_seconds: float  # that the loop waits for a snapshot
    end_seconds: float  # the last snapshot and the export, behind the last step

    def seconds(self, training: TrainingConfig, steps: int, first: int = 0) -> float:
        """Of a run from behind step `first` to step `steps`, with the evaluations and snapshots it is due."""
        evaluations = _due(training.eval_steps, first, steps)
        saves = _due(training.save_steps, first, steps)
        between = evaluations * self.evaluation_seconds + saves * self.save_seconds
        return self.startup_seconds + (steps - first) * self.step_seconds + between + self.end_seconds


def done_at(seconds: float) -> str:
    """The local time in so many seconds, to the minute."""
    return (datetime.now() + timedelta(seconds=min(seconds, LONGEST_SECONDS))).isoformat(timespec="minutes")


def _due(every: int, first: int, steps: int) -> int:
    """How often something falls due, the last step included."""
    inside = (steps - 1) // every - first // every if every else 0
    return max(0, inside) + 1
