"""Preparation shared by `train`, `plan` and `bench`: data, device, micro-batch, precision and run length."""

from __future__ import annotations

import math
from dataclasses import fields, replace
from datetime import datetime
from typing import Any, Literal

import torch

from sansgpu.config import Config, ConfigError, UnreachableError, change_config
from sansgpu.config.wording import counted
from sansgpu.data.order import steps_per_epoch
from sansgpu.data.shards import ReportProgress
from sansgpu.machine.allocator import trim_memory
from sansgpu.machine.cached_measurement import cached_measurement
from sansgpu.machine.gemm_peak import assumed_seconds
from sansgpu.machine.group import SINGLE_PROCESS, Group
from sansgpu.machine.memory import Execution, effective_batch, micro_batches_per_rank, usual_micro_batch
from sansgpu.machine.probe import Environment, cache_dir, isa
from sansgpu.machine.torch_compile import keep_graphs, resolve_compile
from sansgpu.models.costing import StepWork
from sansgpu.planning.memory_fit import Shortage, estimate_memory, fits, fitting_micro_batches
from sansgpu.planning.prepared import Prepared
from sansgpu.planning.set_up import Warn, set_up
from sansgpu.tasks.registry import task_of
from sansgpu.tasks.task import Corpus
from sansgpu.train.budget import finish_time
from sansgpu.train.calibrate import LONG, Timing, measure
from sansgpu.train.optim import choose_optimizer
from sansgpu.train.schedule import UNKNOWN_STEPS, total_steps, warmup_problem
from sansgpu.train.step import StepPlan

# needed: prepare the data or fail. wanted: do without it if it is unavailable and the estimate allows. unread: skip it.
Data = Literal["needed", "wanted", "unread"]
Timed = Literal["always", "if useful", "never"]  # when to time steps to choose the micro-batch
WORTH_TIMING_SECONDS = 120  # runs shorter than this gain less from the fastest micro-batch than it takes to find it


def ignore_message(*arguments: object) -> None:
    """Ignores its arguments. Used as a progress or warning callback."""


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
    how, available = set_up(config, before, warn, group)
    config, corpus = _corpus(config, progress, warn, data, group)
    tokens = math.ceil(corpus.example_tokens if corpus else config.window)
    config, steps, seconds = _with_length(config, how, corpus)
    if problem := warmup_problem(config.training, steps):
        warn(problem)
    seconds, compiled = _compilation(config, how, before, seconds, group, warn)
    how = replace(
        how,
        compile=compiled,
        optimizer=config.training.optimizer,
        max_tokens=corpus.most_tokens if corpus else None,
    )
    sizes = fitting_micro_batches(config, how, available, shortage, warn)
    if before and config.training.batch_size == "auto":
        sizes = [_resumed_micro_batch(config, how, before.micro_batch, available, sizes, warn)]
    elif seconds < WORTH_TIMING_SECONDS or timed == "never":
        sizes = [usual_micro_batch(tokens, sizes)]  # measuring would take longer than it saves
    pays = timed == "always" or (timed != "never" and len(sizes) > 1)
    timing = _timing(config, how, sizes, tokens, available, group, progress) if pays else None
    size = timing.micro_batch if timing else sizes[0]
    accumulation = micro_batches_per_rank(config.training, size, group.size)
    how = replace(how, micro_batch=size, accumulation=accumulation)
    return Prepared(config, how, available, corpus, steps, estimate_memory(config, how), timing, group)


def _compilation(
    config: Config, how: Execution, before: Environment | None, seconds: float, group: Group, warn: Warn
) -> tuple[float, str]:
    """Returns rank 0's `seconds` of the run, and whether to compile: on or off."""
    training, recorded = config.training, before.compile if before else None
    device, kernels = how.device.type, how.kernels

    def choose() -> tuple[float, str]:
        return seconds, resolve_compile(training.compile, recorded, seconds, kernels, device, warn)

    seconds, compiled = group.broadcast_object(choose)
    if compiled == "on" and training.sharding == "full" and group.size > 1:
        if training.compile == "on":
            raise ConfigError("training.compile is on, but fully sharded blocks cannot be compiled; set it to auto.")
        compiled = "off"
    if compiled == "on":
        keep_graphs(warn)
    return seconds, compiled


