"""Step events, averaged over the steps since the last event."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from sansgpu.machine.probe import Environment, best_gemm_rate
from sansgpu.machine.usage import Usage
from sansgpu.reporting.events import Event
from sansgpu.tasks import Task
from sansgpu.train.schedule import UNKNOWN_STEPS
from sansgpu.train.state import Progress
from sansgpu.train.step import PHASES, PhaseTimer, StepPlan, StepResult

System = Callable[[], dict[str, Any] | None]  # returns machine statistics since its last call


class StepLog:
    """Collects steps and turns them into step events.

    `gemm_flops_per_second` is the best total GEMM rate of all processes of `plan`, the denominator of `mfu`.
    """

    def __init__(self, task: Task, gemm_flops_per_second: float, plan: StepPlan, system: System = lambda: None) -> None:
        self._task, self._gemm, self._plan, self._system = task, gemm_flops_per_second, plan, system
        self._usage = Usage()
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
        flops_per_second, plan = self._task.flops_per_token * tokens / seconds, self._plan
        self._gemm = best_gemm_rate(
            self._gemm, flops_per_second, plan.precision, plan.device.type, processes=plan.group.size
        )
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
            "mfu": flops_per_second / self._gemm,
            "gemm_flops_per_second": self._gemm,
            "rss_bytes": self._usage.rss_bytes(),
            "cpu_percent": self._usage.cpu_percent(),
            "total_steps": None if total_steps == UNKNOWN_STEPS else total_steps,
            "phase_seconds": {p: sum(step[2].seconds[p] for step in steps) / len(steps) for p in PHASES},
            "system": self._system(),
        }
        progress.logged_loss, progress.logged_targets, progress.logged_sums = 0.0, 0, {}
        return event
