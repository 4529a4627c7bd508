"""What is said of steps: the means of those since it was last said."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sansgpu.machine.usage import Usage
from sansgpu.tasks import Task
from sansgpu.train.schedule import UNKNOWN
from sansgpu.train.state import Progress
from sansgpu.train.step import PHASES, Phases, StepResult
from sansgpu.watch.events import Event

System = Callable[[], dict[str, Any] | None]  # what the machine went through since it was last asked


class StepLog:
    """Collects steps, and makes a step event of them."""

    def __init__(self, task: Task, gemm_flops_per_second: float, system: System = lambda: None) -> None:
        self._task, self._gemm, self._system = task, gemm_flops_per_second, system
        self._usage = Usage()
        self._steps: list[tuple[float, int, Phases]] = []  # seconds, tokens and phases

    def add(self, seconds: float, tokens: int, phases: Phases) -> None:
        """One more step."""
        self._steps.append((seconds, tokens, phases))

    def event(self, progress: Progress, result: StepResult, lr: float, total_steps: int) -> Event:
        """The event of this step, but for what is known of the time. The next one begins anew."""
        steps, self._steps = self._steps, []
        seconds, tokens = sum(step[0] for step in steps), sum(step[1] for step in steps)
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
            "mfu": self._task.flops_per_token * tokens / seconds / self._gemm,
            "rss_bytes": self._usage.rss_bytes(),
            "cpu_percent": self._usage.cpu_percent(),
            "total_steps": None if total_steps == UNKNOWN else total_steps,
            "phase_seconds": {p: sum(step[2].seconds[p] for step in steps) / len(steps) for p in PHASES},
            "system": self._system(),
        }
        progress.logged_loss, progress.logged_targets, progress.logged_sums = 0.0, 0, {}
        return event
