"""A run that is ready to start."""

from __future__ import annotations

import math
import os
import time
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from sansgpu.config import RunPaths
from sansgpu.config.schema import Config
from sansgpu.data.order import steps_per_epoch
from sansgpu.events.progress import ReportProgress
from sansgpu.kernels.roofline import peak_gemm_rate
from sansgpu.machine.cache_folder import cache_dir
from sansgpu.machine.execution import Execution
from sansgpu.machine.memory import Memory, effective_batch
from sansgpu.models.costing import Costs
from sansgpu.tasks.capabilities import ActivationOwner, KeepsActivations
from sansgpu.tasks.evaluation import VariableLengthCorpus
from sansgpu.tasks.registry import task_of
from sansgpu.tasks.task import Task
from sansgpu.train.calibrate import Timing
from sansgpu.train.schedule import ONE_PHASE, UNKNOWN_STEPS, StepPhases, freeze_step

NOWHERE = RunPaths(Path(os.devnull))  # a path where nothing can be written
EVALUATED_IN_A_STEP = 3.0  # evaluation throughput / training throughput, in tokens
_EXECUTION_FACTS = ("device", "isa", "precision", "threads", "compile", "kernels")


@dataclass(frozen=True)
class TrainingRun:
    """A run that is ready to start: its resolved configuration, its execution, and its estimated needs."""

    config: Config
    execution: Execution
    total_steps: int  # or schedule.UNKNOWN_STEPS
    memory: Memory
    available: int  # bytes of memory
    corpus: Any = None  # the task's tasks.Corpus; None if the data was not read
    timing: Timing | None = None  # None if no steps were timed
    assumed_step_seconds: float = 0.0  # duration of a step at the assumed speed of this kind of processor
    paths: RunPaths = NOWHERE  # NOWHERE if the run is only planned
    started: float = field(default_factory=time.monotonic)  # start of the time budget
    gemm_flops_per_second: float = 0.0  # best total rate of all processes at the start, the denominator of `mfu`

    @property
    def fits(self) -> bool:
        return self.memory.fits(self.available)

    @property
    def costs(self) -> Costs:
        """The costs of the first steps; if layers stop learning later, those of the steps in which all learn."""
        return task_of(self.config).costs(self.config)

    @property
    def later_costs(self) -> Costs:
        """The costs of the steps after `model.freeze_after`."""
        return task_of(self.config).costs(self.config.after_freezing())

    @cached_property
    def phases(self) -> StepPhases:
        """The work of the steps before and after `model.freeze_after`, from timed steps if there are any."""
        phases = phases_of(self.config, self.corpus)
        if phases.freeze_step == UNKNOWN_STEPS:
            return phases
        costs, later, accumulation = self.costs, self.later_costs, self.execution.accumulation
        block, step = 1.0, costs.pass_layers
        if self.timing is not None:
            block, step = accumulation * self.timing.block_seconds, self.timing.step_seconds(costs, accumulation)
            phases = replace(phases, later_work=self.timing.step_seconds(later, accumulation) / step)
        kept = self.kept_tokens / self.tokens_per_step * later.frozen_pass_layers
        return replace(phases, freezing_work=kept * block / step)

    @property
    def cache(self) -> Path:
        """The folder of cached measurements."""
        return cache_dir(self.config.data.cache_dir)

    @property
    def sharding(self) -> str:
        """`training.sharding`, or none for a single process."""
        return self.config.training.sharding if self.execution.group.size > 1 else "none"

    @property
    def example_tokens(self) -> float:
        """Mean number of tokens per example."""
        return self.corpus.example_tokens if self.corpus else self.config.window

    @property
    def usual_tokens(self) -> int:
        """`example_tokens` rounded up, for random examples."""
        return math.ceil(self.example_tokens)

    @property
    def shared_tokens(self) -> int:
        """Mean number of tokens of an example that a model need not compute, as another of its micro-batch has them."""
        return shared_tokens(self.config, self.corpus, self.execution.micro_batch)

    @cached_property
    def kept_tokens(self) -> int:
        """Tokens of the data for which the outputs of frozen layers are kept."""
        keeps = self.later_costs.skips_frozen and self.corpus is not None
        return task_of(self.config).kept_tokens(self.corpus) if keeps else 0

    @property
    def kept_bytes(self) -> int:
        """Bytes of these outputs on the disk."""
        return self.kept_tokens * self.later_costs.kept_token_bytes(self.execution)

    @property
    def computed_per_step(self) -> int:
        """Tokens of a step that are computed, of which `tokens_per_step` may have more."""
        return self.tokens_per_step - effective_batch(self.config.training) * self.shared_tokens

    @property
    def tokens_per_step(self) -> int:
        return round(effective_batch(self.config.training) * self.example_tokens)

    @property
    def learned_per_step(self) -> float:
        """Mean number of target tokens per step: without padding, and including an epoch's partial last batch."""
        if self.corpus is None:
            return self.tokens_per_step
        return float(self.corpus.train_tokens / self._steps_per_epoch())

    def epoch_after(self, step: int) -> float | None:
        """Returns how often the training split has been read after `step` steps, if its length is known."""
        return step / self._steps_per_epoch() if self.corpus and self.corpus.train_examples else None

    def _steps_per_epoch(self) -> int:
        return steps_per_epoch(self.corpus.train_examples, effective_batch(self.config.training))

    @property
    def step_seconds(self) -> float:
        """Estimated duration of a step: as timed, or else as assumed."""
        if self.timing is None:
            return self.assumed_step_seconds
        return self.timing.step_seconds(self.costs, self.execution.accumulation)

    @property
    def eval_token_ratio(self) -> float:
        """Ratio of an evaluation's tokens to a step's tokens."""
        tokens: float = self.corpus.validation_tokens if self.corpus else 0
        limit = self.config.training.eval_batches
        if limit is not None:
            tokens = min(tokens, limit * self.execution.micro_batch * self.example_tokens)
        return tokens / (effective_batch(self.config.training) * self.example_tokens)

    @property
    def steps_per_evaluation(self) -> float:
        """Estimated duration of an evaluation divided by that of a step."""
        work = self.costs.evaluated_layers / self.costs.pass_layers
        return self.eval_token_ratio * (1.0 if self.config.settings.generates else work / EVALUATED_IN_A_STEP)

    def peak_gemm_rate(self, again: bool = False) -> float:
        """Returns the best GEMM rate of this process in FLOP/s; `again` measures it once more."""
        execution, processes = self.execution, len(self.execution.group.local_ranks)
        precision, device, threads = execution.precision, execution.device.type, execution.threads
        return peak_gemm_rate(self.cache, precision, device, threads, processes, again)

    def measure_gemm_again(self) -> float:
        """Returns the best total GEMM rate of all processes, assuming that they are as fast as this one."""
        return self.execution.group.size * self.peak_gemm_rate(again=True)

    def facts(self) -> dict[str, Any]:
        """Returns the estimates and settings that plans and start events show."""
        corpus, training, execution, costs = self.corpus, self.config.training, self.execution, self.costs
        parts = costs.parameters()
        return {
            "parameters": sum(parts.values()),
            "trained_parameters": parts.get("adapter", costs.trained()),
            "optimizer": training.optimizer,
            "learning_rate": training.learning_rate,
            "micro_batch": execution.micro_batch,
            "gradient_accumulation_steps": execution.accumulation,
            "world_size": execution.world_size,
            "window": self.config.window,
            "tokens_per_step": self.tokens_per_step,
            "total_steps": None if self.total_steps == UNKNOWN_STEPS else self.total_steps,
            "total_epochs": None if self.total_steps == UNKNOWN_STEPS else self.epoch_after(self.total_steps),
            "max_hours": training.max_hours,
            "until": training.until,
            "train_tokens": corpus.train_tokens if corpus else None,
            "train_examples": corpus.train_examples if corpus else None,
            "validation_tokens": corpus.validation_tokens if corpus else None,
            "split": getattr(corpus, "split", None),
            "cleaning": list(getattr(corpus, "cleaning", ())),
            "vocab_size": costs.vocabulary,
            "memory_bytes": self.memory.to_json(),
            "available_bytes": self.available,
        }

    def execution_facts(self) -> dict[str, object]:
        """Returns the part of the execution that start events show."""
        environment: dict[str, object] = {**self.execution.environment()}
        return {key: environment[key] for key in _EXECUTION_FACTS}


