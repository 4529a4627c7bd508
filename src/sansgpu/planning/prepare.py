"""Preparation shared by `train`, `plan` and `bench`: data, device, micro-batch, precision and run length."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

import torch

from sansgpu.config import Config, ConfigError, TrainingConfig, UnreachableError
from sansgpu.data.order import steps_per_epoch
from sansgpu.data.shards import ReportProgress
from sansgpu.kernels import native
from sansgpu.kernels.choice import load_kernels
from sansgpu.machine.allocator import keep_freed_memory, trim_memory
from sansgpu.machine.cached_measurement import cached_measurement
from sansgpu.machine.compilation import (
    compile_pays_off,
    keep_compiled,
    missing_compiler,
    resolve_compile,
    saves_compile_time,
)
from sansgpu.machine.compiled import compiled_cache
from sansgpu.machine.group import SINGLE_PROCESS, Group
from sansgpu.machine.memory import Execution, Memory, effective_batch, micro_batches_per_rank, usual_micro_batch
from sansgpu.machine.probe import (
    Environment,
    cache_dir,
    isa,
    limit_tokenizer_threads,
    memory_for_run,
    pin_cores,
    resolve_device,
    resolve_precision,
)
from sansgpu.machine.vector_math import choose_vector_math
from sansgpu.planning.memory_fit import Shortage, estimate_memory, fits, fitting_micro_batches
from sansgpu.tasks import Corpus, TaskKind, task_of
from sansgpu.train.budget import finish_time
from sansgpu.train.calibrate import LONG, Timing, measure
from sansgpu.train.evaluate import eval_token_ratio
from sansgpu.train.optim import choose_optimizer
from sansgpu.train.schedule import UNKNOWN_STEPS, total_steps
from sansgpu.train.step import StepPlan

Warn = Callable[[str], None]
# needed: prepare the data or fail. wanted: do without it if it is unavailable and the estimate allows. unread: skip it.
Data = Literal["needed", "wanted", "unread"]
Timed = Literal["always", "if useful", "never"]  # when to time steps to choose the micro-batch and compilation


@dataclass(frozen=True)
class Machine:
    """Device and resources that a process trains with."""

    device: torch.device
    threads: int
    kernels: str
    precision: str
    available: int  # bytes of memory
    cache: Path


@dataclass(frozen=True)
class Prepared:
    """A run that is ready to start, with its resolved configuration."""

    config: Config
    machine: Machine
    environment: Environment
    corpus: Any  # the task's; None if the data was not read
    total_steps: int  # or schedule.UNKNOWN
    memory: Memory
    fits: bool
    timing: Timing | None  # None if no steps were timed
    group: Group = SINGLE_PROCESS

    @property
    def accumulation(self) -> int:
        """Micro-batches per step on each rank."""
        environment = self.environment
        return micro_batches_per_rank(self.config.training, environment.micro_batch, environment.world_size)

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
        tokens, size = corpus.validation_tokens if corpus else 0, self.environment.micro_batch
        return eval_token_ratio(self.config.training, tokens, self.example_tokens, size)

    @property
    def step_plan(self) -> StepPlan:
        return StepPlan(self.environment.micro_batch, self.machine.device, self.environment.precision, self.group)

    def facts(self) -> dict[str, Any]:
        corpus: Corpus | None = self.corpus
        training = self.config.training
        parts = task_of(self.config).parameters(self.config)
        return {
            "parameters": sum(parts.values()),
            "trained_parameters": parts.get("adapter", sum(parts.values())),
            "optimizer": training.optimizer,
            "micro_batch": self.environment.micro_batch,
            "gradient_accumulation_steps": self.accumulation,
            "world_size": self.environment.world_size,
            "window": self.config.window,
            "tokens_per_step": self.tokens_per_step,
            "total_steps": None if self.total_steps == UNKNOWN_STEPS else self.total_steps,
            "max_hours": training.max_hours,
            "until": training.until,
            "train_tokens": corpus.train_tokens if corpus else None,
            "train_examples": corpus.train_examples if corpus else None,
            "validation_tokens": corpus.validation_tokens if corpus else None,
            "vocab_size": task_of(self.config).products(self.config).head[1],
            "memory_bytes": self.memory.to_json(),
            "available_bytes": self.machine.available,
        }


def ignore_message(*arguments: object) -> None:
    """Ignores its arguments. Used as a progress or warning callback."""


def set_up(config: Config, before: Environment | None, warn: Warn, group: Group = SINGLE_PROCESS) -> Machine:
    """Configures threads and memory allocation of this process and loads the kernels.

    On resume, `before` is the recorded environment, and automatic choices repeat it.
    """
    training, cache = config.training, cache_dir(config.data.cache_dir)
    device = resolve_device(training)
    if device.type == "cuda" and group.size > 1:
        device = _gpu_of_rank(training, group)
    threads = pin_cores(group, training, warn)
    recorded = before.threads if before and before.world_size == group.size else None
    torch.set_num_threads(_recorded_or(recorded, threads, training.threads))
    torch.set_flush_denormal(True)
    deterministic = device.type == "cuda"
    if (
        deterministic != torch.are_deterministic_algorithms_enabled()
    ):  # setting it imports the compiler, which takes 1 s
        torch.use_deterministic_algorithms(deterministic, warn_only=True)
    choose_vector_math()
    keep_freed_memory()
    compiled = compiled_cache(warn)
    keep_compiled(compiled, warn)
    limit_tokenizer_threads(config.data.preprocessing_num_workers)
    plain = before is not None and before.kernels == "torch" and training.kernels == "auto"
    kernels = load_kernels("torch" if plain else training.kernels, compiled, device, warn)
    if kernels == "native":
        native.keep_blocks(varying=config.settings.varying_length)
    precision = before.precision if before and training.wanted_precision == "auto" else None
    precision = group.broadcast_object(lambda: precision or resolve_precision(training, device))
    share = memory_for_run(device, len(group.local_rank))
    return Machine(device, torch.get_num_threads(), kernels, precision, min(group.all_gather_object(share)), cache)


def prepare(
    config: Config,
    before: Environment | None,
    progress: ReportProgress,
    warn: Warn,
    shortage: Shortage = "refuse",
    data: Data = "needed",
    timed: Timed = "if useful",
    group: Group = SINGLE_PROCESS,
) -> Prepared:
    """Prepares the data and makes every automatic choice. Raises ConfigError before any work that would be lost.

    On resume, `before` is the recorded environment, and automatic choices repeat it. Choices that need a measurement
    are made on rank 0 and broadcast; all others are deterministic on every rank.
    """
    config = _with_finish(config)
    _require_share(config, group.size)
    machine = set_up(config, before, warn, group)
    task = task_of(config)
    leads = group.rank == group.local_rank[0]
    if not leads:
        group.all_gather_object(None)  # wait until the first process on each machine has filled the cache
    config, corpus = (config, None) if data == "unread" else _data(config, machine, progress, warn, data)
    if leads:
        group.all_gather_object(None)
    example_tokens = corpus.example_tokens if corpus else config.window
    config, steps, long = _with_length(config, machine, corpus)
    training = config.training
    long, compiled = group.broadcast_object(lambda: (long, resolve_compile(training, long, machine.device.type)))
    if machine.device.type == "cpu" and training.compile == "auto" and (missing := missing_compiler()):
        warn(f"steps are slower because nothing is compiled: {missing} is missing; install it.")
    elif before and training.compile == "auto":
        compiled = before.compile
    if training.sharding == "full" and group.size > 1:
        if training.compile == "on":
            raise ConfigError("training.compile is on, but fully sharded blocks cannot be compiled; set it to auto.")
        compiled = "off"
    how = Execution(
        micro_batch=1,
        accumulation=1,
        precision=machine.precision,
        compile="off" if compiled == "measure" else compiled,
        kernels=machine.kernels,
        optimizer=training.optimizer,
        max_tokens=corpus.most_tokens if corpus else None,
        world_size=group.size,
    )
    sizes = fitting_micro_batches(task, config, how, machine.available, shortage, warn)
    if before and training.batch_size == "auto":
        sizes = [_resumed_micro_batch(task, config, how, before.micro_batch, machine.available, sizes, warn)]
    elif not long or timed == "never":
        sizes = [usual_micro_batch(math.ceil(example_tokens), sizes)]  # measuring would take longer than it saves
    timing = None
    pays = timed == "always" or (timed != "never" and (len(sizes) > 1 or compiled == "measure"))
    if pays and _trial_fits(config, replace(how, micro_batch=sizes[0]), machine.available):
        whole = fits(estimate_memory(task, config, replace(how, micro_batch=sizes[-1])), machine.available)
        tokens = math.ceil(example_tokens)
        answer = group.broadcast_object(lambda: _measured(config, machine, sizes, compiled, whole, tokens))
        timing = Timing(**answer)
    how = replace(how, micro_batch=sizes[0])
    if timing:
        how = replace(how, micro_batch=timing.micro_batch, compile=timing.compile)
    memory = estimate_memory(task, config, how)
    environment = _environment(machine, how)
    fitting = fits(memory, machine.available)
    return Prepared(config, machine, environment, corpus, steps, memory, fitting, timing, group)


def _with_length(config: Config, machine: Machine, corpus: Corpus | None) -> tuple[Config, int, bool]:
    """Returns the configuration with its optimizer, the total steps, and whether the run is long enough to measure."""
    training, effective = config.training, effective_batch(config.training)
    tokens_per_step = round(effective * (corpus.example_tokens if corpus else config.window))
    work = task_of(config).work(config, tokens_per_step)
    optimizer = choose_optimizer(training.optimizer, work.needed, work.muon)
    config = config.model_copy(update={"training": training.model_copy(update={"optimizer": optimizer})})
    if corpus is not None:
        steps = total_steps(training, steps_per_epoch(corpus.train_examples, effective), corpus.train_tokens)
    else:
        without = training.model_copy(update={"num_epochs": None})
        steps = total_steps(without, UNKNOWN_STEPS, UNKNOWN_STEPS * tokens_per_step)
    long = compile_pays_off(work.needed * steps, machine.precision, machine.threads)
    return config, steps, long and saves_compile_time(seconds_allowed(config))


def _environment(machine: Machine, how: Execution) -> Environment:
    return Environment(
        torch=str(torch.__version__),
        isa=isa(),
        device=machine.device.type,
        threads=machine.threads,
        world_size=how.world_size,
        precision=how.precision,
        compile=how.compile,
        kernels=how.kernels,
        micro_batch=how.micro_batch,
    )


def _with_finish(config: Config) -> Config:
    """Turns a time of day into a date and time, so that a run resumed the next day keeps its deadline."""
    until = config.training.until
    if until is None:
        return config
    finish = finish_time(until, datetime.now()).isoformat(timespec="minutes")
    return config.model_copy(update={"training": config.training.model_copy(update={"until": finish})})


def _data(
    config: Config, machine: Machine, progress: ReportProgress, warn: Warn, data: Data
) -> tuple[Config, Corpus | None]:
    task, training = task_of(config), config.training
    try:
        config, corpus = task.prepare(config, machine.cache, progress)
    except ConfigError as error:
        limited = training.max_steps or training.max_tokens or training.time_limited
        known = limited and training.num_epochs is None  # the run's length does not depend on the data
        if data == "needed" or not (known or isinstance(error, UnreachableError)):
            raise
        warn(
            f"{str(error).rstrip('.')}; the estimate below assumes random tokens of the expected vocabulary"
            + ("." if known else ", and the length of an epoch is unknown.")
        )
        return task.with_vocabulary(config), None
    for note in corpus.notes:
        warn(note)
    return config, corpus


def seconds_allowed(config: Config) -> float:
    """Returns the seconds until max_hours or `until` is reached, or infinity without either."""
    training = config.training
    hours = math.inf if training.max_hours is None else training.max_hours
    seconds = hours * 3600
    if training.until is not None:
        seconds = min(seconds, (datetime.fromisoformat(training.until) - datetime.now()).total_seconds())
    return seconds


def _gpu_of_rank(training: TrainingConfig, group: Group) -> torch.device:
    """Returns this local rank's GPU. Raises ConfigError if there are fewer GPUs than processes, or with sharding."""
    local_rank, count = group.local_rank.index(group.rank), torch.cuda.device_count()
    if len(group.local_rank) > count:
        raise ConfigError(f"{len(group.local_rank)} processes share {count} GPUs; start one process per GPU.")
    if training.sharding != "none":
        raise ConfigError(
            f"training.sharding {training.sharding} works on CPUs only; set it to none, or set device to cpu."
        )
    torch.cuda.set_device(local_rank)
    return torch.device("cuda", local_rank)


