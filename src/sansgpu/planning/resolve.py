"""Every automatic choice of a run, shared by `train`, `plan` and `bench`: data, device, micro-batch, run length."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

import torch

from sansgpu.config import ConfigError, UnreachableError, change_config
from sansgpu.config.learning_rate import rate_for_width
from sansgpu.config.parse import finish_time
from sansgpu.config.paths import TRAINED_TOKENIZERS
from sansgpu.config.schema import Config
from sansgpu.config.section import AUTO
from sansgpu.config.wording import counted
from sansgpu.data.forms.files import file_notes
from sansgpu.data.order import steps_per_epoch
from sansgpu.events.progress import ReportProgress, Warn
from sansgpu.machine.allocator import trim_memory
from sansgpu.machine.cache_folder import cache_dir
from sansgpu.machine.distributed.group import SINGLE_PROCESS, Group
from sansgpu.machine.execution import Environment, Execution
from sansgpu.machine.measurements import assumed_seconds, cached_measurement
from sansgpu.machine.memory import effective_batch, micro_batches_per_rank, usual_micro_batch
from sansgpu.machine.probe import isa
from sansgpu.machine.torch_compile import keep_graphs, resolve_compile
from sansgpu.models.costing import StepWork
from sansgpu.planning.memory_fit import Shortage, estimate_memory, fitting_micro_batches
from sansgpu.planning.process import configure_process
from sansgpu.tasks.registry import task_of
from sansgpu.tasks.settings import DistilledTrainingConfig
from sansgpu.tasks.task import Corpus
from sansgpu.train.calibrate import LONG, Calibration, Timing
from sansgpu.train.optim import choose_optimizer
from sansgpu.train.run import TrainingRun, phases_of, shared_tokens
from sansgpu.train.schedule import (
    AUTO_FREEZE_EPOCHS,
    UNKNOWN_STEPS,
    automatic_layers,
    default_epochs,
    evaluation_problem,
    freezing_problem,
    repetition_problem,
    total_steps,
    warmup_problem,
)

# needed: prepare the data or fail. wanted: continue without data that is unreachable, or that cannot be read and does
# not determine the run's length. unread: do not read it.
Data = Literal["needed", "wanted", "unread"]
Timed = Literal["always", "if useful", "never"]  # when to time steps to choose the micro-batch
WORTH_TIMING_SECONDS = 600  # runs shorter than this gain less from the fastest micro-batch than it takes to find it


@dataclass(frozen=True)
class ResolveOptions:
    """Options of `resolve_run`: what to read, what to time, and what to do if the run does not fit into memory."""

    shortage: Shortage = "refuse"
    data: Data = "needed"
    timed: Timed = "if useful"
    tokenizer: Path | None = None  # folder of the tokenizer that the resumed run trained


TRAIN = ResolveOptions()
PLAN = ResolveOptions("report", data="wanted", timed="always")  # for an estimate of a run that may not be possible


def ignore_message(*arguments: object) -> None:
    """Ignores its arguments. Used as a progress or warning callback."""


def resolve_run(
    config: Config,
    progress: ReportProgress,
    warn: Warn,
    options: ResolveOptions = TRAIN,
    before: Environment | None = None,
    group: Group = SINGLE_PROCESS,
) -> TrainingRun:
    """Prepares the data and makes every automatic choice. Raises ConfigError before any work that would be lost.

    On resume, `before` is the recorded environment, and automatic choices repeat it. Choices that need a measurement
    are made on rank 0 and broadcast; all others are deterministic on every rank.
    """
    config = _with_finish(config)
    _require_share(config, group.size)
    execution, available = configure_process(config, before, warn, group)
    config, corpus = _corpus(config, progress, warn, options, group)
    config, steps, seconds, affordable_steps = _with_length(config, execution, corpus)
    if config.model.trained_layers == AUTO and corpus is not None:
        config = _with_trained_layers(config, corpus, affordable_steps, warn, group)
        config, steps, seconds, affordable_steps = _with_length(config, execution, corpus)
    assumed_step = seconds / affordable_steps
    config = _with_kept_activations(config, corpus, affordable_steps, group)
    for problem in (warmup_problem(config.training, steps), _freezing_problem(config, corpus, steps)):
        if problem:
            warn(problem)
    if corpus is not None and before is None and (problem := _repetition_problem(config, corpus, affordable_steps)):
        warn(problem)
    seconds, execution.compile = _compilation(config, execution, before, seconds, warn)
    execution.optimizer = config.training.optimizer
    execution.max_tokens = corpus.most_tokens if corpus else None
    sizes, timed = fitting_micro_batches(config, execution, available, options.shortage, warn), options.timed
    if before and config.training.batch_size == "auto":
        sizes = [_resumed_micro_batch(config, execution, before["micro_batch"], available, sizes, warn)]
    elif seconds < WORTH_TIMING_SECONDS or timed == "never":
        sizes = [usual_micro_batch(_example_tokens(config, corpus), sizes)]  # measuring would take longer than it saves
    execution.micro_batch, timing = sizes[0], None
    pays = timed == "always" or (timed != "never" and len(sizes) > 1)
    if pays and (calibration := _calibration(config, execution, sizes, corpus, available)):
        timing = Timing(**group.broadcast_object(lambda: _measured(calibration, sizes, progress)))
        execution.micro_batch = timing.micro_batch
    execution.accumulation = micro_batches_per_rank(config.training, execution.micro_batch, group.size)
    run = TrainingRun(
        config,
        execution,
        steps,
        estimate_memory(config, execution),
        available,
        corpus,
        timing,
        assumed_step_seconds=assumed_step / group.size,
    )
    if before is None and (problem := _evaluation_problem(run, assumed_step, affordable_steps)):
        warn(problem)
    return run


def _with_kept_activations(config: Config, corpus: Corpus | None, steps: float, group: Group) -> Config:
    """Decides whether to keep the outputs of frozen layers: if the run reads the data more than once with them.

    The run has `steps` steps.
    """
    model = config.model
    if model.trained_layers in (None, AUTO) or model.keep_activations is not None:
        return config
    if not config.acts("model.keep_activations"):
        return config
    costs, first = task_of(config).costs(config.after_freezing()), phases_of(config, corpus).freeze_step
    frozen_steps = steps - first if model.freeze_after else steps
    epochs = frozen_steps / _epoch_steps(config, corpus)
    again = group.broadcast_object(lambda: epochs > 1 and costs.trained_layers < costs.layers)
    return change_config(config, [("model.keep_activations", again)])


def _with_trained_layers(config: Config, corpus: Corpus, steps: float, warn: Warn, group: Group) -> Config:
    """Replaces model.trained_layers auto by what it means in a run of `steps` steps, and says so."""
    epochs = group.broadcast_object(lambda: steps / _epoch_steps(config, corpus))
    chosen = automatic_layers(epochs, config.model.freeze_after)
    length = f"the run reads its data {epochs:.2g} times"
    if chosen["trained_layers"] is None:
        warn(f"model.trained_layers auto trains all layers, because {length}, fewer than {AUTO_FREEZE_EPOCHS}.")
    else:
        warn(
            f"model.trained_layers auto trains all layers up to epoch {chosen['freeze_after']:g} and then the last "
            f"{chosen['trained_layers']:.0%} of the blocks, because {length}."
        )
    return change_config(config, [(f"model.{key}", value) for key, value in chosen.items()])


def _epoch_steps(config: Config, corpus: Corpus | None) -> float:
    return steps_per_epoch(corpus.train_examples, effective_batch(config.training)) if corpus else math.inf


def _freezing_problem(config: Config, corpus: Corpus | None, steps: int) -> str | None:
    after = config.model.freeze_after
    return freezing_problem(after, phases_of(config, corpus).freeze_step, steps) if after and corpus else None


def _evaluation_problem(run: TrainingRun, step_seconds: float, affordable_steps: float) -> str | None:
    """Returns a warning if evaluations take long compared to the run. The numbers apply if no step was timed."""
    if run.corpus is None:
        return None
    if run.timing is not None:
        step_seconds = run.step_seconds
        affordable_steps = min(run.total_steps, seconds_allowed(run.config) / step_seconds)
    batches = run.eval_token_ratio * effective_batch(run.config.training) / run.execution.micro_batch
    return evaluation_problem(run.config.training, affordable_steps, run.steps_per_evaluation, step_seconds, batches)


def _compilation(
    config: Config, execution: Execution, before: Environment | None, seconds: float, warn: Warn
) -> tuple[float, str]:
    """Returns rank 0's estimate of the run's duration in seconds, and whether to compile: on or off."""
    training, recorded = config.training, before["compile"] if before else None
    device, kernels = execution.device.type, execution.kernels

    def choose() -> tuple[float, str]:
        return seconds, resolve_compile(training.compile, recorded, seconds, kernels, device, warn)

    seconds, compiled = execution.group.broadcast_object(choose)
    if compiled == "on" and training.sharding == "full" and execution.group.size > 1:
        if training.compile == "on":
            raise ConfigError(
                "training.compile is on, but training.sharding full does not support it; set training.compile to auto."
            )
        compiled = "off"
    if compiled == "on":
        keep_graphs(warn)
    return seconds, compiled


def _repetition_problem(config: Config, corpus: Corpus, steps: float) -> str | None:
    if config.task != "pretrain" or DistilledTrainingConfig.of(config).distillation.teacher is not None:
        return None
    epochs = steps / steps_per_epoch(corpus.train_examples, effective_batch(config.training))
    return repetition_problem(epochs, corpus.train_tokens, sum(task_of(config).costs(config).parameters().values()))


def _with_length(config: Config, execution: Execution, corpus: Corpus | None) -> tuple[Config, int, float, float]:
    """Returns the configuration with its optimizer, the number of steps, and two estimates.

    The estimates are the run's duration in seconds, and how many of the steps fit into its time limit.
    """
    training, effective = config.training, effective_batch(config.training)
    tokens_per_step = round(effective * (corpus.example_tokens if corpus else config.window))
    config, work = with_optimizer(config, tokens_per_step)
    if corpus is not None:
        training = training.model_copy(update={"num_epochs": training.num_epochs or default_epochs(config)})
        steps = total_steps(training, steps_per_epoch(corpus.train_examples, effective), corpus.train_tokens)
    else:
        without = training.model_copy(update={"num_epochs": None})
        steps = total_steps(without, UNKNOWN_STEPS, UNKNOWN_STEPS * tokens_per_step)
    needed = work.needed * phases_of(config, corpus).work(0, steps)
    seconds = assumed_seconds(needed, execution.precision, execution.threads)
    allowed = min(seconds, seconds_allowed(config))
    return config, steps, allowed, steps * allowed / seconds


def with_optimizer(config: Config, tokens_per_step: int) -> tuple[Config, StepWork]:
    """Returns the configuration with `auto` replaced by an optimizer and its learning rate, and the FLOPs of a step."""
    costs = task_of(config).costs(config)
    work = costs.work(tokens_per_step)
    optimizer = choose_optimizer(config.training.optimizer, work.needed, work.muon)
    changed = change_config(config, [("training.optimizer", optimizer)])
    if config.settings.scales_rate and "learning_rate" not in config.training.model_fields_set:
        adapted = config.model.adapter != "none"
        rate = rate_for_width(changed.training.learning_rate, costs.width, adapted)
        changed = change_config(changed, [("training.learning_rate", rate)])
    return changed, work


def _with_finish(config: Config) -> Config:
    """Turns a time of day into a date and time, so that a run resumed the next day keeps its deadline."""
    until = config.training.until
    if until is None:
        return config
    finish = finish_time(until, datetime.now()).isoformat(timespec="minutes")
    return config.with_values("training", until=finish)


def _corpus(
    config: Config, progress: ReportProgress, warn: Warn, options: ResolveOptions, group: Group
) -> tuple[Config, Corpus | None]:
    """Prepares the data, first on one process of each machine, which fills the cache for the others."""
    leads = group.rank == group.local_ranks[0]
    if not leads:
        group.all_gather_object(None)
    found = (config, None) if options.data == "unread" else _read(config, progress, warn, options)
    if leads:
        group.all_gather_object(None)
    progress("planning the run", 0, 0)
    return found


def _read(
    config: Config, progress: ReportProgress, warn: Warn, options: ResolveOptions
) -> tuple[Config, Corpus | None]:
    training = config.training
    try:
        for note in file_notes(config.data, config.settings.rows):
            warn(note)
        config, corpus = prepare_data(config, cache_dir(config.data.cache_dir), progress, options.tokenizer)
    except ConfigError as error:
        limited = training.max_steps or training.max_tokens or training.time_limited
        epochs = training.num_epochs or default_epochs(config)
        known = limited and epochs is None  # the run's length does not depend on the data
        if options.data == "needed" or not (known or isinstance(error, UnreachableError)):
            raise
        warn(
            f"{str(error).rstrip('.')}; the estimate below assumes random tokens and the default vocabulary size"
            + ("." if known else ", and the length of an epoch is unknown.")
        )
        return task_of(config).with_vocabulary(config), None
    for note in corpus.notes:
        warn(note)
    return config, corpus


def prepare_data(
    config: Config, cache: Path, progress: ReportProgress, tokenizer: Path | None = None
) -> tuple[Config, Corpus]:
    """Reads and tokenizes the data, and fills in the settings that depend on it. Raises ConfigError.

    `tokenizer` is the folder of the tokenizer that the run trained earlier. It is used instead of training one again,
    because a dataset that has changed since then would give tokens that the model did not learn.
    """
    progress(f"reading {config.data.dataset_name}", 0, 0)  # the Hub may be slow
    task = task_of(config)
    trains = config.data.tokenizer in TRAINED_TOKENIZERS and config.acts("data.tokenizer")
    if tokenizer is None or not trains or not (tokenizer / "tokenizer.json").is_file():
        return task.prepare(config, cache, progress)
    prepared, corpus = task.prepare(config.with_values("data", tokenizer=str(tokenizer.absolute())), cache, progress)
    return prepared.with_values("data", tokenizer=config.data.tokenizer), corpus


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


def _calibration(
    config: Config, execution: Execution, sizes: list[int], corpus: Corpus | None, available: int
) -> Calibration | None:
    """Returns the steps to time in one process, or None if not even a model with a few of the layers fits."""
    smallest, largest = (replace(execution, micro_batch=size) for size in (sizes[0], sizes[-1]))
    if not estimate_memory(config, smallest, LONG).fits(available):
        return None
    whole = estimate_memory(config, largest).fits(available)
    config = change_config(config, [f"training.compile='{execution.compile}'"])
    tokens, shared = _example_tokens(config, corpus), shared_tokens(config, corpus, sizes[-1])
    return Calibration(task_of(config), config, replace(execution, group=SINGLE_PROCESS), tokens, whole, shared)


def _example_tokens(config: Config, corpus: Corpus | None) -> int:
    return math.ceil(corpus.example_tokens if corpus else config.window)


def _measured(calibration: Calibration, sizes: list[int], progress: ReportProgress) -> dict[str, Any]:
    """Returns the timing of the fastest micro-batch size, which is measured once and then cached."""
    config, execution = calibration.config, calibration.execution
    question: dict[str, Any] = {
        "timing of": sorted(field.name for field in fields(Timing)),
        "model": config.model.model_dump(mode="json"),
        "window": calibration.tokens,
        "shared": calibration.shared,
        "optimizer": config.training.optimizer,
        "sizes": sizes,
        "whole": calibration.all_layers_fit,
        "compile": execution.compile,
        "precision": execution.precision,
        "threads": execution.threads,
        "device": execution.device.type,
        "kernels": execution.kernels,
        "isa": isa(),
        "torch": str(torch.__version__),
    }
    if config.settings.generates:
        question["completions"] = [effective_batch(config.training), execution.world_size]
        question |= config.training.model_dump(mode="json", include=config.settings.own_keys("training"))

    def ask() -> dict[str, Any]:
        return calibration.fastest(sizes, progress).to_json()

    answer = cached_measurement(cache_dir(config.data.cache_dir), question, ask)
    trim_memory()  # frees what the trials allocated
    return answer


def _resumed_micro_batch(
    config: Config, execution: Execution, recorded: int, available: int, sizes: list[int], warn: Warn
) -> int:
    """Returns the recorded micro-batch size or, if it is not possible on this machine, the largest smaller one.

    A size is possible if it fits into memory and, with several ranks, divides a rank's share of the batch.
    """
    size = max((size for size in sizes if size <= recorded), default=min(sizes))
    if execution.world_size > 1:
        return size
    if estimate_memory(config, replace(execution, micro_batch=recorded)).fits(available):
        return recorded
    if size != recorded:
        warn(
            f"the run's micro-batch size of {recorded} no longer fits into memory; using {size} with the same "
            "effective batch size."
        )
    return size
