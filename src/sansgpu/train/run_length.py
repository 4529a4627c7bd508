"""The number of steps of a run. A time-limited run adapts it to its time budget."""

from __future__ import annotations

import time
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime

from sansgpu.config.training import TrainingConfig
from sansgpu.config.wording import counted
from sansgpu.events.event import Event
from sansgpu.events.progress import Warn
from sansgpu.train.run import TrainingRun
from sansgpu.train.schedule import ONE_PHASE, StepPhases, default_epochs, learning_rate, usual_epochs
from sansgpu.train.snapshots import Progress
from sansgpu.train.state import TrainState

FIRST_STEPS = 25  # re-plan after every step until this many were timed
RECENT_STEPS = 100  # steps whose mean duration predicts that of future steps
DISK_BYTES_PER_SECOND = 100e6  # assumed rate of hashing and writing the last snapshot and the export; slow for a disk
MARGIN_RATIO, MARGIN_SECONDS = 0.01, 1.0  # safety margin: a share of the total budget, plus seconds
# Extra time of the first evaluation, which compiles: seconds, and at most this share of the total budget.
FIRST_EVALUATION_SECONDS, FIRST_EVALUATION_RATIO = 10.0, 0.03
MIN_USEFUL_RATIO = 0.05  # a finished run continues if more than this share of the budget is left
EARLY_END_RATIO = 0.2  # warn if the run would end with more than this share of its time budget unused
REPLAN_RATIO, REPLAN_LEFT_RATIO = 0.02, 0.2  # re-plan after this share of the total, or of the remaining, budget