def _require_share(config: Config, world_size: int) -> None:
    if (batch := effective_batch(config.training)) < world_size:
        raise ConfigError(
            f"a step has {batch} examples for {world_size} processes, and each needs at least one; raise "
            "training.gradient_accumulation_steps or start fewer processes."
        )


def _measured(
    config: Config, machine: Machine, sizes: list[int], compiled: str, whole: bool, tokens: int
) -> dict[str, Any]:
    """Returns the timing of the fastest choice. It is measured once and then read from the cache."""
    question = {
        "timing of": sorted(field.name for field in fields(Timing)),
        "model": config.model.model_dump(mode="json"),
        "window": tokens,
        "optimizer": config.training.optimizer,
        "sizes": sizes,
        "whole": whole,
        "compile": compiled,
        "precision": machine.precision,
        "threads": machine.threads,
        "device": machine.device.type,
        "kernels": native.available(),
        "isa": isa(),
        "torch": str(torch.__version__),
    }
    plan = StepPlan(sizes[-1], machine.device, machine.precision)
    task = task_of(config)

    def ask() -> dict[str, Any]:
        return measure(task, config, plan, sizes, compiled, whole, tokens).to_json()

    answer = cached_measurement(machine.cache, question, ask)
    trim_memory()  # frees what the trials allocated
    return answer


def _trial_fits(config: Config, how: Execution, available: int) -> bool:
    """Returns whether the timed model fits into memory. It has only a few of the layers."""
    return fits(estimate_memory(task_of(config), config, how, LONG), available)


def _resumed_micro_batch(
    task: TaskKind, config: Config, how: Execution, recorded: int, available: int, sizes: list[int], warn: Warn
) -> int:
    """Returns the recorded micro-batch, or the largest one below it that fits this machine's memory and share."""
    if how.world_size > 1:
        return max((size for size in sizes if size <= recorded), default=min(sizes))
    if fits(estimate_memory(task, config, replace(how, micro_batch=recorded)), available):
        return recorded
    size = max((size for size in sizes if size <= recorded), default=min(sizes))
    if size != recorded:
        warn(
            f"the recorded micro-batch of {recorded} no longer fits into memory; using {size} "
            "with the same effective batch size."
        )
    return size


def _recorded_or(recorded: int | None, resolved: int, requested: int | str) -> int:
    """Returns the recorded thread count if it was automatic and is available, because exact results depend on it."""
    return recorded if recorded is not None and requested == "auto" and recorded <= resolved else resolved