def phases_of(config: Config, corpus: Any) -> StepPhases:
    """Returns when lower layers stop learning, and the work of later steps in FLOPs, without freezing_work."""
    epochs, training, task = config.model.freeze_after, config.training, task_of(config)
    if not epochs or corpus is None:
        return ONE_PHASE
    per_epoch = steps_per_epoch(corpus.train_examples, effective_batch(training))
    work, later = (task.costs(one).work(1).needed for one in (config, config.after_freezing()))
    return StepPhases(freeze_step(epochs, per_epoch, training.sync_every), later / work)


def keep_activations(
    run: TrainingRun, task: Task, progress: ReportProgress, owner: ActivationOwner | None = None
) -> str | None:
    """Keeps the outputs of frozen layers if `model.keep_activations` is set. Returns a warning if it is impossible.

    `owner` is the run if it has trained these layers.
    """
    if not run.config.model.keep_activations or not isinstance(task, KeepsActivations):
        return None
    execution = run.execution
    reason = task.keep_activations(execution.device, execution.precision, run.cache, progress, execution.group, owner)
    return reason and f"the outputs of the frozen layers are computed in every step, because {reason}."


def shared_tokens(config: Config, corpus: Any, micro_batch: int) -> int:
    """Returns the mean of `TrainingRun.shared_tokens` for a size of the micro-batch."""
    shares = isinstance(corpus, VariableLengthCorpus) and task_of(config).costs(config).shares_beginnings
    return round(corpus.shared_tokens(effective_batch(config.training), micro_batch)) if shares else 0
