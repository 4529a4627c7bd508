"""What only a measurement tells before a run: how long its parts take, hence the micro-batch and whether to compile.

A model is measured by two of its shape: what the deeper takes more is its further blocks'. The deeper one is the model
itself where that takes a moment, else a shallow one, so that a few seconds stand for a model of any depth.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import torch

from sansgpu.config import Config, TrainingConfig, fold_seed
from sansgpu.data.batch import Examples
from sansgpu.machine.memory import micro_batches_each
from sansgpu.tasks import Objective, TaskKind
from sansgpu.train.optim import Optimizer
from sansgpu.train.profile import synchronise
from sansgpu.train.state import TrainState
from sansgpu.train.step import StepPlan

SHORT, LONG = 1, 3  # layers of the models that are measured
MOMENT_SECONDS = 1.0  # that a pass of the whole model may take, to be measured itself
REPEATS = 3  # timed, behind one that warms up
ENOUGH_SECONDS = 1.0  # of timing one thing: repeats end there
CLOSE = 0.9  # of the time of a micro-batch that may be the best one when compiled: that is the best's
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

    def pass_seconds(self, layers: int) -> float:
        """Of a micro-batch through a model with `layers` blocks."""
        return self.ends_seconds + layers * self.block_seconds

    def step_seconds(self, layers: int, accumulation: int) -> float:
        """Of a step of a model with `layers` blocks."""
        return accumulation * self.pass_seconds(layers) + self.update_ends_seconds + layers * self.update_block_seconds

    def to_json(self) -> dict[str, Any]:
        """As it is remembered."""
        return asdict(self)


def measure(
    task: TaskKind,
    config: Config,
    plan: StepPlan,
    sizes: list[int],
    compile_wanted: str,
    whole: bool,
    tokens: int | None = None,
) -> Timing:
    """The timing of the fastest of `sizes`, and with `measure` of compiled or eager, whichever is faster.

    `whole` says that memory is enough for all layers; examples have `tokens` each where they may be short. Sizes are
    tried from the smallest up until memory traffic outweighs what larger products gain; compiled, those that come close
    to the best.
    """
    layers = task.layers(config)
    first = "off" if compile_wanted == "measure" else compile_wanted
    tried: list[Timing] = []
    for size in sorted(sizes):
        tried.append(time_parts(task, config, plan, size, first, whole, tokens))
        if _a_row(layers, tried[-1]) * MARGIN > _a_row(layers, _best(layers, tried)):
            break
    best = _best(layers, tried)
    if compile_wanted == "measure":
        close = [t.micro_batch for t in tried if _a_row(layers, t) * CLOSE <= _a_row(layers, best)]
        compiled = _best(layers, [time_parts(task, config, plan, size, "on", whole, tokens) for size in close])
        if _a_row(layers, compiled) < _a_row(layers, best) * MARGIN:
            return compiled
    return best


def _best(layers: int, tried: list[Timing]) -> Timing:
    """The fastest; of those that noise may have put in order, the smallest."""
    best = tried[0]
    for timing in tried[1:]:
        if _a_row(layers, timing) < _a_row(layers, best) * MARGIN:
            best = timing
    return best


def _a_row(layers: int, timing: Timing) -> float:
    """Seconds an example, without the update."""
    return timing.pass_seconds(layers) / timing.micro_batch


def time_parts(
    task: TaskKind, config: Config, plan: StepPlan, size: int, compiled: str, whole: bool, tokens: int | None = None
) -> Timing:
    """Measure one micro-batch size."""
    short_pass, short_update = _timed(task, config, plan, size, compiled, SHORT, tokens)
    whole = whole and task.layers(config) * short_pass < MOMENT_SECONDS
    deep = max(LONG, task.layers(config)) if whole else LONG
    long_pass, long_update = _timed(task, config, plan, size, compiled, deep, tokens)
    more = deep - SHORT
    block, update = max(0.0, long_pass - short_pass) / more, max(0.0, long_update - short_update) / more
    ends, update_ends = max(0.0, short_pass - SHORT * block), max(0.0, short_update - SHORT * update)
    return Timing(size, compiled, block, ends, update, update_ends)


def _timed(
    task: TaskKind, config: Config, plan: StepPlan, size: int, compiled: str, layers: int, tokens: int | None
) -> tuple[float, float]:
    """Seconds of (a pass, an update) of a model with so many layers: each the middle one of a few."""
    with _trial(task, config, plan, compiled, layers) as (trial, optimizer):
        batch = task.random_batch(config, size, tokens).to(plan.device)
        accumulation = micro_batches_each(config.training, size)
        optimizer.expect_sum(accumulation > 1)
        passes: list[float] = []
        updates: list[float] = []
        for number in range(1 + REPEATS):
            first = _forward_and_backward(trial, batch, plan, config.training)
            more = accumulation - 1  # which add to the gradients of the first
            rest = more * _forward_and_backward(trial, batch, plan, config.training) if more else 0.0
            start = time.perf_counter()
            optimizer.step(0.0, number + 1, min(1.0, 1 / (optimizer.norm() + 1e-6)))
            synchronise(plan.device)
            if number:
                passes.append((first + rest) / accumulation)
                updates.append(time.perf_counter() - start)
            if sum(passes) + sum(updates) > ENOUGH_SECONDS:
                break
    return median(passes), median(updates)


@contextmanager
def _trial(
    task: TaskKind, config: Config, plan: StepPlan, compiled: str, layers: int
) -> Iterator[tuple[Objective, Optimizer]]:
    trial = task.objective(config, layers)
    trial.compile(compiled == "on")
    optimizer = TrainState.begin(trial.model, config.training, plan.device, plan.compute_dtype).optimizer
    try:
        yield trial, optimizer
    finally:
        optimizer.release()


def _forward_and_backward(trial: Objective, batch: Examples, plan: StepPlan, training: TrainingConfig) -> float:
    """Seconds it took."""
    start = time.perf_counter()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(fold_seed(training.seed, "calibration"))
        with plan.autocast():
            loss = trial.loss(batch)
        (loss / batch.target_count()).backward()
    synchronise(plan.device)
    return time.perf_counter() - start
