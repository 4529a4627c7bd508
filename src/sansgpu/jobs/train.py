"""Training job: probe the machine, plan memory, join the ranks, train."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from sansgpu.config import ConfigError, Override, RunPaths, SansGPUError, change_config, flatten, save_config
from sansgpu.config.errors import is_installed
from sansgpu.config.schema import Config
from sansgpu.config.section import AUTO
from sansgpu.events.controls import Controls
from sansgpu.events.event import Event, EventBuffer, Sink, Sinks, now
from sansgpu.events.jsonl import MetricsFile
from sansgpu.events.loggers import TensorBoard, require_boards
from sansgpu.events.progress import ReportProgress, Warn
from sansgpu.files.atomic import atomic_write, flush_refusal, write_failures_as, write_text
from sansgpu.files.ownership import OutputFolder
from sansgpu.machine.address_space import out_of_memory
from sansgpu.machine.disk import free_disk_bytes
from sansgpu.machine.distributed.group import Group
from sansgpu.machine.distributed.peers import REPORT_SECONDS, LostRankError
from sansgpu.machine.distributed.rendezvous import join, resolve_backend
from sansgpu.machine.distributed.world import World, find_status_server
from sansgpu.machine.execution import Environment
from sansgpu.machine.launch import has_random_hashes
from sansgpu.machine.memory import effective_batch
from sansgpu.machine.monitor import Monitor
from sansgpu.machine.probe import describe_machine
from sansgpu.models.modules import compile_blocks, set_matmul_precision
from sansgpu.planning.resolve import ResolveOptions, resolve_run
from sansgpu.tasks.configuration import load_config, recorded_values
from sansgpu.tasks.registry import task_of
from sansgpu.tasks.task import ComparedWithReference, InitializedFromData, Task
from sansgpu.train.branches import switch_to
from sansgpu.train.loop import Trainer, TrainingResult
from sansgpu.train.run import TrainingRun, keep_activations
from sansgpu.train.run_folders import (
    choose_output,
    claim_run,
    mark_run,
    no_run_to_resume,
    recorded_file,
    require_allowed,
    require_unclaimed_folders,
    run_paths,
    with_absolute_paths,
)
from sansgpu.train.snapshots import Snapshot, find_snapshot, snapshots

SMALLER_RUN = "lower training.batch_size or set model.gradient_checkpointing"


@dataclass(frozen=True)
class TrainRequest:
    """Arguments of the train command, apart from the configuration's own values."""

    config_file: Path | None = None
    overrides: tuple[Override, ...] = ()
    output_dir: Path | None = None
    resume: str | None = None
    strict: bool = False
    dry_run: bool = False
    force: bool = False
    world: World = World()  # noqa: RUF009  frozen
    started: float = field(default_factory=time.monotonic)  # start of the time budget
    controls: Controls = field(default_factory=Controls)
    monitor: Monitor = field(default_factory=Monitor)
    config: Config | None = None  # used instead of config_file
    notes: tuple[str, ...] = ()  # warnings about the request, for the user


@dataclass(frozen=True)
class _RunTarget:
    """The folders of the run and, if it is resumed, the snapshot to continue from."""

    paths: RunPaths
    snapshot: Snapshot | None
    before: Environment | None  # the environment recorded in the snapshot
    tokenizer: Path | None  # folder of the tokenizer that the run trained, unless the configuration changes it
    open_settings: tuple[str, ...]  # recorded values of keys whose default may have changed since the first start


class _Output:
    """Where a run reports: sinks of events, a progress display, and warnings from before metrics.jsonl exists."""

    def __init__(self, sinks: list[Sink], progress: ReportProgress, is_main: bool) -> None:
        shown = sinks if is_main else []
        self.sinks, self.progress, self.early = sinks, progress, EventBuffer()
        self.warn = Sinks([*shown, self.early]).warn
        self.warn_unrecorded = Sinks(shown).warn  # for warnings that metrics.jsonl does not repeat


def train(request: TrainRequest, sinks: list[Sink], progress: ReportProgress) -> TrainingRun | TrainingResult:
    """Trains, or with `dry_run` prepares everything and returns the run. Raises ConfigError before any work is done.

    With several processes only rank 0 writes. An error on one rank ends all ranks with the same message.
    """
    config, notes = _configuration(request)
    training, world = config.training, request.world
    backend, backend_note = resolve_backend(training)
    group = join(world, backend, training.timeout_seconds, training.network_interface)
    with _reporting_failure(group), ExitStack() as until_end:
        output = _Output(sinks, progress, group.is_main)
        for note in filter(None, [*request.notes, *notes, *_launch_notes(config, world, group), backend_note]):
            output.warn(note)
        _require_same(config, group)
        _require_processes(config, group.size)
        target = _find_target(request, config, group, output.warn_unrecorded, until_end)
        config = change_config(config, target.open_settings)
        require_boards(training.report_to, output.warn)
        outcome = _train_in(target, config, request, group, output)
        group.shutdown()
        return outcome


