"""Emits the events of a run and the warnings that follow from them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import psutil
import torch

from sansgpu.events.event import Event, Sinks, finite
from sansgpu.machine.measurements import BUSY_CORES, flops_utilization
from sansgpu.machine.probe import resolve_threads
from sansgpu.tasks.task import CarriesSums, FindsProblems, Task
from sansgpu.train.health import Health
from sansgpu.train.run import TrainingRun
from sansgpu.train.run_length import RunLength
from sansgpu.train.schedule import UNKNOWN_STEPS
from sansgpu.train.snapshots import Progress
from sansgpu.train.step import StepResult

AGREEING_EVENTS = 2  # consecutive step events that must suggest the same number of threads; one may be an outlier
MAX_REPEATS = 3  # each new measurement of the GEMM rate takes tenths of a second

SystemStatistics = Callable[[], dict[str, Any] | None]  # returns machine statistics since its last call


class RunLog:
    """Emits step and evaluation events, each followed by warnings about the run's health.

    Step events may also change the number of compute threads.
    """

    def __init__(
        self, task: Task, run: TrainingRun, length: RunLength, sinks: Sinks, system: SystemStatistics = lambda: None
    ) -> None:
        self._run, self._length, self._sinks = run, length, sinks
        self._steps = StepLog(task, run, system)
        problem = task.step_problem if isinstance(task, FindsProblems) else None
        self._health = Health(run.config.training, run.config.settings.main_metric, problem)
        self._threads = AdaptiveThreads(run)

    def restore(self, recorded: Sequence[Event], step: int) -> None:
        """Replays the recorded events up to `step`, so that warnings are neither repeated nor lost."""
        for event in recorded:
            if (event.get("step") or 0) <= step:
                self._health.observe(event)
        self._steps.restore(recorded)

    def add_step(self, seconds: float, data_seconds: float, result: StepResult) -> None:
        """Adds a step to the averages of the next step event; `data_seconds` of it were spent waiting for its batch."""
        self._steps.add(seconds, data_seconds, result)

    def emit_step(self, progress: Progress, result: StepResult, lr: float) -> None:
        event = self._steps.event(progress, result, lr, self._length.total_steps)
        event["eta_seconds"] = self._length.eta_seconds(event["step_seconds"])
        event["elapsed_seconds"] = self._length.elapsed_seconds()
        self.emit({**event, "threads": self._run.execution.threads})
        if message := self._threads.observe(event):
            self._sinks.emit({"event": "warning", "step": event["step"], "cause": "threads", "message": message})

    def emit(self, event: Event) -> None:
        """Emits an event and the warnings about the run's health that it causes."""
        event = finite(event)
        self._sinks.emit(event)
        for warning in self._health.observe(event) if self._run.execution.group.is_main else ():
            self._sinks.emit(warning)


class StepLog:
    """Collects steps and turns them into step events."""

    def __init__(self, task: Task, run: TrainingRun, system: SystemStatistics = lambda: None) -> None:
        self._task, self._run, self._system = task, run, system
        self._gemm = run.gemm_flops_per_second
        self._process = psutil.Process()
        self._process.cpu_percent()  # later calls return the use since the one before
        self._was_busy, self._repeats_left = False, MAX_REPEATS
        # seconds, tokens, FLOPs, and seconds by phase
        self._steps: list[tuple[float, int, float, dict[str, float]]] = []

    def restore(self, recorded: Sequence[Event]) -> None:
        """Restores the best GEMM rate recorded earlier in the same environment, so that `mfu` stays comparable."""
        alike, names = False, ("device", "isa", "precision", "threads", "world_size")
        environment: dict[str, object] = {**self._run.execution.environment()}
        for event in recorded:
            if event["event"] == "start":
                alike = all(event.get(name) == environment[name] for name in names)
            elif event["event"] == "step" and alike:
                self._gemm = max(self._gemm, event.get("gemm_flops_per_second") or 0.0)

    def add(self, seconds: float, data_seconds: float, result: StepResult) -> None:
        phases = {"data": data_seconds, **result.phase_seconds}
        flops = self._task.flops_per_token * result.computed_tokens  # now, because it changes if layers are frozen
        self._steps.append((seconds, result.tokens, flops, phases))

    def event(self, progress: Progress, result: StepResult, lr: float, total_steps: int) -> Event:
        """Returns the event for the steps since the last one; the caller adds elapsed time, ETA and threads."""
        steps, self._steps = self._steps, []
        seconds, tokens = sum(step[0] for step in steps), sum(step[1] for step in steps)
        flops_per_second, system = sum(step[2] for step in steps) / seconds, self._system()
        self._correct_gemm(flops_per_second, system or {})
        event = {
            "event": "step",
            "step": progress.step,
            "loss": progress.logged_loss / progress.logged_targets,
            **self._task.step_metrics(progress.logged_sums),
            "lr": lr,
            "grad_norm": result.grad_norm,
            "tokens": progress.tokens,
            "tokens_per_second": tokens / seconds,
            "step_seconds": seconds / len(steps),
            "it/s": len(steps) / seconds,
            "mfu": flops_utilization(flops_per_second, self._gemm),
            "gemm_flops_per_second": self._gemm,
            "rss_bytes": self._process.memory_info().rss,
            "cpu_percent": self._process.cpu_percent(),
            "total_steps": None if total_steps == UNKNOWN_STEPS else total_steps,
            "phase_seconds": {p: sum(step[3][p] for step in steps) / len(steps) for p in steps[-1][3]},
            "system": system,
        }
        carried = self._task.carried_sums(progress.logged_sums) if isinstance(self._task, CarriesSums) else {}
        progress.logged_loss, progress.logged_targets, progress.logged_sums = 0.0, 0, carried
        return event

    def _correct_gemm(self, flops_per_second: float, system: dict[str, Any]) -> None:
        """Measures the GEMM rate again if the model exceeds it, or if other programs have just stopped."""
        others = (system.get("other_percent") or 0.0) + (system.get("stolen_percent") or 0.0)
        was_busy, self._was_busy = self._was_busy, others > 100 * BUSY_CORES
        quieter = was_busy and not self._was_busy
        if self._repeats_left and (quieter or flops_per_second > self._gemm):
            self._repeats_left -= 1
            self._gemm = max(self._gemm, self._run.measure_gemm_again())


class AdaptiveThreads:
    """Adapts torch's number of threads to the free cores if `training.adapt_threads` is set."""

    def __init__(self, run: TrainingRun) -> None:
        self._enabled, self._execution = run.config.training.adapt_threads, run.execution
        self._max_threads = max(run.execution.threads, resolve_threads(run.config.training))
        self._suggested: list[int] = []  # numbers of threads that the last step events suggest

    def observe(self, event: Event) -> str | None:
        """Sets the number of threads that suits the last events; returns a message if it changed, otherwise None."""
        system = event["system"] or {}
        others = ((system.get("other_percent") or 0.0) + (system.get("stolen_percent") or 0.0)) / 100
        self._suggested = [*self._suggested, max(1, self._max_threads - round(others))][-AGREEING_EVENTS:]
        suggested, before = self._suggested[-1], self._execution.threads
        if not self._enabled or suggested == before or self._suggested != [suggested] * AGREEING_EVENTS:
            return None
        self._execution.threads = suggested
        torch.set_num_threads(suggested)
        return (
            f"other programs use {others:.1f} cores: training.threads is now {suggested} instead of {before}; results "
            "are no longer bit-reproducible."
        )
