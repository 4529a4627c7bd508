"""One optimizer update."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import torch

from sansgpu.config import SansGPUError, TrainingConfig, fold_seed
from sansgpu.data.batch import Examples
from sansgpu.machine.group import ALONE, Group
from sansgpu.machine.pressure import MemoryShortError
from sansgpu.tasks import Sums, Task
from sansgpu.train.state import TrainState

PHASES = ("data", "forward", "backward", "reduce", "update")  # of a step's time; the first is its caller's
_LOSS = "summed loss"  # beside a task's own sums, none of which has a blank in its name


@dataclass(frozen=True)
class StepPlan:
    """How this process does its share of a step. None of it changes what is learned, but for dropout's draws."""

    micro_batch: int
    device: torch.device
    precision: str
    group: Group = ALONE

    @property
    def compute_dtype(self) -> torch.dtype:
        """What matrices are multiplied in."""
        return torch.bfloat16 if self.precision == "bf16" else torch.float32

    def autocast(self) -> torch.autocast:
        """Products in the compute dtype; weights and sums stay fp32."""
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.precision == "bf16")


class Phases:
    """Seconds of PHASES, as this process waits for them; each lap ends one."""

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(PHASES, 0.0)
        self._last = time.perf_counter()

    def lap(self, phase: str) -> None:
        """What was done since the last lap was `phase`."""
        now = time.perf_counter()
        self.seconds[phase] += now - self._last
        self._last = now


@dataclass(frozen=True)
class StepResult:
    """What a step did."""

    loss_sum: float
    targets: int  # that it is summed over
    tokens: int
    grad_norm: float
    sums: Sums  # the task's own


def train_step(
    state: TrainState,
    task: Task,
    batch: Examples,
    plan: StepPlan,
    training: TrainingConfig,
    lr: float,
    allowed: Callable[[int], int] = lambda size: size,
    phases: Phases | None = None,
) -> StepResult:
    """Accumulate the gradient of `batch` in micro-batches, clip it and update.

    The loss is summed over targets and divided once by those of the whole batch, so no split changes it; `allowed`
    is asked before each micro-batch how much of one memory allows. One whose forward pass raises MemoryShortError is
    cut and tried again. `phases` is told where the time goes.
    Raises SansGPUError, before any weight changes, where loss or gradient are not finite.
    """
    phases = phases or Phases()
    targets = batch.target_count()
    loss_sum = torch.zeros((), dtype=torch.float64, device=plan.device)
    pending = deque(batch.micro_batches(plan.micro_batch, plan.group.rank, plan.group.size))
    index = 0
    while pending:
        piece = pending.popleft()
        if (rows := allowed(len(piece))) < len(piece):
            pending.appendleft(piece.rows(rows, len(piece)))
            piece = piece.rows(0, rows)
        with torch.random.fork_rng(devices=[plan.device] if plan.device.type == "cuda" else []):
            torch.manual_seed(fold_seed(training.seed, "dropout", state.progress.step, index, plan.group.rank))
            try:
                with plan.autocast():
                    loss = task.loss(piece.to(plan.device))
            except MemoryShortError:
                pending.appendleft(piece)
                continue
            if not index:
                state.optimizer.expect_sum(bool(pending))
            if not pending:
                state.optimizer.expect_whole()
            phases.lap("forward")
            (loss / targets).backward()
            phases.lap("backward")
        loss_sum += loss.detach()
        index += 1
    state.optimizer.reduce()
    sums = plan.group.add_up({_LOSS: float(loss_sum), **task.step_sums()})
    total = sums.pop(_LOSS)
    phases.lap("reduce")
    grad_norm = state.optimizer.norm()
    if not (math.isfinite(total) and math.isfinite(grad_norm)):
        raise SansGPUError(
            f"step {state.progress.step + 1}: the loss is {total / targets:g} and the gradient norm {grad_norm:g}; "
            "earlier snapshots are kept; go on from one with a lower learning_rate or more warmup_steps."
        )
    limit = training.max_grad_norm
    scale = min(1.0, limit / (grad_norm + 1e-6)) if limit else 1.0
    state.optimizer.step(lr, state.progress.step + 1, scale)
    phases.lap("update")
    return StepResult(total, targets, batch.token_count(), grad_norm, sums)
