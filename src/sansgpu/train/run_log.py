"""Emits the events of a run and the warnings that follow from them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from sansgpu.events.event import Event, Sinks, finite
from sansgpu.machine.cached_measurement import BUSY_CORES
from sansgpu.machine.gemm_peak import flops_utilization
from sansgpu.machine.probe import Environment
from sansgpu.machine.usage import Usage
from sansgpu.tasks.task import Task
from sansgpu.train.health import Health
from sansgpu.train.run_length import RunLength
from sansgpu.train.run_setup import RunSetup
from sansgpu.train.schedule import UNKNOWN_STEPS
from sansgpu.train.state import Progress
from sansgpu.train.step import PHASES, PhaseTimer, StepResult
from sansgpu.train.threads import AdaptiveThreads

MAX_REPEATS = 3  # each new measurement of the GEMM rate takes tenths of a second

SystemStatistics = Callable[[], dict[str, Any] | None]  # returns machine statistics since its last call


class RunLog:
    """Emits step and evaluation events, each followed by warnings about the run's health.

    Step events may also change the number of compute `threads`.
    """

    def __init__(
        self, task: Task, run: RunSetup, length: RunLength, sinks: Sinks, system: SystemStatistics = lambda: None
    ) -> None:
        self._run, self._length, self._sinks = run, length, sinks
        self._steps = StepLog(task, run.gemm_flops_per_second, run.measure_gemm_again, system)
        self._health = Health(run.config.training)
        self._threads = AdaptiveThreads(run.config.training, run.environment)

    @property
    def threads(self) -> int:
        return self._threads.count

    def restore(self, recorded: Sequence[Event], step: int) -> None:
        """Replays the recorded events up to `step`, so that warnings are neither repeated nor lost."""
        for event in recorded:
            if (event.get("step") or 0) <= step:
                self._health.observe(event)
        self._steps.restore(recorded, self._run.environment)

    def add_step(self, seconds: float, tokens: int, phases: PhaseTimer) -> None:
        """Adds a step to the averages of the next step event."""
        self._steps.add(seconds, tokens, phases)

    def emit_step(self, progress: Progress, result: StepResult, lr: float) -> None:
        event = self._steps.event(progress, result, lr, self._length.total_steps)
        event["eta_seconds"] = self._length.eta_seconds(event["step_seconds"])
        event["elapsed_seconds"] = self._length.elapsed_seconds()
        self.emit({**event, "threads": self.threads})
        if message := self._threads.observe(event):
            self._sinks.emit({"event": "warning", "step": event["step"], "cause": "threads", "message": message})

    def emit(self, event: Event) -> None:
        """Emits an event and the warnings about the run's health that it causes."""
        event = finite(event)
        self._sinks.emit(event)
        for warning in self._health.observe(event) if self._run.plan.group.is_main else ():
            self._sinks.emit(warning)


class StepLog:
    """Collects steps and turns them into step events.

    `gemm_flops_per_second` is the best total GEMM rate of all processes, the denominator of `mfu`; `measure_again`
    measures it once more.
    """

    def __init__(
        self,
        task: Task,
        gemm_flops_per_second: float,
        measure_again: Callable[[], float],
        system: SystemStatistics = lambda: None,
    ) -> None:
        self._task, self._gemm, self._measure_again, self._system = task, gemm_flops_per_second, measure_again, system
        self._usage = Usage()
        self._was_busy, self._repeats_left = False, MAX_REPEATS
        self._steps: list[tuple[float, int, PhaseTimer]] = []  # seconds, tokens and phases

    def restore(self, recorded: Sequence[Event], environment: Environment) -> None:
        """Takes over the best GEMM rate recorded earlier in the same environment, so that `mfu` stays comparable."""
        alike, names = False, ("device", "isa", "precision", "threads", "world_size")
        for event in recorded:
            if event["event"] == "start":
                alike = all(event.get(name) == getattr(environment, name) for name in names)
            elif event["event"] == "step" and alike:
                self._gemm = max(self._gemm, event.get("gemm_flops_per_second") or 0.0)

    def add(self, seconds: float, tokens: int, phases: PhaseTimer) -> None:
        self._steps.append((seconds, tokens, phases))

    def event(self, progress: Progress, result: StepResult, lr: float, total_steps: int) -> Event:
        """Returns the event for the steps since the last one; the caller adds elapsed time, ETA and threads."""
        steps, self._steps = self._steps, []
        seconds, tokens = sum(step[0] for step in steps), sum(step[1] for step in steps)
        flops_per_second, system = self._task.flops_per_token * tokens / seconds, self._system()
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
            "rss_bytes": self._usage.rss_bytes(),
            "cpu_percent": self._usage.cpu_percent(),
            "total_steps": None if total_steps == UNKNOWN_STEPS else total_steps,
            "phase_seconds": {p: sum(step[2].seconds[p] for step in steps) / len(steps) for p in PHASES},
            "system": system,
        }
        progress.logged_loss, progress.logged_targets, progress.logged_sums = 0.0, 0, {}
        return event

    def _correct_gemm(self, flops_per_second: float, system: dict[str, Any]) -> None:
        """Measures the GEMM rate again if the model exceeds it, or if other programs have just stopped."""
        others = (system.get("other_percent") or 0.0) + (system.get("stolen_percent") or 0.0)
        was_busy, self._was_busy = self._was_busy, others > 100 * BUSY_CORES
        quieter = was_busy and not self._was_busy
        if self._repeats_left and (quieter or flops_per_second > self._gemm):
            self._repeats_left -= 1
            self._gemm = max(self._gemm, self._measure_again())
