"""What only a measurement tells before a run: how long its parts take, hence the micro-batch and whether to compile.

A model is measured by two short ones of its shape: what the longer takes more is its further blocks'. So a few seconds
stand for a model of any depth, and memory for two layers of it is enough.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch

from sansgpu.config import Config, TrainingConfig, fold_seed
from sansgpu.data.batch import Batch
from sansgpu.machine.memory import effective_batch
from sansgpu.tasks import Objective, TaskKind
from sansgpu.train.optim import Optimizer
from sansgpu.train.profile import synchronise
from sansgpu.train.state import TrainState
from sansgpu.train.step import StepPlan

SHORT, LONG = 1, 3  # layers of the models that are measured
REPEATS = 3  # timed, behind one that warms up
ENOUGH_SECONDS = 1.0  # of timing one thing: repeats end there
MARGIN = 0.97  # of the time of the best so far: what is less than this faster is noise, and the smaller one stays


@dataclass(frozen=True)
class Timing:
    """Seconds of a micro-batch's forward and backward pass, and of the update after all of them."""

    micro_batch: int
    compile: str
    block_seconds: float
    ends_seconds: float  # embedding, last norm, head and loss
    update_block_seconds: float
    update_ends_seconds: float

    def step_seconds(self, layers: int, accumulation: int) -> float:
        """Of a step of a model with `layers` blocks."""
        pass_seconds = self.ends_seconds + layers * self.block_seconds
        return accumulation * pass_seconds + self.update_ends_seconds + layers * self.update_block_seconds

    def to_json(self) -> dict[str, Any]:
        """As it is remembered."""
        return asdict(self)


def measure(task: TaskKind, config: Config, plan: StepPlan, sizes: list[int], compile_wanted: str) -> Timing:
    """The timing of the fastest of `sizes`, and with `measure` of compiled or eager, whichever is faster.

    Sizes are tried from the smallest up until memory traffic outweighs what larger products gain.
    """
    best: Timing | None = None
    first = "off" if compile_wanted == "measure" else compile_wanted
    for size in sorted(sizes):
        timing = time_parts(task, config, plan, size, first)
        if best is not None and _a_row(config, timing) > _a_row(config, best) / MARGIN:
            break
        if best is None or _a_row(config, timing) < _a_row(config, best) * MARGIN:
            best = timing
    assert best is not None
    if compile_wanted == "measure":
        compiled = time_parts(task, config, plan, best.micro_batch, "on")
        if _a_row(config, compiled) < _a_row(config, best) * MARGIN:
            return compiled
    return best


def _a_row(config: Config, timing: Timing) -> float:
    """Seconds an example, without the update."""
    return (timing.ends_seconds + config.model.n_layers * timing.block_seconds) / timing.micro_batch


def time_parts(task: TaskKind, config: Config, plan: StepPlan, size: int, compiled: str) -> Timing:
    """Measure one micro-batch size."""
    short_pass, short_update = _timed(task, config, plan, size, compiled, SHORT)
    long_pass, long_update = _timed(task, config, plan, size, compiled, LONG)
    more = LONG - SHORT
    block, update = max(0.0, long_pass - short_pass) / more, max(0.0, long_update - short_update) / more
    ends, update_ends = max(0.0, short_pass - SHORT * block), max(0.0, short_update - SHORT * update)
    return Timing(size, compiled, block, ends, update, update_ends)


def _timed(
    task: TaskKind, config: Config, plan: StepPlan, size: int, compiled: str, layers: int
) -> tuple[float, float]:
    """Seconds of (a pass, an update) of a model with so many layers: each the best of a few."""
    with _trial(task, config, plan, compiled, layers) as (trial, optimizer):
        batch = task.random_batch(config, size).to(plan.device)
        summed = size < effective_batch(config.training)
        optimizer.expect_sum(summed)
        passes: list[float] = []
        updates: list[float] = []
        for number in range(1 + REPEATS):
            if summed:  # the pass that is timed adds to the gradients of this one
                _forward_and_backward(trial, batch, plan, config.training)
            synchronise(plan.device)
            start = time.perf_counter()
            _forward_and_backward(trial, batch, plan, config.training)
            synchronise(plan.device)
            middle = time.perf_counter()
            optimizer.step(0.0, number + 1, min(1.0, 1 / (optimizer.norm() + 1e-6)))
            synchronise(plan.device)
            if number:
                passes.append(middle - start)
                updates.append(time.perf_counter() - middle)
            if sum(passes) + sum(updates) > ENOUGH_SECONDS:
                break
    return min(passes), min(updates)


@contextmanager
def _trial(
    task: TaskKind, config: Config, plan: StepPlan, compiled: str, layers: int
) -> Iterator[tuple[Objective, Optimizer]]:
    model = config.model.model_copy(update={"n_layers": layers})
    trial = task.objective(config.model_copy(update={"model": model}))
    trial.compile(compiled == "on")
    optimizer = TrainState.begin(trial.model, config.training, plan.device, plan.compute_dtype).optimizer
    try:
        yield trial, optimizer
    finally:
        optimizer.release()


def _forward_and_backward(trial: Objective, batch: Batch, plan: StepPlan, training: TrainingConfig) -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(fold_seed(training.seed, "calibration"))
        with plan.autocast():
            loss = trial.loss(batch)
        (loss / batch.target_count()).backward()
