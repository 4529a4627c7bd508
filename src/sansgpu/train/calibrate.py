"""What only a measurement tells before a run: the fastest micro-batch, and whether compiling helps."""

from __future__ import annotations

import time

import torch

from sansgpu.config import TrainingConfig, fold_seed
from sansgpu.tasks import Task
from sansgpu.train.optim import Optimizer
from sansgpu.train.step import StepPlan

REPEATS = 2  # timed, behind one that warms up
MARGIN = 0.97  # of the time of the best so far: what is less than this faster is noise, and the smaller one stays


def fastest_micro_batch(task: Task, training: TrainingConfig, plan: StepPlan, sizes: list[int]) -> int:
    """Of `sizes`, the micro-batch that takes the least time an example, forward and backward; small ones first.

    Sizes are tried from the smallest up until memory traffic outweighs what larger products gain.
    """
    best, best_seconds = sizes[0], float("inf")
    with _Trial(task, training, plan) as trial:
        for size in sorted(sizes):
            seconds = trial.seconds(size) / size
            if seconds > best_seconds / MARGIN:
                break
            if seconds < best_seconds * MARGIN:
                best, best_seconds = size, seconds
    return best


def compiling_helps(task: Task, training: TrainingConfig, plan: StepPlan) -> bool:
    """Whether compiled blocks are faster than eager ones, both measured; leaves the task as is faster."""
    with _Trial(task, training, plan) as trial:
        eager = trial.seconds(plan.micro_batch)
        task.compile(True)
        helps = trial.seconds(plan.micro_batch) < eager * MARGIN
    task.compile(helps)
    return helps


class _Trial:
    """Forward and backward passes that leave nothing behind."""

    def __init__(self, task: Task, training: TrainingConfig, plan: StepPlan) -> None:
        self._task, self._training, self._plan = task, training, plan
        self._batch = task.batch(0)

    def __enter__(self) -> _Trial:
        self._task.model.to(self._plan.device).train()
        self._optimizer = Optimizer(self._task.model, self._training, self._plan.compute_dtype)
        return self

    def __exit__(self, *exception: object) -> None:
        self._optimizer.release()

    def seconds(self, size: int) -> float:
        """Of a micro-batch of `size` examples, the best of a few."""
        batch = self._batch.rows(0, size).to(self._plan.device)
        best = float("inf")
        for _ in range(1 + REPEATS):
            start = time.perf_counter()
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(fold_seed(self._training.seed, "calibration"))
                with self._plan.autocast():
                    loss = self._task.loss(batch)
                loss.backward()
            best = min(best, time.perf_counter() - start)
            self._optimizer.drop_gradients()
        return best
