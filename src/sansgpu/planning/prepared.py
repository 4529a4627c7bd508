"""A run that is ready to start."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from sansgpu.config import Config
from sansgpu.data.order import steps_per_epoch
from sansgpu.machine.gemm_peak import peak_gemm_rate
from sansgpu.machine.group import SINGLE_PROCESS, Group
from sansgpu.machine.memory import Execution, Memory, effective_batch
from sansgpu.machine.probe import Environment, cache_dir, isa
from sansgpu.models.costing import Costs
from sansgpu.planning.memory_fit import fits
from sansgpu.tasks.registry import task_of
from sansgpu.tasks.task import Corpus
from sansgpu.train.calibrate import Timing
from sansgpu.train.evaluate import eval_token_ratio
from sansgpu.train.schedule import UNKNOWN_STEPS
from sansgpu.train.step import StepPlan

ENVIRONMENT_KEYS = ("threads", "world_size", "precision", "compile", "kernels", "micro_batch")


@dataclass(frozen=True)
class Prepared:
    """A run that is ready to start, with its resolved configuration."""

    config: Config
    execution: Execution
    available: int  # bytes of memory
    corpus: Any  # the task's; None if the data was not read
    total_steps: int  # or schedule.UNKNOWN
    memory: Memory
    timing: Timing | None  # None if no steps were timed
    group: Group = SINGLE_PROCESS

    @property
    def environment(self) -> Environment:
        """The part of the execution that is recorded in snapshots."""
        how = self.execution
        return Environment(
            torch=str(torch.__version__),
            isa=isa(),
            device=how.device.type,
            **{key: getattr(how, key) for key in ENVIRONMENT_KEYS},
        )

    @property
    def fits(self) -> bool:
        return fits(self.memory, self.available)

    @property
    def costs(self) -> Costs:
        return task_of(self.config).costs(self.config)

    @property
    def cache(self) -> Path:
        """The folder of measurements."""
        return cache_dir(self.config.data.cache_dir)

    @property
    def example_tokens(self) -> float:
        """Mean number of tokens per example."""
        corpus: Corpus | None = self.corpus
        return corpus.example_tokens if corpus else self.config.window

    @property
    def usual_tokens(self) -> int:
        """`example_tokens` rounded up, for random examples."""
        return math.ceil(self.example_tokens)

    @property
    def tokens_per_step(self) -> int:
        return round(effective_batch(self.config.training) * self.example_tokens)

    @property
    def learned_per_step(self) -> float:
        """Mean number of target tokens per step: without padding, and including an epoch's partial last batch."""
        corpus: Corpus | None = self.corpus
        if corpus is None:
            return self.tokens_per_step
        steps = steps_per_epoch(corpus.train_examples, effective_batch(self.config.training))
        return corpus.train_tokens / steps

    @property
    def eval_token_ratio(self) -> float:
        """Ratio of an evaluation's tokens to a step's tokens."""
        corpus: Corpus | None = self.corpus
        tokens, size = corpus.validation_tokens if corpus else 0, self.execution.micro_batch
        return eval_token_ratio(self.config.training, tokens, self.example_tokens, size)

    @property
    def step_plan(self) -> StepPlan:
        how = self.execution
        return StepPlan(how.micro_batch, how.device, how.precision, self.group)

    def peak_gemm_rate(self, again: bool = False) -> float:
        """Returns the best GEMM rate of this process in FLOP/s; `again` measures it once more."""
        how, processes = self.execution, len(self.group.local_ranks)
        return peak_gemm_rate(self.cache, how.precision, how.device.type, how.threads, processes, again)

    def facts(self) -> dict[str, Any]:
        corpus: Corpus | None = self.corpus
        training, how, costs = self.config.training, self.execution, self.costs
        parts = costs.parameters()
        return {
            "parameters": sum(parts.values()),
            "trained_parameters": parts.get("adapter", sum(parts.values())),
            "optimizer": training.optimizer,
            "learning_rate": training.learning_rate,
            "micro_batch": how.micro_batch,
            "gradient_accumulation_steps": how.accumulation,
            "world_size": how.world_size,
            "window": self.config.window,
            "tokens_per_step": self.tokens_per_step,
            "total_steps": None if self.total_steps == UNKNOWN_STEPS else self.total_steps,
            "max_hours": training.max_hours,
            "until": training.until,
            "train_tokens": corpus.train_tokens if corpus else None,
            "train_examples": corpus.train_examples if corpus else None,
            "validation_tokens": corpus.validation_tokens if corpus else None,
            "split": getattr(corpus, "split", None),
            "vocab_size": costs.vocabulary,
            "memory_bytes": self.memory.to_json(),
            "available_bytes": self.available,
        }
