"""Calibration: timing trial steps before a run to choose the micro-batch size.

Two models with the run's widths and different depths are timed; the difference is the time per block. The deeper one
has the run's full depth if that is quick to time and a few layers otherwise, so that calibration takes seconds.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import torch

from sansgpu.config import derive_seed
from sansgpu.config.schema import Config
from sansgpu.config.wording import counted
from sansgpu.data.batch import ExampleBatch
from sansgpu.events.progress import ReportProgress
from sansgpu.machine.execution import Execution
from sansgpu.machine.memory import effective_batch, micro_batches_per_rank
from sansgpu.models.costing import Costs
from sansgpu.models.modules import blocks_of, compile_blocks
from sansgpu.tasks.task import Objective, OnPolicyObjective, StepWideObjective, TaskClass
from sansgpu.train.state import TrainState

SHORT, LONG = 1, 3  # depths of the models that are timed
MAX_FULL_DEPTH_SECONDS = 1.0  # time the model at full depth if a pass is estimated to take less
REPEATS = 3  # timed repeats after one warm-up
ENOUGH_SECONDS = 1.0  # stop repeating after this much timed work
MARGIN = 0.97  # prefer the smaller micro-batch unless a larger one takes less than this share of its time


@dataclass(frozen=True)
class Timing:
    """Seconds of the forward and backward pass of a micro-batch, of the update, and of generating a step's text."""

    micro_batch: int
    block_seconds: float
    ends_seconds: float  # embedding, last norm, head and loss
    update_block_seconds: float
    update_ends_seconds: float
    generation_block_seconds: float = 0.0  # this and the next one are 0 unless the task generates text
    generation_ends_seconds: float = 0.0

    def pass_seconds(self, layers: float) -> float:
        """Returns the time of a forward and backward pass of a micro-batch through `layers` trained blocks."""
        return self.ends_seconds + layers * self.block_seconds

    def step_seconds(self, costs: Costs, accumulation: int) -> float:
        """Returns the time of a step of a model with these costs."""
        update = self.update_ends_seconds + costs.trained_layers * self.update_block_seconds
        return accumulation * self.pass_seconds(costs.pass_layers) + update + self.generation_seconds(costs.layers)

    def generation_seconds(self, layers: int) -> float:
        """Returns the time in which a model with `layers` blocks generates the text of a step."""
        return self.generation_ends_seconds + layers * self.generation_block_seconds

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Calibration:
    """Times training on random batches of examples with `tokens` tokens."""

    task: TaskClass
    config: Config
    execution: Execution
    tokens: int
    all_layers_fit: bool  # memory suffices for the model at its full depth
    shared: int = 0  # of these tokens, those with which all examples begin

    def fastest(self, sizes: Sequence[int], progress: ReportProgress) -> Timing:
        """Returns the timing of the fastest micro-batch size, compiled if `training.compile` is on.

        Sizes are timed in ascending order until two in a row are slower per example than the best; a single one may be
        slow because another program ran.
        """
        tried: list[Timing] = []
        slower = 0
        for size in sorted(sizes):
            progress(f"timing steps with micro-batches of {counted(size, 'example')}", 0, 0)
            tried.append(self.time_parts(size))
            is_slower = self._seconds_per_example(tried[-1]) * MARGIN > self._seconds_per_example(self._best(tried))
            slower = slower + 1 if is_slower else 0
            if slower == 2:
                break
        return self._best(tried)

    def time_parts(self, size: int) -> Timing:
        """Times one micro-batch size."""
        short, shallow = self._timed(size, SHORT)
        full_depth = self.all_layers_fit and self._layers * shallow[0] < MAX_FULL_DEPTH_SECONDS
        whole = short >= self._layers > SHORT  # the model cannot be shortened
        deep, deeper = (short, shallow) if whole else self._timed(size, max(LONG, self._layers) if full_depth else LONG)
        parts: list[float] = []
        for few, many in zip(shallow, deeper, strict=True):
            block = max(0.0, many - few) / (deep - short) if deep > short else many / deep
            parts += [block, max(0.0, few - short * block)]
        return Timing(size, *parts)

    @property
    def _layers(self) -> int:
        return self.task.costs(self.config).layers

    def _best(self, tried: Sequence[Timing]) -> Timing:
        """Returns the fastest timing, or the one with the smallest micro-batch among those equal within noise."""
        best = tried[0]
        for timing in tried[1:]:
            if self._seconds_per_example(timing) < self._seconds_per_example(best) * MARGIN:
                best = timing
        return best

    def _seconds_per_example(self, timing: Timing) -> float:
        """Returns seconds per example without the update."""
        return timing.pass_seconds(self.task.costs(self.config).pass_layers) / timing.micro_batch

    def _timed(self, size: int, layers: int) -> tuple[int, tuple[float, float, float]]:
        """Times a model with `layers` blocks, or more if it does not run with so few.

        Returns its number of blocks and the seconds of a pass, of an update, and of generating a step's text. Passes
        and updates are medians.
        """
        batch = self.task.random_batch(self.config, size, self.tokens).with_shared_beginning(self.shared)
        batch = batch.to(self.execution.device)
        trial = self.task.new_objective(self.config, layers)
        if self.config.training.compile == "on":
            compile_blocks(trial.model)
        optimizer = TrainState.create(trial.model, self.config.training, self.execution).optimizer
        accumulation = micro_batches_per_rank(self.config.training, size)
        passes: list[float] = []
        updates: list[float] = []
        try:
            for number in range(1 + REPEATS):
                with optimizer.backward_pass(accumulates=accumulation > 1):
                    first = self._forward_and_backward(trial, batch)
                    more = accumulation - 1  # passes that accumulate into the gradients of the first
                    rest = more * self._later_pass(trial, batch) if more else 0.0
                start = time.perf_counter()
                optimizer.step(0.0, number + 1, min(1.0, 1 / (optimizer.grad_norm() + 1e-6)))
                self.execution.synchronize()
                if number:
                    passes.append((first + rest) / accumulation)
                    updates.append(time.perf_counter() - start)
                if sum(passes) + sum(updates) > ENOUGH_SECONDS:
                    break
            generated = self._generation_seconds(trial)
        finally:
            optimizer.release_state()
        return len(blocks_of(trial.model)) or layers, (median(passes), median(updates), generated)

    def _generation_seconds(self, trial: Objective) -> float:
        if not isinstance(trial, OnPolicyObjective):
            return 0.0
        completions = -(-effective_batch(self.config.training) // self.execution.world_size)
        with self.execution.autocast():
            return trial.generation_seconds(completions, self.tokens)

    def _later_pass(self, trial: Objective, batch: ExampleBatch) -> float:
        """Returns the seconds of a pass after the first of a step, with the forward pass that a GradientCache adds."""
        seconds = self._forward_and_backward(trial, batch)
        if isinstance(trial, StepWideObjective):
            start = time.perf_counter()
            with torch.no_grad(), self.execution.autocast():
                trial.outputs(batch)
            self.execution.synchronize()
            seconds += time.perf_counter() - start
        return seconds

    def _forward_and_backward(self, trial: Objective, batch: ExampleBatch) -> float:
        """Runs one pass and returns its duration in seconds."""
        start = time.perf_counter()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(derive_seed(self.config.training.seed, "calibration"))
            with self.execution.autocast():
                loss = trial.loss(batch)
            (loss / batch.target_count()).backward()
        self.execution.synchronize()
        return time.perf_counter() - start
