"""Calibration: timing trial steps before a run to choose the micro-batch size.

Two models with the run's widths and different depths are timed; the difference is the time per block. The deeper one
has the run's full depth if that is quick to time and a few layers otherwise, so that calibration takes seconds.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import torch

from sansgpu.config import Config, TrainingConfig, derive_seed
from sansgpu.config.wording import counted
from sansgpu.data.batch import ExampleBatch
from sansgpu.data.shards import ReportProgress, ignore_progress
from sansgpu.machine.memory import micro_batches_per_rank
from sansgpu.models.modules import compile_blocks
from sansgpu.tasks.task import Objective, StepWideObjective, TaskKind
from sansgpu.train.optim import Optimizer
from sansgpu.train.profile import synchronize
from sansgpu.train.state import TrainState
from sansgpu.train.step import StepPlan

SHORT, LONG = 1, 3  # depths of the models that are timed
MAX_FULL_DEPTH_SECONDS = 1.0  # time the model at full depth if a pass is estimated to take less
REPEATS = 3  # timed repeats after one warm-up
ENOUGH_SECONDS = 1.0  # stop repeating after this much timed work
MARGIN = 0.97  # a time above this share of the best so far counts as equal; the smaller micro-batch is then preferred


@dataclass(frozen=True)
class Timing:
    """Seconds of the forward and backward pass of a micro-batch, and of the optimizer update."""

    micro_batch: int
    block_seconds: float
    ends_seconds: float  # embedding, last norm, head and loss
    update_block_seconds: float
    update_ends_seconds: float

    def pass_seconds(self, layers: int) -> float:
        """Returns the time of a forward and backward pass of a micro-batch through `layers` blocks."""
        return self.ends_seconds + layers * self.block_seconds

    def step_seconds(self, layers: int, accumulation: int) -> float:
        """Returns the time of a step of a model with `layers` blocks."""
        return accumulation * self.pass_seconds(layers) + self.update_ends_seconds + layers * self.update_block_seconds

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def measure(
    task: TaskKind,
    config: Config,
    plan: StepPlan,
    sizes: list[int],
    all_layers_fit: bool,
    tokens: int | None = None,
    progress: ReportProgress = ignore_progress,
) -> Timing:
    """Returns the timing of the fastest micro-batch size, compiled if `training.compile` is on.

    Sizes are timed in ascending order until a larger one is slower per example. `all_layers_fit` is True if memory
    suffices for the full depth. `tokens` is the length of an example if it is shorter than the maximum.
    """
    layers = task.costs(config).layers
    tried: list[Timing] = []
    for size in sorted(sizes):
        progress(f"timing steps with micro-batches of {counted(size, 'example')}", 0, 0)
        tried.append(time_parts(task, config, plan, size, all_layers_fit, tokens))
        if _seconds_per_example(layers, tried[-1]) * MARGIN > _seconds_per_example(layers, _best(layers, tried)):
            break
    return _best(layers, tried)


def _best(layers: int, tried: list[Timing]) -> Timing:
    """Returns the fastest timing, or the one with the smallest micro-batch among those equal within noise."""
    best = tried[0]
    for timing in tried[1:]:
        if _seconds_per_example(layers, timing) < _seconds_per_example(layers, best) * MARGIN:
            best = timing
    return best


def _seconds_per_example(layers: int, timing: Timing) -> float:
    """Returns seconds per example without the update."""
    return timing.pass_seconds(layers) / timing.micro_batch


def time_parts(
    task: TaskKind,
    config: Config,
    plan: StepPlan,
    size: int,
    all_layers_fit: bool,
    tokens: int | None = None,
) -> Timing:
    """Times one micro-batch size."""
    short_pass, short_update = _timed(task, config, plan, size, SHORT, tokens)
    full_depth = all_layers_fit and task.costs(config).layers * short_pass < MAX_FULL_DEPTH_SECONDS
    deep = max(LONG, task.costs(config).layers) if full_depth else LONG
    long_pass, long_update = _timed(task, config, plan, size, deep, tokens)
    more = deep - SHORT
    block, update = max(0.0, long_pass - short_pass) / more, max(0.0, long_update - short_update) / more
    ends, update_ends = max(0.0, short_pass - SHORT * block), max(0.0, short_update - SHORT * update)
    return Timing(size, block, ends, update, update_ends)


def _timed(
    task: TaskKind, config: Config, plan: StepPlan, size: int, layers: int, tokens: int | None
) -> tuple[float, float]:
    """Returns the median seconds of a pass and of an update for a model with `layers` blocks."""
    with _trial(task, config, plan, layers) as (trial, optimizer):
        batch = task.random_batch(config, size, tokens).to(plan.device)
        accumulation = micro_batches_per_rank(config.training, size)
        optimizer.set_accumulation(accumulation > 1)
        passes: list[float] = []
        updates: list[float] = []
        for number in range(1 + REPEATS):
            first = _forward_and_backward(trial, batch, plan, config.training)
            more = accumulation - 1  # passes that accumulate into the gradients of the first
            rest = more * _later_pass(trial, batch, plan, config.training) if more else 0.0
            start = time.perf_counter()
            optimizer.step(0.0, number + 1, min(1.0, 1 / (optimizer.grad_norm() + 1e-6)))
            synchronize(plan.device)
            if number:
                passes.append((first + rest) / accumulation)
                updates.append(time.perf_counter() - start)
            if sum(passes) + sum(updates) > ENOUGH_SECONDS:
                break
    return median(passes), median(updates)


@contextmanager
def _trial(task: TaskKind, config: Config, plan: StepPlan, layers: int) -> Iterator[tuple[Objective, Optimizer]]:
    trial = task.new_objective(config, layers)
    if config.training.compile == "on":
        compile_blocks(trial.model)
    optimizer = TrainState.create(trial.model, config.training, plan.device, plan.compute_dtype).optimizer
    try:
        yield trial, optimizer
    finally:
        optimizer.release_state()


def _later_pass(trial: Objective, batch: ExampleBatch, plan: StepPlan, training: TrainingConfig) -> float:
    """Returns the seconds of a pass that is not the first of its step, with its part in computing gradient caches."""
    seconds = _forward_and_backward(trial, batch, plan, training)
    if isinstance(trial, StepWideObjective):
        start = time.perf_counter()
        with torch.no_grad(), plan.autocast():
            trial.outputs(batch)
        synchronize(plan.device)
        seconds += time.perf_counter() - start
    return seconds


def _forward_and_backward(trial: Objective, batch: ExampleBatch, plan: StepPlan, training: TrainingConfig) -> float:
    """Runs one pass and returns its duration in seconds."""
    start = time.perf_counter()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive_seed(training.seed, "calibration"))
        with plan.autocast():
            loss = trial.loss(batch)
        (loss / batch.target_count()).backward()
    synchronize(plan.device)
    return time.perf_counter() - start
