"""Hyperparameter search with Optuna: its plan, its trials, and the files best.yaml, trials.csv and report.html."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import optuna
from filelock import FileLock
from pydantic import BaseModel, ConfigDict

from sansgpu.config import ConfigError, Override, SansGPUError, acting_values, change_config, save_config, setting
from sansgpu.config.paths import RUNS
from sansgpu.config.plain_data import InvalidDataError
from sansgpu.config.schema import Config
from sansgpu.config.training import require_hours
from sansgpu.config.wording import counted
from sansgpu.events.progress import ReportProgress, Warn
from sansgpu.files.atomic import atomic_write, cleanup_of, write_failures_as, write_text
from sansgpu.files.ownership import LOCK, OutputFolder, require_no_links
from sansgpu.files.reading import read_validated
from sansgpu.jobs.tune.search import (
    LOCK_SECONDS,
    STATES,
    UNCHANGED_CONFIG,
    Search,
    SearchBudget,
    Show,
    Study,
    require_same,
)
from sansgpu.jobs.tune.search_space import Space, load_space, measure_of
from sansgpu.jobs.tune.trial import LENGTH_KEYS, Length, chosen_config, trial_config, trial_steps
from sansgpu.machine.memory import effective_batch
from sansgpu.machine.probe import resolve_threads
from sansgpu.planning.forecast import describe_plan, forecast_of, length_of
from sansgpu.planning.resolve import ResolveOptions, resolve_run, with_optimizer
from sansgpu.tasks.configuration import load_config
from sansgpu.tasks.registry import task_of
from sansgpu.train.run_folders import with_absolute_paths
from sansgpu.train.schedule import warmup_problem
from sansgpu.views.tune import SearchBegin, SearchEstimate, SearchResult, TrialRow, write_tune_report

# Evaluations per trial. If the configuration asks for fewer than the minimum, the search uses the default, because
# pruning needs several.
MIN_EVALUATIONS, DEFAULT_EVALUATIONS = 5, 8
MIN_TRIALS_FOR_IMPORTANCE = 6

Values = dict[str, Any]


@dataclass(frozen=True)
class TuneRequest:
    """Arguments of the tune command."""

    config_file: Path | None
    overrides: tuple[Override, ...]
    space_file: Path | None
    trials: int | None
    hours: float | None
    workers: int
    pruner: str
    output_dir: Path | None
    dry_run: bool


@dataclass(frozen=True)
class Interrupted:
    """Result of a search that a signal stopped; the same command resumes it."""

    signal: int
    folder: Path


def tune(
    request: TuneRequest, progress: ReportProgress, show: Show, warn: Warn
) -> SearchResult | SearchEstimate | Interrupted:
    """Starts or resumes a search, and writes best.yaml, trials.csv and report.html.

    With `dry_run`, returns the estimate. Raises ConfigError before any work is done, and SansGPUError if
    no trial can be trained.
    """
    config, notes = load_config(request.config_file, request.overrides)
    for note in notes:
        warn(note)
    name = request.config_file.stem if request.config_file else "default"
    folder = request.output_dir or RUNS / f"tune-{name}"
    original, config = config, _for_worker(config, request)
    resolved = _with_optimizer(config)
    space = load_space(request.space_file, resolved)
    own_space = space if request.space_file else {}
    recorded = _recorded_length(folder, config, space)  # raises before anything is written there
    if request.dry_run:
        length = recorded or _planned_length(config, own_space, progress, warn)
        return _budget(request, space).estimate(length.seconds, 0)
    clean_up = cleanup_of(folder, LOCK)
    OutputFolder(folder, "search").make()
    with FileLock(folder / LOCK, timeout=LOCK_SECONDS), ExitStack() as until_recorded:
        until_recorded.callback(clean_up)
        length = _recorded_length(folder, config, space) or _planned_length(config, own_space, progress, warn)
        _record(folder, config, space, length)
        study = Study(folder, space, request.pruner, config.training.seed, length)
        default = {key: setting(resolved, key) for key in space}
        study.begin(default)
    done, evaluations, budget = study.finished(), length.evaluations, _budget(request, space)
    changed = config.training.eval_steps != max(1, round(length.steps / evaluations))
    estimate = budget.estimate(study.trial_seconds() or length.seconds, done)
    show(SearchBegin(str(folder), done, evaluations, changed, estimate))
    measure = measure_of(space)
    signal = Search(study, config, length, measure, budget, show).run()
    if signal is not None:
        return Interrupted(signal, folder)
    result = _result_of(study, config, default, name, measure)
    _write_files(result, study, lambda values: chosen_config(original, values, length))
    return result


def _budget(request: TuneRequest, space: Space) -> SearchBudget:
    described = {key: str(parameter) for key, parameter in space.items()}
    return SearchBudget(described, request.trials, request.hours, request.workers)


def _for_worker(config: Config, request: TuneRequest) -> Config:
    """Sets the threads of a worker. Raises ConfigError if the arguments or the configuration do not allow a search."""
    training = config.training
    if request.trials is None and request.hours is None:
        raise ConfigError("the search has no limit; add --trials N, --hours H or both.")
    if request.hours is not None:
        require_hours(request.hours)
    if training.until is not None:
        raise ConfigError("training.until cannot be used for several trials; set training.max_hours instead.")
    if training.eval_batches is not None:
        raise ConfigError(
            "training.eval_batches counts micro-batches, whose size may differ between trials, so trials would be "
            "evaluated on different examples; set it to null, and lower data.validation_split if evaluations are slow."
        )
    if request.workers == 1:
        return config
    threads = resolve_threads(training)
    if request.workers > threads:
        raise ConfigError(
            f"--workers is {request.workers}, but only {counted(threads, 'thread')} can run; lower --workers."
        )
    return change_config(config, [("training.threads", threads // request.workers)])


def _with_optimizer(config: Config) -> Config:
    """Resolves the optimizer `auto`; an unset learning rate becomes the default of the resolved optimizer."""
    if config.training.optimizer != "auto":
        return config
    tokens = effective_batch(config.training) * config.window
    chosen, _ = with_optimizer(task_of(config).with_vocabulary(config), tokens)
    return change_config(config, [("training.optimizer", chosen.training.optimizer)])


def _planned_length(config: Config, own_space: Space, progress: ReportProgress, warn: Warn) -> Length:
    """Returns a trial's length, with its duration from a timing. `own_space` is what the user asks to search.

    Raises ConfigError if a trial does not fit into memory, or would end during its warmup.
    """
    run = resolve_run(config, progress, warn, ResolveOptions(timed="always"))
    if warmup_problem(config.training, run.total_steps):
        raise ConfigError(
            "all trials would end during the warmup, so their ranking would be meaningless; lower "
            "training.warmup_steps or train for longer."
        )
    plan = describe_plan(run, progress)
    steps, planned_tokens = plan["total_steps"], plan["total_tokens"]
    if steps is None or planned_tokens is None:
        raise ConfigError(
            "the model is too large to time on this machine, so max_hours cannot be converted to steps; set "
            "training.max_steps."
        )
    most, every = config.training.max_steps, config.training.eval_steps
    # One token less than planned, because the plan's number is rounded and the limit must not add a step.
    tokens = None if most is None else max(1, planned_tokens * most // steps - 1)
    evaluations = round(steps / every) if every and steps / every >= MIN_EVALUATIONS else DEFAULT_EVALUATIONS
    length = Length(steps=steps, tokens=tokens, evaluations=min(evaluations, steps), seconds=None)
    _require_short_warmups(config, own_space, length)
    if run.timing is None:
        return length
    training = trial_config(config, {}, length).training
    changed = {key: getattr(training, key) for key in ("eval_steps", "save_steps", "sample_tokens")}
    trial = replace(run, config=run.config.with_values("training", **changed))
    return length.model_copy(update={"seconds": length_of(trial, forecast_of(trial))[1]})


def _require_short_warmups(config: Config, space: Space, length: Length) -> None:
    """Raises ConfigError if trials with some values of the space would end during their warmup."""
    searched = [space[key] for key in LENGTH_KEYS if key in space]
    for ends in product(*(parameter.extremes() for parameter in searched)):
        values = {parameter.key: value for parameter, value in zip(searched, ends, strict=True)}
        try:
            chosen = chosen_config(config, values, length)
        except ConfigError:  # the values contradict each other, so their trials fail
            continue
        steps = max(1, int(trial_steps(config, chosen, length)))
        if warmup_problem(chosen.training, steps):
            named = ", ".join(f"{key} {value}" for key, value in values.items())
            raise ConfigError(
                f"trials with {named} would end after {counted(steps, 'step')}, during their warmup of "
                f"{counted(chosen.training.warmup_steps, 'step')}, so their ranking would be meaningless; lower "
                "training.warmup_steps in the search space, or train for longer."
            )


class _RecordedSearch(BaseModel):
    """Schema of tune.json."""

    model_config = ConfigDict(strict=True)
    configuration: dict[str, Any]
    space: dict[str, Any]
    length: Length


def _recorded_length(folder: Path, config: Config, space: Space) -> Length | None:
    """Returns the trial length of the search in `folder`, or None. Raises ConfigError if it contains anything else."""
    file = folder / "tune.json"
    OutputFolder(folder, "search").require()
    names = ("study.db", "trials", ".lock", "best.yaml", "trials.csv", "report.html")
    require_no_links([file, *(folder / name for name in names)])
    if file.is_file():
        try:
            recorded = read_validated(file, _RecordedSearch)
        except (OSError, InvalidDataError) as error:
            raise ConfigError(f"{file} cannot be read: {error}; choose another --output-dir.") from None
        require_same(folder, recorded, _identity(config, space))
        return Length.model_validate(recorded["length"])
    return None


def _record(folder: Path, config: Config, space: Space, length: Length) -> None:
    values = {**_identity(config, space), "length": length.model_dump()}
    with write_failures_as(ConfigError, folder, "--output-dir"):
        OutputFolder(folder, "search").record()
        write_text(folder / "tune.json", json.dumps(values, indent=2) + "\n")


def _identity(config: Config, space: Space) -> Values:
    """Returns the values that must match for a search to be resumed."""
    return {"configuration": acting_values(config), "space": {key: p.to_json() for key, p in space.items()}}


def _result_of(study: Study, config: Config, default: Values, name: str, measure: str) -> SearchResult:
    """Returns the result that `tune --json` prints. `default` holds the unchanged configuration's values.

    Raises SansGPUError if no trial was completed.
    """
    rows = [_row(trial, default, measure) for trial in study.trials() if trial.state != optuna.trial.TrialState.WAITING]
    best = study.best()
    if best is None:
        why = next((row.why for row in rows if row.why), "the time budget was too short; raise --hours.")
        raise SansGPUError(f"no trial was completed: {why}")
    order = {"done": 0, "pruned": 1, "unfinished": 2, "failed": 3}
    rows.sort(key=lambda row: (order[row.state], row.loss is None, row.loss or 0.0, row.trial))
    unchanged = next((row for row in rows if row.trial == 0 and row.state == "done"), None)
    lowest, before = rows[0].loss, unchanged.loss if unchanged else None
    return SearchResult(
        name=name,
        task=config.task,
        measure=measure,
        folder=str(study.folder),
        best=rows[0],
        default=unchanged,
        gain=None if not before or lowest is None else (before - lowest) / abs(before),
        importance=_importance(study),
        seconds=sum(row.seconds for row in rows),
        trials=rows,
        files=[str(study.folder / name) for name in ("best.yaml", "trials.csv", "report.html")],
    )


def _write_files(result: SearchResult, study: Study, chosen: Callable[[Values], Config]) -> None:
    """Writes best.yaml, trials.csv and report.html. Raises SansGPUError if they cannot be written."""
    folder = study.folder
    with write_failures_as(SansGPUError, folder):
        with atomic_write(folder / "best.yaml") as partial:
            save_config(with_absolute_paths(chosen(result.best.parameters)), partial)
        _write_csv(result, study)
        write_tune_report(result, study.optuna_study, folder)


def _row(trial: optuna.trial.FrozenTrial, default: Values, measure: str) -> TrialRow:
    measured = trial.user_attrs.get("measured", {})
    return TrialRow(
        trial=trial.number,
        state=STATES.get(trial.state, "unfinished"),
        loss=measured.get(measure),
        bits_per_byte=measured.get("bits_per_byte"),
        step=measured.get("step"),
        parameters=default if UNCHANGED_CONFIG in trial.user_attrs else trial.params,
        seconds=trial.user_attrs.get("seconds", 0.0),
        why=trial.user_attrs.get("why"),
    )


def _importance(study: Study) -> dict[str, float]:
    """Returns Optuna's hyperparameter importances, or nothing if too few trials were completed."""
    done = [trial for trial in study.trials() if trial.state == optuna.trial.TrialState.COMPLETE]
    if len(done) < MIN_TRIALS_FOR_IMPORTANCE:
        return {}
    return dict(optuna.importance.get_param_importances(study.optuna_study))


def _write_csv(result: SearchResult, study: Study) -> None:
    columns = ("trial", "state", "loss", "bits_per_byte", "step", "seconds", "why")
    with atomic_write(study.folder / "trials.csv") as partial, partial.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow([*columns, *result.keys])
        for row in result.trials:
            writer.writerow([*(getattr(row, name) for name in columns), *map(row.parameters.get, result.keys)])
