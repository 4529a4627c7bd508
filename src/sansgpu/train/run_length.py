"""The number of steps of a run, which a time-limited run adapts to the time left."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from sansgpu.config.wording import counted
from sansgpu.events.event import Event
from sansgpu.train.budget import Budget
from sansgpu.train.run_setup import RunSetup
from sansgpu.train.state import Progress, TrainState

EARLY_END_RATIO = 0.2  # warn if the run would end with more than this share of its time budget unused


class RunLength:
    """The run's `total_steps`, the time it has taken and the `budget` of the time left."""

    def __init__(self, run: RunSetup, state: TrainState, warn: Callable[[str], None]) -> None:
        self.total_steps = run.total_steps
        self._run, self._state, self._warn = run, state, warn
        self._training, self._group = run.config.training, run.plan.group
        self._earlier_seconds = 0.0  # taken by the run's earlier processes
        self._warned = False
        weights, moments = (sum(t.nbytes for t in tensors.values()) for tensors in (state.weights(), state.moments()))
        self.budget = Budget(
            self._training,
            self.elapsed_seconds,
            run.eval_token_ratio,
            snapshot_bytes=weights + moments,
            export_bytes=weights,
        )

    @property
    def _progress(self) -> Progress:
        return self._state.progress

    def restore(self, recorded: Sequence[Event]) -> None:
        """Continues a run with the events that rank 0 has read from its record; call it on all ranks."""
        # From the events, because a killed process ran longer than its last snapshot.
        elapsed = [event.get("elapsed_seconds") or 0.0 for event in recorded]
        self._earlier_seconds = self._group.broadcast_object(lambda: max(elapsed, default=0.0))
        finished = self._group.broadcast_object(lambda: not self.budget.worth_more())
        planned = self._progress.total_steps
        if self._training.time_limited and planned and (self._progress.step < planned or finished):
            self.total_steps = min(self._run.total_steps, planned)

    def elapsed_seconds(self) -> float:
        """Returns the seconds the run has taken, including its earlier processes."""
        return self._earlier_seconds + time.monotonic() - self._run.started

    def eta_seconds(self, step_seconds: float) -> float:
        left = max(0.0, self.budget.seconds_left())
        return min(left, (self.total_steps - self._progress.step) * step_seconds)

    def is_finished(self) -> bool:
        max_tokens = self._training.max_tokens
        return self._progress.step >= self.total_steps or (
            max_tokens is not None and self._progress.tokens >= max_tokens
        )

    def is_out_of_time(self) -> bool:
        """Returns whether the run finished with fewer steps than it would have made without its time limit."""
        return self._progress.step >= self.total_steps < self._run.total_steps

    def replan(self) -> bool:
        """Updates `total_steps` of a time-limited run on all ranks and returns whether it changed."""
        if not self._training.time_limited:
            return False
        total = int(self._group.all_reduce_max(self._fitting_steps() if self._group.is_main else 0))
        if total == self.total_steps:
            return False
        self.total_steps = self._progress.total_steps = total
        return True

    def _fitting_steps(self) -> int:
        """Returns the total number of steps that currently fits into the run's time."""
        if self.is_finished() or not self.budget.should_replan():
            return self.total_steps
        step, max_steps = self._progress.step, self._run.total_steps
        fitting = self.budget.steps_left(step)
        if fitting is None:
            return self.total_steps
        total = min(max_steps, step + fitting)
        if not self._warned and self.budget.idle_ratio(max_steps - step) > EARLY_END_RATIO:
            self._warned = True
            self._warn(
                f"num_epochs, max_steps or max_tokens end the run after {counted(total, 'step')}, long before its time "
                "is up; set them to null to use all of the time."
            )
        return total