@contextmanager
def _reporting_failure(group: Group) -> Iterator[None]:
    """Reports an error that ends this process to the other ranks; if rank 0 reports it, this process exits silently."""
    try:
        yield
    except BaseException as raised:
        error = out_of_memory(raised, SMALLER_RUN) or raised
        if not isinstance(error, SansGPUError):
            group.report_failure(error)
            raise
        reported = isinstance(error, LostRankError) and error.reported
        if reported:
            time.sleep(REPORT_SECONDS)
        if reported or group.report_failure(error):
            raise SystemExit(error.exit_code) from None
        raise error from None


def _launch_notes(config: Config, world: World, group: Group) -> Iterator[str]:
    """Yields notes about a launch that does not match the configuration, e.g. a different world size."""
    if world.note:
        yield world.note
    if (expected := config.training.world_size) not in (None, group.size):
        yield (
            f"training.world_size is {expected}, but the world size is {group.size}; start the run with --processes "
            f"{expected}, torchrun or mpirun, or remove training.world_size."
        )
    if config.outside_class and has_random_hashes():  # `sansgpu train` fixes the hash seed, a Python script cannot
        yield (
            f"PYTHONHASHSEED is not set, so results may differ between runs if {config.outside_class} iterates over "
            "sets of strings; set PYTHONHASHSEED=0 before Python starts."
        )


def _require_processes(config: Config, world_size: int) -> None:
    """Raises ConfigError if the configuration is not possible with this number of processes."""
    training = config.training
    if training.adapt_threads and world_size > 1:
        raise ConfigError("training.adapt_threads works only with a single process; set it to false.")
    if training.sync_every > 1 and config.settings.generates:
        raise ConfigError(
            f"training.sync_every is {training.sync_every}, but task {config.task} supports only 1; set it to 1."
        )
    if training.sync_every > 1 and world_size == 1:
        raise ConfigError(
            f"training.sync_every is {training.sync_every}, but there is only one process; set it to 1, or start "
            "several, e.g. with --processes 2."
        )
    later = config.model.freeze_after or config.model.trained_layers == AUTO
    if later and training.sharding == "full" and world_size > 1:
        raise ConfigError(
            "training.sharding is full, but layers cannot stop learning during such a run; set it to optimizer, or "
            "remove model.freeze_after and set model.trained_layers to a number or a share such as 0.5."
        )


def _require_same(config: Config, group: Group) -> None:
    """Raises ConfigError if the ranks' configurations differ, because they would train different models."""
    ours = flatten(config.model_dump(mode="json"))
    first = group.broadcast_object(lambda: ours)
    for key, value in ours.items():
        if first[key] != value:
            raise ConfigError(
                f"{key} is {value} on rank {group.rank} and {first[key]} on rank 0; start all processes with the same "
                "configuration."
            )


def _find_target(request: TrainRequest, config: Config, group: Group, warn: Warn, until_end: ExitStack) -> _RunTarget:
    """Finds, creates and locks the run folder on rank 0. After a launcher's restart, resumes from the last snapshot.

    `until_end` unlocks it, and removes what was created if the run is refused before it writes anything else.
    """
    resume = request.resume or ("latest" if group.restarted else None)

    def find() -> dict[str, Any]:
        folder = choose_output(request.output_dir, request.config_file, resume, dry_run=request.dry_run)
        paths = run_paths(folder, config)
        require_unclaimed_folders(paths)
        if not request.dry_run:
            claim_run(paths, bool(resume), until_end)
        snapshot = find_snapshot(paths.snapshots, resume, warn) if resume else None
        if resume and snapshot is None:
            warn(f"{folder} has no snapshot yet; training starts from the first step.")
        recorded = recorded_values(paths.config) if snapshot and paths.config.is_file() else None
        return {
            "folder": str(folder),
            "snapshot": str(snapshot.folder) if snapshot else None,
            "before": snapshot.environment() if snapshot else None,
            "keeps_tokenizer": recorded is not None and _keeps_tokenizer(config, recorded),
            "open": [] if recorded is None else _open_settings(config, recorded),
        }

    found = group.broadcast_object(find)
    paths = run_paths(Path(found["folder"]), config)
    return _RunTarget(
        paths,
        Snapshot(Path(found["snapshot"])) if found["snapshot"] else None,
        found["before"],
        paths.tokenizer if found["keeps_tokenizer"] else None,
        tuple(found["open"]),
    )