def _with_length(config: Config, how: Execution, corpus: Corpus | None) -> tuple[Config, int, float]:
    """Returns the configuration with its optimizer, the total steps, and the assumed seconds of the run."""
    training, effective = config.training, effective_batch(config.training)
    tokens_per_step = round(effective * (corpus.example_tokens if corpus else config.window))
    config, work = with_optimizer(config, tokens_per_step)
    if corpus is not None:
        steps = total_steps(training, steps_per_epoch(corpus.train_examples, effective), corpus.train_tokens)
    else:
        without = training.model_copy(update={"num_epochs": None})
        steps = total_steps(without, UNKNOWN_STEPS, UNKNOWN_STEPS * tokens_per_step)
    seconds = assumed_seconds(work.needed * steps, how.precision, how.threads)
    return config, steps, min(seconds, seconds_allowed(config))


def with_optimizer(config: Config, tokens_per_step: int) -> tuple[Config, StepWork]:
    """Returns the configuration with the optimizer that `auto` means and its learning rate, and the work of a step."""
    work = task_of(config).costs(config).work(tokens_per_step)
    optimizer = choose_optimizer(config.training.optimizer, work.needed, work.muon)
    return change_config(config, [("training.optimizer", optimizer)]), work


def _with_finish(config: Config) -> Config:
    """Turns a time of day into a date and time, so that a run resumed the next day keeps its deadline."""
    until = config.training.until
    if until is None:
        return config
    finish = finish_time(until, datetime.now()).isoformat(timespec="minutes")
    return config.model_copy(update={"training": config.training.model_copy(update={"until": finish})})


def _corpus(
    config: Config, progress: ReportProgress, warn: Warn, data: Data, group: Group
) -> tuple[Config, Corpus | None]:
    """Prepares the data, first on one process of each machine, which fills the cache for the others."""
    leads = group.rank == group.local_ranks[0]
    if not leads:
        group.all_gather_object(None)
    found = (config, None) if data == "unread" else _read(config, progress, warn, data)
    if leads:
        group.all_gather_object(None)
    progress("planning the run", 0, 0)
    return found


def _read(config: Config, progress: ReportProgress, warn: Warn, data: Data) -> tuple[Config, Corpus | None]:
    task, training = task_of(config), config.training
    try:
        config, corpus = task.prepare(config, cache_dir(config.data.cache_dir), progress)
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


def _require_share(config: Config, world_size: int) -> None:
    if (batch := effective_batch(config.training)) < world_size:
        raise ConfigError(
            f"a step has {counted(batch, 'example')} for {world_size} processes, and each needs at least one; raise "
            "training.gradient_accumulation_steps or start fewer processes."
        )


def _timing(
    config: Config,
    how: Execution,
    sizes: list[int],
    tokens: int,
    available: int,
    group: Group,
    progress: ReportProgress,
) -> Timing | None:
    """Returns the timing of the fastest choice, or None if not even a model with a few of the layers fits."""
    smallest, largest = (replace(how, micro_batch=size) for size in (sizes[0], sizes[-1]))
    if not fits(estimate_memory(config, smallest, LONG), available):
        return None
    whole = fits(estimate_memory(config, largest), available)
    config = change_config(config, [f"training.compile='{how.compile}'"])
    return Timing(**group.broadcast_object(lambda: _measured(config, how, sizes, whole, tokens, progress)))


def _measured(
    config: Config, how: Execution, sizes: list[int], whole: bool, tokens: int, progress: ReportProgress
) -> dict[str, Any]:
    """Returns the timing of the fastest choice. It is measured once and then read from the cache."""
    question = {
        "timing of": sorted(field.name for field in fields(Timing)),
        "model": config.model.model_dump(mode="json"),
        "window": tokens,
        "optimizer": config.training.optimizer,
        "sizes": sizes,
        "whole": whole,
        "compile": how.compile,
        "precision": how.precision,
        "threads": how.threads,
        "device": how.device.type,
        "kernels": how.kernels,
        "isa": isa(),
        "torch": str(torch.__version__),
    }
    plan = StepPlan(sizes[-1], how.device, how.precision)
    task = task_of(config)

    def ask() -> dict[str, Any]:
        return measure(task, config, plan, sizes, whole, tokens, progress).to_json()

    answer = cached_measurement(cache_dir(config.data.cache_dir), question, ask)
    trim_memory()  # frees what the trials allocated
    return answer


def _resumed_micro_batch(
    config: Config, how: Execution, recorded: int, available: int, sizes: list[int], warn: Warn
) -> int:
    """Returns the recorded micro-batch, or the largest one below it that fits this machine's memory and share."""
    if how.world_size > 1:
        return max((size for size in sizes if size <= recorded), default=min(sizes))
    if fits(estimate_memory(config, replace(how, micro_batch=recorded)), available):
        return recorded
    size = max((size for size in sizes if size <= recorded), default=min(sizes))
    if size != recorded:
        warn(
            f"the recorded micro-batch of {recorded} no longer fits into memory; using {size} "
            "with the same effective batch size."
        )
    return size
