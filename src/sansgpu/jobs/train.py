"""`sansgpu train`: probe, plan, join, train."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from sansgpu.config import Config, ConfigError, RunPaths, load_config, save_config
from sansgpu.data.shards import Progress
from sansgpu.jobs.folders import held_run, open_output, run_paths, write_json
from sansgpu.jobs.prepare import Prepared, prepare
from sansgpu.machine.disk import free_disk_bytes
from sansgpu.machine.memory import effective_batch
from sansgpu.machine.probe import Environment, describe_machine, gemm_flops_per_second
from sansgpu.machine.world import require_single_process
from sansgpu.tasks import TASKS, Task
from sansgpu.train import Trainer
from sansgpu.train.checkpoint import Snapshot, clear_leftovers, find_snapshot, snapshots
from sansgpu.train.loop import End
from sansgpu.train.resume import recorded_environment
from sansgpu.watch.boards import TensorBoard, WeightsAndBiases, require_boards
from sansgpu.watch.events import Sink, Sinks
from sansgpu.watch.jsonl import Metrics


@dataclass(frozen=True)
class TrainRequest:
    """What the command line asked for besides the configuration."""

    config_file: Path | None = None
    overrides: tuple[str, ...] = ()
    output_dir: Path | None = None
    resume: str | None = None
    strict: bool = False
    dry_run: bool = False
    force: bool = False
    started: float = field(default_factory=time.monotonic)  # what its time is counted from


@dataclass(frozen=True)
class Begun:
    """Everything up to the first step."""

    prepared: Prepared
    paths: RunPaths


def train(request: TrainRequest, sinks: list[Sink], progress: Progress) -> Begun | End:
    """Train, or with `dry_run` prepare everything and return it. Raises ConfigError before any work is done."""
    folder = open_output(request.output_dir, request.config_file, request.resume, dry_run=request.dry_run)
    with nullcontext() if request.dry_run else held_run(folder):
        return _train_in(folder, request, sinks, progress)


def _train_in(folder: Path, request: TrainRequest, sinks: list[Sink], progress: Progress) -> Begun | End:
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
    require_boards(list(config.training.report_to))
    before = recorded_environment(snapshot) if snapshot else None
    prepared = prepare(config, before, progress, early.warn, "begin" if request.force else "refuse")
    _require_disk(paths, prepared.memory.snapshot, config.training.keep_last)
    task = TASKS[config.kind](prepared.config, prepared.corpus, effective_batch(prepared.config.training))
    for note in task.notes:
        early.warn(note)
    return Begun(prepared, paths) if request.dry_run else _run(prepared, paths, task, snapshot, request, sinks)


def _configuration(request: TrainRequest, folder: Path) -> tuple[Config, list[str]]:
    """The file given; without one, a run that is resumed goes on as it was configured."""
    file = request.config_file
    if file is None and request.resume and run_paths(folder).config.is_file():
        file = run_paths(folder).config
    return load_config(file, request.overrides)


def _run(
    prepared: Prepared, paths: RunPaths, task: Task, snapshot: Snapshot | None, request: TrainRequest, sinks: list[Sink]
) -> End:
    config, environment, plan = prepared.config, prepared.environment, prepared.step_plan
    if environment.compile == "on":
        task.compile(True)
    gemm = gemm_flops_per_second(environment.precision, environment.device, environment.threads)
    trainer = Trainer(
        task,
        config,
        paths,
        plan,
        environment,
        Sinks(sinks),
        gemm,
        prepared.total_steps,
        request.started,
        prepared.evaluated_share,
    )
    if snapshot:
        trainer.resume(snapshot, request.strict)  # before anything of the old run is written over
    _write_run_files(prepared, paths, task)
    step = snapshot.step if snapshot else None
    trainer.sinks = Sinks([*sinks, Metrics(paths.metrics, step), *_boards(config, paths, step)])
    start = {"event": "start", "step": step or 0, "task": config.task, "output_dir": str(paths.root)}
    facts = {**prepared.facts(), **_environment_facts(environment), "gemm_flops_per_second": gemm}
    try:
        trainer.sinks.emit({**start, **facts, **({"resumed_from": snapshot.folder.name} if snapshot else {})})
        return trainer.train()
    finally:
        trainer.sinks.close()


def _write_run_files(prepared: Prepared, paths: RunPaths, task: Task) -> None:
    try:
        paths.root.mkdir(parents=True, exist_ok=True)
        save_config(prepared.config, paths.config)
        write_json(paths.environment, describe_machine(prepared.environment))
        task.save_tokenizer(paths.tokenizer)
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


def _require_disk(paths: RunPaths, snapshot_bytes: int, keep_last: int) -> None:
    needed, free = snapshot_bytes * (keep_last + 2), free_disk_bytes(paths.snapshots.absolute())
    if needed > free:
        raise ConfigError(
            f"{keep_last + 2} snapshots need {needed / 1e9:.1f} GB and {paths.snapshots} has {free / 1e9:.1f} GB free; "
            "lower training.keep_last or choose another --output-dir."
        )