def _keeps_tokenizer(config: Config, recorded: dict[str, Any]) -> bool:
    before, now = recorded.get("data") or {}, config.data
    return (before.get("tokenizer"), before.get("vocab_size")) == (now.tokenizer, now.vocab_size)


def _open_settings(config: Config, recorded: dict[str, Any]) -> list[str]:
    """Returns the recorded values of keys that are not set, and whose default depends on the data or the model."""
    found: list[str] = task_of(config).recorded_settings(config, recorded)
    before = recorded.get("training") or {}
    if before.get("learning_rate") is not None and "learning_rate" not in config.training.model_fields_set:
        found.append(f"training.learning_rate={before['learning_rate']}")
    if before.get("optimizer") is not None and config.training.optimizer == "auto":
        found.append(f"training.optimizer={before['optimizer']}")
    model, layers = recorded.get("model") or {}, config.model.trained_layers
    keys = ["keep_activations"] if layers is not None and config.model.keep_activations is None else []
    keys = ["trained_layers", "freeze_after", "keep_activations"] if layers == AUTO else keys
    return found + [f"model.{key}={json.dumps(model.get(key))}" for key in keys]


def _train_in(
    target: _RunTarget, config: Config, request: TrainRequest, group: Group, output: _Output
) -> TrainingRun | TrainingResult:
    options = ResolveOptions("begin" if request.force else "refuse", tokenizer=target.tokenizer)
    run = resolve_run(config, output.progress, output.warn, options, target.before, group)
    run = replace(run, paths=target.paths, started=request.started)
    if group.is_main:
        _require_disk(run)
    output.progress("building the model", 0, 0)
    task = task_of(config)(run.config, run.corpus, effective_batch(run.config.training))
    for note in task.notes:
        output.warn(note)
    sharding = config.training.sharding
    if group.size == 1 and sharding != "none":
        output.warn(
            f"training.sharding {sharding} has no effect in a single process; start several, e.g. with --processes 2."
        )
    elif sharding == "full" and config.training.sample_tokens:
        output.warn(
            "no text samples are generated, because training.sharding full splits the model over the processes; set "
            "training.sample_tokens to 0."
        )
    if request.dry_run:
        return run
    gemm = sum(group.all_gather_object(run.peak_gemm_rate()))
    run = replace(run, config=with_absolute_paths(run.config), gemm_flops_per_second=gemm)
    return _run(run, task, target.snapshot, request, output)


def _configuration(request: TrainRequest) -> tuple[Config, list[str]]:
    """Returns the requested configuration, or else the one that the resumed run recorded, with notes."""
    if request.config is not None:
        return change_config(request.config, request.overrides) if request.overrides else request.config, []
    file = request.config_file
    if request.resume:
        folder = choose_output(request.output_dir, file, request.resume, dry_run=True)  # only rank 0 writes there
        recorded = recorded_file(folder, request.resume)
        # A run that was killed before it recorded its configuration may have got all settings from the command line.
        if file is None and recorded is None and not (request.overrides and folder.is_dir()):
            raise no_run_to_resume(folder)
        if file is None and recorded is not None:
            require_allowed(load_config(recorded, request.overrides, trusted=False)[0], recorded, request.overrides)
            # Loaded again, because a class outside the package is imported now and may declare defaults.
            return load_config(recorded, request.overrides, find_beside=False, processes=request.world.size)
    return load_config(file, request.overrides, processes=request.world.size)


