"""`sansgpu train`: probe, plan, join, train."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from sansgpu.config import Config, ConfigError, RunPaths, load_config, save_config
from sansgpu.data.shards import Progress
from sansgpu.jobs.folders import held_run, open_output, run_paths, write_json
from sansgpu.jobs.kernels import load_kernels
from sansgpu.kernels import native
from sansgpu.machine.allocator import keep_freed_memory
from sansgpu.machine.compilation import is_long, keep_compiled, missing_for_compile, resolve_compile
from sansgpu.machine.disk import free_disk_bytes
from sansgpu.machine.memory import effective_batch, fitting_micro_batches, memory_needed, usual_micro_batch
from sansgpu.machine.probe import (
    Environment,
    available_memory,
    cache_dir,
    describe_machine,
    gemm_flops_per_second,
    isa,
    limit_tokenizer_threads,
    resolve_device,
    resolve_precision,
    resolve_threads,
)
from sansgpu.machine.remembered import remembered
from sansgpu.machine.world import require_single_process
from sansgpu.tasks import TASKS, Task
from sansgpu.train import Trainer
from sansgpu.train.calibrate import compiling_helps, fastest_micro_batch
from sansgpu.train.checkpoint import Snapshot, clear_leftovers, find_snapshot, snapshots
from sansgpu.train.loop import End
from sansgpu.train.optim import choose_optimizer
from sansgpu.train.resume import recorded_environment
from sansgpu.train.schedule import total_steps
from sansgpu.train.step import StepPlan
from sansgpu.watch.boards import TensorBoard, WeightsAndBiases, require_boards
from sansgpu.watch.events import Sink, Sinks
from sansgpu.watch.jsonl import Metrics

SNAPSHOT_BYTES = 12  # a parameter's weight and two moments


@dataclass(frozen=True)
class TrainRequest:
    """What the command line asked for besides the configuration."""

    config_file: Path | None = None
    overrides: tuple[str, ...] = ()
    output_dir: Path | None = None
    resume: str | None = None
    strict: bool = False
    dry_run: bool = False


@dataclass(frozen=True)
class Prepared:
    """Everything up to the first step."""

    config: Config
    paths: RunPaths
    environment: Environment
    task: Task
    facts: dict[str, Any] = field(default_factory=dict)
    snapshot: Snapshot | None = None


def train(request: TrainRequest, sinks: list[Sink], progress: Progress) -> Prepared | End:
    """Train, or with `dry_run` prepare everything and return it. Raises ConfigError before any work is done."""
    folder = open_output(request.output_dir, request.config_file, request.resume, dry_run=request.dry_run)
    with nullcontext() if request.dry_run else held_run(folder):
        return _train_in(folder, request, sinks, progress)


def _train_in(folder: Path, request: TrainRequest, sinks: list[Sink], progress: Progress) -> Prepared | End:
    config, notes = _configuration(request, folder)
    early = Sinks(sinks)
    for note in notes:
        early.warn(note)
    require_single_process(config.training.distributed_backend)
    paths = run_paths(folder, config)
    if not request.dry_run:
        clear_leftovers(paths.snapshots)
        if not request.resume and snapshots(paths.snapshots):
            raise ConfigError(f"{paths.snapshots} holds another run's snapshots; choose another checkpoint_dir.")
    snapshot = find_snapshot(paths.snapshots, request.resume, early.warn) if request.resume else None
    if request.resume and snapshot is None:
        early.warn(f"{folder} has no snapshot yet; training starts at the first step.")
    prepared = _prepare(config, paths, snapshot, progress, early)
    return prepared if request.dry_run else _run(prepared, request, sinks)


def _configuration(request: TrainRequest, folder: Path) -> tuple[Config, list[str]]:
    """The file given; without one, a run that is resumed goes on as it was configured."""
    file = request.config_file
    if file is None and request.resume and run_paths(folder).config.is_file():
        file = run_paths(folder).config
    return load_config(file, request.overrides)


def _prepare(config: Config, paths: RunPaths, snapshot: Snapshot | None, progress: Progress, early: Sinks) -> Prepared:
    training, cache = config.training, cache_dir(config.data.cache_dir)
    device = resolve_device(training)
    require_boards(list(training.report_to))
    before = recorded_environment(snapshot) if snapshot else None
    torch.set_num_threads(_kept(before.threads if before else None, resolve_threads(training), training.threads))
    torch.set_flush_denormal(True)
    keep_freed_memory()
    keep_compiled(cache)
    limit_tokenizer_threads(config.data.preprocessing_num_workers)
    kernels = load_kernels(
        before.kernels if before and training.kernels == "auto" else training.kernels, cache, device, early.warn
    )
    precision = before.precision if before and training.wanted_precision == "auto" else None
    precision = precision or resolve_precision(training, device)

    task_class = TASKS[config.task]
    config, corpus = task_class.prepare(config, cache, progress)
    parameters, available = task_class.parameter_count(config), available_memory(device)
    effective = effective_batch(training)
    sizes = fitting_micro_batches(config, parameters, available)
    if before and training.batch_size == "auto":
        sizes = [before.micro_batch]
    _require_disk(paths, parameters, training.keep_last)
    task = task_class(config, corpus, effective)
    step_flops = task.flops_per_token * effective * config.window
    optimizer = choose_optimizer(training.optimizer, task.model, step_flops)
    training = training.model_copy(update={"optimizer": optimizer})
    config = config.model_copy(update={"training": training})
    steps = total_steps(training, task.steps_per_epoch, task.tokens_per_epoch)
    flops = task.flops_per_token * task.tokens_per_epoch * steps / task.steps_per_epoch
    long = is_long(flops, precision, torch.get_num_threads())
    compiled = resolve_compile(training, long, device.type)
    if before and training.compile == "auto":
        compiled = before.compile
    plan = StepPlan(sizes[-1], device, precision)
    micro_batch, compiled = _measured(task, config, plan, sizes, compiled, cache if long else None)
    if device.type == "cpu" and training.compile == "auto" and (missing := missing_for_compile()):
        early.warn(f"{missing} is missing, so nothing is compiled and steps take longer.")
    if training.warmup_steps >= steps:
        early.warn(f"the warm-up of {training.warmup_steps} steps is not over when the run ends after {steps}.")
    environment = Environment(
        torch=str(torch.__version__),
        isa=isa(),
        device=device.type,
        threads=torch.get_num_threads(),
        world_size=1,
        precision=precision,
        compile=compiled,
        kernels=kernels,
        micro_batch=micro_batch,
    )
    facts = {
        "parameters": parameters,
        "optimizer": optimizer,
        "micro_batch": micro_batch,
        "gradient_accumulation_steps": -(-effective // micro_batch),
        "window": config.window,
        "tokens_per_step": effective * config.window,
        "total_steps": steps,
        "train_tokens": corpus.train_tokens,
        "train_examples": len(corpus.train),
        "validation_examples": len(corpus.validation),
        "vocab_size": corpus.tokenizer.vocab_size,
        "memory_bytes": memory_needed(config, parameters, micro_batch),
        "available_bytes": available,
    }
    return Prepared(config, paths, environment, task, facts, snapshot)


def _measured(
    task: Task, config: Config, plan: StepPlan, sizes: list[int], compiled: str, cache: Path | None
) -> tuple[int, str]:
    """(micro-batch, compile on or off), measured once a `cache`; by rule where there is none, for short runs."""
    if cache is None or (len(sizes) == 1 and compiled != "measure"):
        return usual_micro_batch(config, sizes), "off" if compiled == "measure" else compiled

    def measure() -> dict[str, Any]:
        size = fastest_micro_batch(task, config.training, plan, sizes) if len(sizes) > 1 else sizes[0]
        if compiled != "measure":
            return {"micro_batch": size, "compile": compiled}
        helps = compiling_helps(task, config.training, replace(plan, micro_batch=size))
        return {"micro_batch": size, "compile": "on" if helps else "off"}

    question = {
        "model": config.model.model_dump(mode="json"),
        "window": config.window,
        "optimizer": config.training.optimizer,
        "sizes": sizes,
        "compile": compiled,
        "precision": plan.precision,
        "threads": torch.get_num_threads(),
        "kernels": native.available(),
        "isa": isa(),
        "torch": str(torch.__version__),
    }
    answer = remembered(cache, question, measure)
    return int(answer["micro_batch"]), str(answer["compile"])


def _kept(recorded: int | None, resolved: int, asked: int | str) -> int:
    """On resume an automatic choice stays what it was, as bits depend on it, where the machine allows."""
    return recorded if recorded is not None and asked == "auto" and recorded <= resolved else resolved


def _run(prepared: Prepared, request: TrainRequest, sinks: list[Sink]) -> End:
    config, paths, environment, task = prepared.config, prepared.paths, prepared.environment, prepared.task
    device, snapshot = torch.device(environment.device), prepared.snapshot
    if environment.compile == "on":
        task.compile(True)
    plan = StepPlan(environment.micro_batch, device, environment.precision)
    gemm = gemm_flops_per_second(environment.precision, device.type, environment.threads)
    trainer = Trainer(task, config, paths, plan, environment, Sinks(sinks), gemm)
    if snapshot:
        trainer.resume(snapshot, request.strict)  # before anything of the old run is written over
    _write_run_files(prepared)
    step = snapshot.step if snapshot else None
    trainer.sinks = Sinks([*sinks, Metrics(paths.metrics, step), *_boards(config, paths, step)])
    start = {"event": "start", "step": step or 0, "task": config.task, "output_dir": str(paths.root)}
    facts = {**prepared.facts, **_environment_facts(environment), "gemm_flops_per_second": gemm}
    try:
        trainer.sinks.emit({**start, **facts, **({"resumed_from": snapshot.folder.name} if snapshot else {})})
        return trainer.train()
    finally:
        trainer.sinks.close()


def _write_run_files(prepared: Prepared) -> None:
    paths = prepared.paths
    try:
        paths.root.mkdir(parents=True, exist_ok=True)
        save_config(prepared.config, paths.config)
        write_json(paths.environment, describe_machine(prepared.environment))
        prepared.task.save_tokenizer(paths.tokenizer)
    except OSError as error:
        raise ConfigError(f"{paths.root} cannot be written: {error.strerror}; choose another --output-dir.") from None


def _environment_facts(environment: Environment) -> dict[str, Any]:
    return {k: getattr(environment, k) for k in ("device", "isa", "precision", "threads", "compile", "kernels")}


def _boards(config: Config, paths: RunPaths, step: int | None) -> list[Sink]:
    makers: dict[str, Callable[[], Sink]] = {
        "tensorboard": partial(TensorBoard, paths.tensorboard, step),
        "wandb": partial(WeightsAndBiases, paths.root.name, paths.root, config.model_dump(mode="json")),
    }
    return [makers[name]() for name in config.training.report_to]


def _require_disk(paths: RunPaths, parameters: int, keep_last: int) -> None:
    needed, free = parameters * SNAPSHOT_BYTES * (keep_last + 2), free_disk_bytes(paths.snapshots.absolute())
    if needed > free:
        raise ConfigError(
            f"{keep_last + 2} snapshots need {needed / 1e9:.1f} GB and {paths.snapshots} has {free / 1e9:.1f} GB free; "
            "lower training.keep_last or choose another --output-dir."
        )
