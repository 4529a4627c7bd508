"""Hyperparameter search with Optuna."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from filelock import FileLock
from pydantic import BaseModel, ConfigDict

from sansgpu.config import (
    Config,
    ConfigError,
    SansGPUError,
    Space,
    acting_values,
    change_config,
    load_config,
    load_space,
    measure_of,
)
from sansgpu.config.plain_data import InvalidDataError, read_json
from sansgpu.data.shards import ReportProgress
from sansgpu.jobs.tune.result import result_of, write_files
from sansgpu.jobs.tune.study import LOCK_SECONDS, ClaimedTrial, Study, require_same
from sansgpu.jobs.tune.trial import Length, Outcome, TrialRun, chosen_config, trial_config
from sansgpu.machine.probe import resolve_threads
from sansgpu.planning.estimate import plan_prepared
from sansgpu.planning.forecast import done_at, forecast_of, length_of
from sansgpu.planning.prepare import prepare
from sansgpu.planning.set_up import Warn
from sansgpu.reporting.files import write_text
from sansgpu.reporting.marks import FolderMark, write_mark
from sansgpu.reporting.outputs import require_folder, require_no_links
from sansgpu.train.interrupt import Interrupt
from sansgpu.train.run_folders import RUNS, require_writable

MIN_EVALUATIONS, DEFAULT_EVALUATIONS = 5, 8  # per trial: with fewer than the first, pruning needs the second
MAX_IDENTICAL_FAILURES = 3  # at the start of a search, before it stops
POLL_SECONDS = 0.2  # between checks for a signal

Values = dict[str, Any]
Show = Callable[[Values], None]  # receives a `tune` event with `space` and estimate, then the trials' events


@dataclass(frozen=True)
class TuneRequest:
    """Arguments of the tune command."""

    config_file: Path | None
    overrides: tuple[str, ...]
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


def tune(request: TuneRequest, progress: ReportProgress, show: Show, warn: Warn) -> Values | Interrupted:
    """Starts or resumes a search, and writes best.yaml, trials.csv and report.html.

    With `dry_run`, returns the space and the estimate. Raises ConfigError before any work is done, and SansGPUError if
    no trial can be trained.
    """
    config, notes = load_config(request.config_file, request.overrides)
    for note in notes:
        warn(note)
    name = request.config_file.stem if request.config_file else "default"
    folder = request.output_dir or RUNS / f"tune-{name}"
    original, config = config, _for_worker(config, request)
    space = load_space(request.space_file, config)
    recorded = _recorded_length(folder, config, space)  # raises before anything is written there
    if request.dry_run:
        length = recorded or _planned_length(config, progress, warn)
        return {"space": _described(space), **_estimate(request, length.seconds, 0)}
    require_writable(folder)
    with FileLock(folder / ".lock", timeout=LOCK_SECONDS):
        length = _recorded_length(folder, config, space) or _planned_length(config, progress, warn)
        _record(folder, config, space, length)
        study = Study(folder, space, request.pruner, config.training.seed, length)
        default = {key: _value(config, key) for key in space}
        study.begin(default)
    done = study.finished()
    about = {"event": "tune", "folder": str(folder), "finished": done, "evaluations": length.evaluations}
    evaluated = config.training.eval_steps != max(1, round(length.steps / length.evaluations))
    show(
        {
            **about,
            "evaluations_changed": evaluated,
            "space": _described(space),
            **_estimate(request, study.trial_seconds() or length.seconds, done),
        }
    )
    search = _Search(study, config, length, measure_of(space), request, show)
    signal = search.run()
    if signal is not None:
        return Interrupted(signal, folder)
    result = result_of(study, config, default, name, search.measure)
    write_files(result, study, lambda values: chosen_config(original, values, length))
    return result


def _for_worker(config: Config, request: TuneRequest) -> Config:
    """Sets the threads of a worker. Raises ConfigError if the arguments or the configuration do not allow a search."""
    training = config.training
    if request.trials is None and request.hours is None:
        raise ConfigError("the search has no limit; give --trials N, --hours H or both.")
    if request.hours is not None and request.hours <= 0:
        raise ConfigError(f"--hours is {request.hours:g}, but must be positive; give a time budget, e.g. 0.5 or 8.")
    if training.until is not None:
        raise ConfigError("training.until does not work with several trials; set training.max_hours instead.")
    if training.eval_batches is not None:
        raise ConfigError(
            "training.eval_batches counts micro-batches, whose size may differ between trials, so trials would be "
            "evaluated on different texts; set it to null, and lower data.validation_split if evaluations are slow."
        )
    if request.workers == 1:
        return config
    threads = resolve_threads(training)
    if request.workers > threads:
        raise ConfigError(f"--workers is {request.workers}, but there are only {threads} threads; lower --workers.")
    return change_config(config, (f"training.threads={threads // request.workers}",))


def _planned_length(config: Config, progress: ReportProgress, warn: Warn) -> Length:
    """Returns a trial's length, with its duration from a timing. Raises ConfigError if it does not fit into memory."""
    prepared = prepare(config, None, progress, warn, timed="always")
    plan = plan_prepared(prepared)
    steps, planned_tokens = plan["total_steps"], plan["total_tokens"]
    if steps is None or planned_tokens is None:
        raise ConfigError(
            "the model is too large to time here, so max_hours cannot be converted to steps; set training.max_steps."
        )
    most, every = config.training.max_steps, config.training.eval_steps
    # One token less than planned, because the plan's number is rounded and the limit must not add a step.
    tokens = None if most is None else max(1, planned_tokens * most // steps - 1)
    evaluations = round(steps / every) if every and steps / every >= MIN_EVALUATIONS else DEFAULT_EVALUATIONS
    length = Length(steps, tokens, min(evaluations, steps), None)
    if prepared.timing is None:
        return length
    training = trial_config(config, {}, length).training
    changed = {key: getattr(training, key) for key in ("eval_steps", "save_steps", "sample_tokens")}
    own = prepared.config.training.model_copy(update=changed)
    trial = replace(prepared, config=prepared.config.model_copy(update={"training": own}))
    return replace(length, seconds=length_of(trial, forecast_of(trial))[1])


class _RecordedLength(BaseModel):
    model_config = ConfigDict(strict=True, allow_inf_nan=False)
    steps: int
    tokens: int | None
    evaluations: int
    seconds: float | None


class _RecordedSearch(BaseModel):
    """Schema of tune.json."""

    model_config = ConfigDict(strict=True)
    configuration: dict[str, Any]
    space: dict[str, Any]
    length: _RecordedLength


def _recorded_length(folder: Path, config: Config, space: Space) -> Length | None:
    """Returns the trial length of the search in `folder`, or None. Raises ConfigError if it contains anything else."""
    file = folder / "tune.json"
    require_folder(folder, "search")
    names = ("study.db", "trials", ".lock", "best.yaml", "trials.csv", "report.html")
    require_no_links([file, *(folder / name for name in names)])
    if file.is_file():
        try:
            recorded = read_json(file, _RecordedSearch)
        except (OSError, InvalidDataError) as error:
            raise ConfigError(f"{file} cannot be read: {error}; choose another --output-dir.") from None
        require_same(folder, recorded, _identity(config, space))
        return Length(**{field.name: recorded["length"][field.name] for field in fields(Length)})
    return None


def _record(folder: Path, config: Config, space: Space, length: Length) -> None:
    try:
        values = {**_identity(config, space), "length": length.to_json()}
        write_mark(folder, FolderMark("search"))
        write_text(folder / "tune.json", json.dumps(values, indent=2) + "\n")
    except OSError as error:
        raise ConfigError(f"{folder} cannot be written: {error.strerror}; choose another --output-dir.") from None


def _identity(config: Config, space: Space) -> Values:
    """Returns the values that must match for a search to be resumed."""
    return {"configuration": acting_values(config), "space": {key: p.to_json() for key, p in space.items()}}


def _described(space: Space) -> dict[str, str]:
    return {key: str(parameter) for key, parameter in space.items()}


def _value(config: Config, key: str) -> Any:
    section, _, name = key.rpartition(".")
    return getattr(getattr(config, section), name)


def _estimate(request: TuneRequest, seconds_each: float | None, done: int, spent: float = 0.0) -> Values:
    """Estimates the remaining seconds after `spent` seconds, assuming that no trial is pruned."""
    left = None if request.trials is None else max(0, request.trials - done)
    limits = [] if request.hours is None else [max(0.0, request.hours * 3600 - spent)]
    if left is not None and seconds_each is not None:
        limits.append(-(-left // request.workers) * seconds_each)
    seconds = min(limits, default=None)
    return {
        "trials": request.trials,
        "trial_seconds": seconds_each,
        "seconds": seconds,
        "finish": None if seconds is None else done_at(seconds),
    }


class _Search:
    """Workers that train trials until the budget is spent, a signal arrives, or the first trials all fail alike."""

    def __init__(
        self, study: Study, config: Config, length: Length, measure: str, request: TuneRequest, show: Show
    ) -> None:
        self.study, self.measure = study, measure
        self._config, self._length, self._request, self._show = config, length, request, show
        self._began = time.monotonic()
        self._lock = threading.Lock()  # guards events, _running and _stopped
        self._running: list[TrialRun] = []
        self._stopped = False

    def run(self) -> int | None:
        """Returns the signal that stopped the search, if any. Raises SansGPUError if all first trials fail alike."""
        with Interrupt() as interrupt, ThreadPoolExecutor(self._request.workers) as pool:
            pending: Sequence[Future[None]] = [pool.submit(self._work) for _ in range(self._request.workers)]
            try:
                while pending:
                    done, rest = wait(pending, POLL_SECONDS, FIRST_EXCEPTION)
                    for future in done:
                        future.result()
                    pending = list(rest)
                    if interrupt.signal is not None or self._late():
                        self._stop()
            finally:
                self._stop()  # also ends the other workers if one failed
            return interrupt.signal

    def _late(self) -> bool:
        hours = self._request.hours
        return hours is not None and self._spent() >= hours * 3600

    def _spent(self) -> float:
        return time.monotonic() - self._began

    def _has_time(self) -> bool:
        """Returns whether another trial would finish in time. Without a completed trial the answer is yes."""
        hours, seconds = self._request.hours, self.study.trial_seconds()
        return hours is None or seconds is None or self._spent() + seconds <= hours * 3600

    def _stop(self) -> None:
        with self._lock:
            self._stopped = True
            for run in self._running:
                run.stop("stopped")

    def _work(self) -> None:
        while (
            not self._stopped and self._has_time() and (claimed := self.study.claim(self._request.trials)) is not None
        ):
            outcome = self._train(claimed)
            self.study.finish(claimed, outcome, self.measure)
            best, done = self.study.best(), self.study.finished()
            left = _estimate(self._request, self.study.trial_seconds(), done, self._spent())
            self._emit(
                {
                    "event": "trial_end",
                    "trial": claimed.number,
                    "state": outcome.state,
                    "loss": outcome.measured.get(self.measure),
                    "parameters": claimed.values,
                    "seconds": outcome.seconds,
                    "why": outcome.why,
                    "best": None if best is None else {"trial": best.number, "loss": best.value},
                    "finished": done,
                    "seconds_left": left["seconds"],
                    "finish": left["finish"],
                }
            )
            if outcome.state == "failed":
                self._raise_if_all_fail()

    def _train(self, claimed: ClaimedTrial) -> Outcome:
        try:
            config = trial_config(self._config, claimed.values, self._length)
        except ConfigError as error:
            return Outcome("failed", {}, 0.0, str(error).removeprefix("the configuration: "))
        run = TrialRun(self.study.run_folder(claimed.number), config)
        with self._lock:
            if self._stopped:
                return Outcome("stopped", {}, 0.0)
            self._running.append(run)
        about = {"event": "trial_begin", "trial": claimed.number, "parameters": claimed.values}
        self._emit({**about, "resumed": claimed.resumed, "step": run.step()})
        steps = 0

        def on_event(event: Values) -> None:
            nonlocal steps
            steps = event.get("total_steps") or steps
            if event["event"] == "eval":
                self._report(claimed, run, event, steps)
            elif event["event"] == "step":
                self._emit({**event, "event": "trial_step", "trial": claimed.number})

        try:
            return run.train(claimed.resumed, on_event)
        finally:
            with self._lock:
                self._running.remove(run)

    def _report(self, claimed: ClaimedTrial, run: TrialRun, event: Values, steps: int) -> None:
        loss = event[self.measure]
        if loss is not None and self.study.report(claimed, event["step"] / max(1, steps), loss):
            run.stop("pruned")

    def _raise_if_all_fail(self) -> None:
        """Raises SansGPUError if the first trials all failed with the same message, apart from numbers."""
        first = self.study.trials()[:MAX_IDENTICAL_FAILURES]
        whys = [trial.user_attrs.get("why") for trial in first]
        alike = {re.sub(r"-?(\d[\d.,e+-]*|nan|inf)", "#", why) for why in whys if why}
        if len(first) == MAX_IDENTICAL_FAILURES and all(whys) and len(alike) == 1:
            raise SansGPUError(f"the first {MAX_IDENTICAL_FAILURES} trials have all failed: {whys[-1]}")

    def _emit(self, event: Values) -> None:
        with self._lock:
            self._show(event)
