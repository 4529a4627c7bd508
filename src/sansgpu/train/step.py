"""A training step: forward and backward over micro-batches, reduction, clipping and update."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from sansgpu.config import SansGPUError, TrainingConfig, derive_seed
from sansgpu.data.batch import ExampleBatch
from sansgpu.machine.group import SINGLE_PROCESS, Group
from sansgpu.machine.pressure import MemoryShortError
from sansgpu.tasks.task import StepWideObjective, Sums, Task
from sansgpu.train.gradient_cache import GradientCache
from sansgpu.train.state import TrainState

PHASES = ("data", "forward", "backward", "reduce", "update")  # parts of a step's time; the caller measures "data"
_LOSS = "summed loss"  # a key next to the task's own sums, whose names contain no space


@dataclass(frozen=True)
class StepPlan:
    """How this process computes its share of a step. Up to rounding, it affects nothing but the dropout masks."""

    micro_batch: int
    device: torch.device
    precision: str
    group: Group = SINGLE_PROCESS

    @property
    def compute_dtype(self) -> torch.dtype:
        """The dtype of matrix products."""
        return torch.bfloat16 if self.precision == "bf16" else torch.float32

    def autocast(self) -> torch.autocast:
        """Returns a context for mixed precision: matmuls in the compute dtype, weights and sums in fp32."""
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.precision == "bf16")


class PhaseTimer:
    """A stopwatch for the PHASES of a step."""

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(PHASES, 0.0)
        self._last = time.perf_counter()

    def lap(self, phase: str) -> None:
        """Adds the time since the last call to `phase`."""
        now = time.perf_counter()
        self.seconds[phase] += now - self._last
        self._last = now


@dataclass(frozen=True)
class StepResult:
    """The result of a training step."""

    loss_sum: float
    targets: int  # number of terms in loss_sum
    tokens: int
    grad_norm: float
    sums: Sums  # task-specific sums


LossFunction = Callable[[ExampleBatch, Iterable[ExampleBatch], int], torch.Tensor]


def _loss_function(task: Task, batch: ExampleBatch, plan: StepPlan, seed: Callable[[int], None]) -> LossFunction:
    """Returns the loss of a micro-batch, given those after it in the step and its number, for which `seed` is called.

    The loss of a task that relates all examples of the step is computed by a gradient cache.
    """
    if not isinstance(task, StepWideObjective):
        return lambda piece, later, index: task.loss(piece)
    ranks = range(plan.group.size)
    batches = [list(batch.micro_batches(plan.micro_batch, rank, plan.group.size)) for rank in ranks]
    return GradientCache(task, plan.group, batches, seed).loss


def _seed_dropout(device: torch.device, seed: int, step: int, rank: int, index: int) -> None:
    """Seeds the dropout of a micro-batch.

    torch.manual_seed formats a stack trace for each kind of GPU, so it is called only if the device is no CPU.
    """
    generator: Any = torch.default_generator if device.type == "cpu" else torch
    generator.manual_seed(derive_seed(seed, "dropout", step, index, rank))


def train_step(
    state: TrainState,
    task: Task,
    batch: ExampleBatch,
    plan: StepPlan,
    training: TrainingConfig,
    lr: float,
    allowed: Callable[[int], int] = lambda size: size,
    phases: PhaseTimer | None = None,
) -> StepResult:
    """Accumulates the gradient of `batch` in micro-batches, clips it and updates the weights.

    The summed loss is divided by the number of targets of the global batch, so the result does not depend on how the
    batch is split. `allowed` limits the rows of each micro-batch to what fits into memory; a micro-batch whose forward
    pass raises MemoryShortError is split and tried again. `phases` collects timings.
    Raises SansGPUError before any weight changes if the loss or the gradient norm is not finite.
    """
    phases, targets = phases or PhaseTimer(), batch.target_count()
    seed = partial(_seed_dropout, plan.device, training.seed, state.progress.step, plan.group.rank)
    loss_of = _loss_function(task, batch, plan, seed)
    loss_sum = torch.zeros((), dtype=torch.float64, device=plan.device)
    pending = deque(batch.micro_batches(plan.micro_batch, plan.group.rank, plan.group.size))
    index = 0
    while pending:
        piece = pending.popleft()
        if (rows := allowed(len(piece))) < len(piece):
            pending.appendleft(piece.rows(rows, len(piece)))
            piece = piece.rows(0, rows)
        with torch.random.fork_rng(devices=[plan.device] if plan.device.type == "cuda" else []):
            seed(index)
            try:
                with plan.autocast():
                    loss = loss_of(piece.to(plan.device), pending, index)
            except MemoryShortError:
                pending.appendleft(piece)
                continue
            state.optimizer.set_accumulation(index > 0 or bool(pending))
            if not pending:
                state.optimizer.mark_last_backward()
            phases.lap("forward")
            (loss / targets).backward()
            phases.lap("backward")
            state.optimizer.set_accumulation(False)  # other gradients, as of a custom loss, are no part of the sums
        loss_sum += loss.detach()
        index += 1
    state.optimizer.reduce()
    sums = plan.group.all_reduce_sums({_LOSS: float(loss_sum), **task.step_sums()})
    total = sums.pop(_LOSS)
    phases.lap("reduce")
    grad_norm = state.optimizer.grad_norm()
    if not (math.isfinite(total) and math.isfinite(grad_norm)):
        raise SansGPUError(
            f"step {state.progress.step + 1}: the loss is {total / targets:g} and the gradient norm {grad_norm:g}; "
            "resume from an earlier snapshot with a lower learning_rate or more warmup_steps."
        )
    limit = training.max_grad_norm
    scale = min(1.0, limit / (grad_norm + 1e-6)) if limit else 1.0
    state.optimizer.step(lr, state.progress.step + 1, scale)
    phases.lap("update")
    return StepResult(total, targets, batch.token_count(), grad_norm, sums)