def _run(
    run: TrainingRun, task: Task, snapshot: Snapshot | None, request: TrainRequest, output: _Output
) -> TrainingResult:
    execution, paths = run.execution, run.paths
    set_matmul_precision(task.model, execution.precision)
    where = execution.device, execution.precision, run.cache, output.progress, execution.group
    if run.config.model.freezes_at_start and (problem := keep_activations(run, task, output.progress)):
        output.warn(problem)
    if isinstance(task, ComparedWithReference):
        task.compute_reference(*where)
    if snapshot is None and execution.group.is_main and isinstance(task, InitializedFromData):
        task.initialize(output.progress)  # the other ranks receive the weights
    if execution.compile == "on":
        compile_blocks(task.model)
    sinks = Sinks(output.sinks)
    trainer = Trainer(task, run, sinks, request.controls, request.monitor.mean, output.progress)
    if snapshot:
        trainer.resume(snapshot, request.strict)  # before any file of the old run is overwritten
    if not execution.group.is_main:
        return trainer.train()
    resumed = {"resumed_from": snapshot.folder.name} if snapshot else {}
    if snapshot:
        snapshot = _make_newest(snapshot, paths, sinks.warn)
    _write_run_files(run, task)
    step = snapshot.step if snapshot else None
    metrics = MetricsFile(paths.metrics, step)
    sinks.add(metrics)
    sinks.hold()  # the start event is the first
    if reason := flush_refusal(paths.root):
        sinks.warn(
            f"the file system of {paths.root} does not flush folders to disk ({reason}), so a power failure may lose "
            "the newest snapshots; choose an --output-dir on another disk if that matters."
        )
    _add_loggers(sinks, run.config, paths, step)
    request.monitor.start(paths.root.absolute(), [execution.group.peers[rank] for rank in execution.group.local_ranks])
    try:
        sinks.release({**_start_event(run, step or 0), "expected_steps": trainer.expected_steps, **resumed})
        for event in output.early.events if snapshot is None else ():  # the other sinks already received them
            metrics.emit(event)
        end = trainer.train()
        output.progress("writing the report", 0, 0)
        from sansgpu.jobs.report import write_run_report  # its modules would delay the first step

        write_run_report(paths, partial(sinks.warn, cause="report"))
        return end
    finally:
        request.monitor.stop()
        sinks.close()


def _start_event(run: TrainingRun, step: int) -> Event:
    start = {"event": "start", "step": step, "time": now(), "task": run.config.task, "output_dir": str(run.paths.root)}
    gemm = {"gemm_flops_per_second": run.gemm_flops_per_second}
    return {**start, **run.facts(), **run.execution_facts(), **gemm}


def _make_newest(snapshot: Snapshot, paths: RunPaths, warn: Warn) -> Snapshot:
    """Moves snapshots of later steps to an abandoned branch, so that `snapshot` becomes the newest."""
    newest, abandoned = switch_to(snapshot, paths)
    for folder in abandoned:
        steps = [later.folder.name for later in snapshots(folder)]
        warn(
            f"{steps[0]}{f' to {steps[-1]}' if len(steps) > 1 else ''}: moved to {folder}, because the run resumes "
            f"from an earlier step; resume from one with --resume {folder.name}/{steps[-1]}, or delete them with "
            "`sansgpu snapshots prune --abandoned`."
        )
    return newest


def _write_run_files(run: TrainingRun, task: Task) -> None:
    paths = run.paths
    with write_failures_as(ConfigError, paths.root, "--output-dir"):
        mark_run(paths, run.config)
        with atomic_write(paths.config) as partial:
            save_config(run.config, partial)
        environment = describe_machine(run.execution.environment())
        write_text(paths.environment, json.dumps(environment, indent=2) + "\n")
        with OutputFolder(paths.tokenizer, "tokenizer").replace() as new:
            task.save_tokenizer(new)


def _add_loggers(sinks: Sinks, config: Config, paths: RunPaths, step: int | None) -> None:
    for name in filter(is_installed, config.training.report_to):
        if name == "tensorboard":
            sinks.add_made(name, partial(TensorBoard, paths.tensorboard, step))
        else:
            from sansgpu.events.trackers import TrackedRun, trackers

            values = config.model_dump(mode="json")
            tracked = TrackedRun(paths.root.absolute().name, paths.root, values, is_resumed=step is not None)
            sinks.add_made(name, trackers(tracked)[name])
    if (server := find_status_server()) is not None:
        from sansgpu.events.trackers import InBackground
        from sansgpu.events.trainjob import TrainJobStatus

        sinks.add(InBackground("the TrainJob's status", partial(TrainJobStatus, *server)))


def _require_disk(run: TrainingRun) -> None:
    snapshots, keep_last = run.paths.snapshots, run.config.training.keep_last
    needed, free = run.memory.snapshot * (keep_last + 2), free_disk_bytes(snapshots.absolute())
    if needed > free:
        raise ConfigError(
            f"{keep_last + 2} snapshots need {needed / 1e9:.1f} GB, but {snapshots} has {free / 1e9:.1f} GB "
            "free; lower training.keep_last or choose another --output-dir."
        )