@dataclass
class Budget:
    """Estimates how many steps fit into the remaining time; estimates are revised during the run.

    `elapsed` returns the seconds the run has taken, including its earlier processes.
    """

    training: TrainingConfig
    elapsed: Callable[[], float]
    validation_share: float  # estimated duration of an evaluation / duration of a step
    snapshot_bytes: int
    export_bytes: int
    final_evaluations: int = 1  # 2 if the best snapshot predicts again
    wall_clock: Callable[[], datetime] = datetime.now
    phases: StepPhases = ONE_PHASE
    _steps: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT_STEPS))
    _evaluation_seconds: float | None = None
    _save_seconds: float = 0.0
    _planned_at: float = float("-inf")
    _total: float | None = None

    def seconds_left(self) -> float:
        """Returns the remaining time, infinite without a time limit."""
        limits = [float("inf")]
        if self.training.max_hours is not None:
            limits.append(self.training.max_hours * 3600 - self.elapsed())
        if self.training.until is not None:
            limits.append((datetime.fromisoformat(self.training.until) - self.wall_clock()).total_seconds())
        return min(limits)

    def record_step(self, seconds: float) -> None:
        """Records the duration of a step. The first step of a process is excluded because it compiles."""
        self._steps.append(seconds)

    def forget_steps(self) -> None:
        """Forgets the recorded steps, because those to come take a different time."""
        self._steps.clear()

    def record_evaluation(self, seconds: float) -> None:
        """Records how long the loop waited for an evaluation, its sample and its snapshot."""
        self._evaluation_seconds = seconds

    def record_save(self, seconds: float) -> None:
        """Records how long the loop waited for a snapshot."""
        self._save_seconds = seconds

    def steps_left(self, done: int) -> int | None:
        """Returns how many steps after the first `done` fit into the remaining time, or None if no step was timed yet.

        The estimate includes the evaluations and snapshots due from step `done` on, and the final ones with the export.
        """
        left = self.seconds_left()
        if self._total is None:
            self._total = left
        self._planned_at = self.elapsed()
        if left <= 0:
            return 0
        if not self._steps:
            return None
        usable = left - self._reserve()
        if usable < 0:
            return 0
        counts = range(int(usable / (self._unit(done) * min(1.0, self.phases.later_work))) + 1)
        return bisect_right(counts, usable, key=lambda n: self._seconds(done, n) + self._pause_seconds(done, n)) - 1

    def idle_ratio(self, done: int, more: int) -> float:
        """Returns the share of the total budget that would be unused after `more` steps after the first `done`."""
        spare = self.seconds_left() - self._reserve() - self._seconds(done, more)
        return spare / self._total if self._total and spare > 0 else 0.0

    def worth_more(self) -> bool:
        """Returns whether the remaining time is enough to continue a finished run."""
        hours = self.training.max_hours or 0.0
        return self.seconds_left() > 2 * self._reserve() + MIN_USEFUL_RATIO * hours * 3600

    def should_replan(self) -> bool:
        """Returns whether to re-plan the number of steps now: often at the start and near the end."""
        if not self.training.time_limited:
            return False
        if self._total is None or len(self._steps) < FIRST_STEPS:
            return True
        wait = min(REPLAN_RATIO * self._total, REPLAN_LEFT_RATIO * max(0.0, self.seconds_left() - self._reserve()))
        return self.elapsed() - self._planned_at >= wait

    def _step(self) -> float:
        return sum(self._steps) / max(1, len(self._steps))

    def _unit(self, done: int) -> float:
        """Returns the duration of a step in which all layers learn, from the recorded steps before step `done`."""
        return self._step() / self.phases.step_work(done - 1)

    def _seconds(self, done: int, more: int) -> float:
        """Returns the duration of `more` steps after the first `done`."""
        return self.phases.work(done, more) * self._unit(done)

    def _pause_seconds(self, done: int, more: int) -> float:
        """Returns seconds of evaluations and snapshots after steps `done` to `done + more - 1`."""
        training = self.training
        pauses = ((training.eval_steps, self._evaluation()), (training.save_steps, self._save_seconds))
        return sum(seconds * ((done + more - 1) // n - (done - 1) // n) for n, seconds in pauses if n)

    def _reserve(self) -> float:
        """Returns the seconds to keep free for the final evaluation, snapshot and export, plus a margin."""
        margin = MARGIN_RATIO * (self._total or 0.0) + MARGIN_SECONDS
        if self._evaluation_seconds is None:
            margin += min(FIRST_EVALUATION_SECONDS, FIRST_EVALUATION_RATIO * (self._total or 0.0))
        # The last snapshot waits for one that is still being written.
        snapshots = 2 if self.training.save_steps or self.training.eval_steps else 1
        written = snapshots * self.snapshot_bytes + self.export_bytes
        return self.final_evaluations * self._evaluation() + written / DISK_BYTES_PER_SECOND + margin

    def _evaluation(self) -> float:
        if self._evaluation_seconds is not None:
            return self._evaluation_seconds
        return self._step() * self.validation_share


class RunLength:
    """Tracks the run's `total_steps`, its elapsed time and the `budget` of its remaining time."""

    def __init__(self, run: TrainingRun, state: TrainState, warn: Warn) -> None:
        self.total_steps = run.total_steps
        self._run, self._state, self._warn = run, state, warn
        self._training, self._group = run.config.training, run.execution.group
        self._earlier_seconds = 0.0  # taken by the run's earlier processes
        self._warned = False
        self.phases = run.phases
        weights, moments = (sum(t.nbytes for t in tensors.values()) for tensors in (state.weights(), state.moments()))
        self.budget = Budget(
            self._training,
            self.elapsed_seconds,
            run.steps_per_evaluation,
            snapshot_bytes=weights + moments,
            export_bytes=weights,
            phases=self.phases,
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

    def expected_steps(self) -> int | None:
        """Returns the steps after which the run will probably end, or None without a time limit."""
        if not self._training.time_limited:
            return None
        if self.total_steps < self._run.total_steps:
            return self.total_steps  # planned before the run was interrupted
        done, budget = self._progress.step, replace(self.budget, _steps=deque([self._run.step_seconds]))
        return min(self.total_steps, done + max(1, budget.steps_left(done) or 0))

    def schedule_change(self, recorded: Sequence[Event]) -> str | None:
        """Describes what a resumed run does whose number of steps differs from the recorded one."""
        before = next(filter(None, (event.get("total_steps") for event in reversed(recorded))), None)
        step, now, training = self._progress.step, self.total_steps, self._training
        if not training.time_limited and before and now < min(step, before):
            return (
                f"the run is at step {step:,} and now ends after {now:,}, so it is not trained any further; raise its "
                "limit, e.g. training.max_steps, to continue it."
            )
        if training.time_limited or not before or step >= now:
            return None
        old, new = (learning_rate(training, min(step, total - 1), total) for total in (before, now))
        if old == new:
            return None
        was = "was" if step >= before else "would be"
        return (
            f"the run now has {now:,} steps instead of {before:,}, and training.lr_scheduler {training.lr_scheduler} "
            f"covers all of them: the learning rate of the next step is {new:.3g}, where it {was} {old:.3g}. To keep a "
            "low learning rate, set training.learning_rate and training.lr_scheduler=constant."
        )

    def elapsed_seconds(self) -> float:
        """Returns the seconds the run has taken, including its earlier processes."""
        return self._earlier_seconds + time.monotonic() - self._run.started

    def eta_seconds(self, step_seconds: float) -> float:
        left = max(0.0, self.budget.seconds_left())
        step = self._progress.step
        work = self.phases.work(step, max(0, self.total_steps - step)) / self.phases.step_work(step - 1)
        return min(left, work * step_seconds)

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
        if not self._warned and self.budget.idle_ratio(step, max_steps - step) > EARLY_END_RATIO:
            self._warned = True
            self._warn_of_unused_time(total)
        return total

    def _warn_of_unused_time(self, total: int) -> None:
        """Warns that a limit other than the time ends the run early, unless that is the task's default."""
        if default_epochs(self._run.config) is not None:
            return
        more = "set them to null to use all" if usual_epochs(self._run.config) is None else "raise them to use more"
        self._warn(
            f"num_epochs, max_steps or max_tokens end the run after {counted(total, 'step')}, long before its time "
            f"limit; {more} of the time."
        )
